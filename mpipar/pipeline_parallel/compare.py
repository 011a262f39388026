"""All schedules side by side for one pipeline, and a schedule drawn in text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpipar.errors import ScheduleError
from mpipar.pipeline_parallel.costs import Costs, Number
from mpipar.pipeline_parallel.generate import SCHEDULE_NAMES, build_schedule, chunks_per_rank
from mpipar.pipeline_parallel.schedule import Schedule
from mpipar.pipeline_parallel.simulation import simulate
from mpipar.pipeline_parallel.timeline import Timeline

# In the picture every action takes one slot, an overlapped pair too.
_SLOTS = Costs(backward_us=1, pair_us=1)
_SEARCHED = ("zb-v", "auto")
_MOST_SEARCHED = 1 << 16


@dataclass(frozen=True)
class Figures:
    """What one schedule costs.

    Parameters
    ----------
    name : str
        The schedule.
    n_stages : int
        Stages (chunks) in all.
    makespan_us, longest_span_us : number
        Length of a step, and of the longest rank within it.
    bubble_over_ideal, bubble_over_total : number
        Idle time in the makespan, over work and over all time.
    span_bubble_over_total : number
        Idle time in the longest span over all time: Zero Bubble's rate for ZB-H2 and ZB-V.
    peak_memory : number
        Of the fullest rank, in whole stages.
    """

    name: str
    n_stages: int
    makespan_us: Number
    longest_span_us: Number
    bubble_over_ideal: Number
    bubble_over_total: Number
    span_bubble_over_total: Number
    peak_memory: Number

    @classmethod
    def of(cls, timeline: Timeline) -> Figures:
        """Figures of a timeline.

        Parameters
        ----------
        timeline : Timeline
            Simulated or measured.

        Returns
        -------
        Figures
            Exact where the timeline is.
        """
        return cls(
            timeline.schedule.name,
            timeline.schedule.n_stages,
            timeline.makespan,
            timeline.longest_span,
            timeline.bubble_over_ideal(),
            timeline.bubble_over_total(),
            timeline.bubble_over_total("longest_span"),
            max(timeline.peak_memory, default=0),
        )


def compare_schedules(
    n_ranks: int,
    n_microbatches: int,
    costs: Costs | None = None,
    *,
    n_chunks: int = 2,
    memory_limit: Number | None = None,
    names: Sequence[str] = SCHEDULE_NAMES,
) -> tuple[list[Figures], list[str]]:
    """Simulate every schedule of one pipeline.

    Parameters
    ----------
    n_ranks, n_microbatches : int
        Sizes.
    costs : Costs, optional
        Of a rank's whole share; schedules with chunks divide it.
    n_chunks : int
        Chunks of the interleaved schedule.
    memory_limit : number, optional
        For "auto".
    names : sequence of str
        Which schedules.

    Returns
    -------
    figures : list of Figures
        In the order of `names`.
    refused : list of str
        Why others are not defined at these sizes.
    """
    figures, refused = [], []
    for name in names:
        if name in _SEARCHED and n_ranks * n_microbatches > _MOST_SEARCHED:
            refused.append(f"{name} searches, which takes long at this size; ask for it by name")
            continue
        try:
            share = (costs or Costs()).per_chunk(chunks_per_rank(name, n_chunks))
            schedule = build_schedule(
                name,
                n_ranks,
                n_microbatches,
                n_chunks=n_chunks,
                costs=share,
                memory_limit=memory_limit,
            )
        except ScheduleError as error:
            refused.append(str(error))
            continue
        figures.append(Figures.of(simulate(schedule, share)))
    return figures, refused


def slot_grid(schedule: Schedule, n_slots: int = 32, n_ranks: int = 16) -> str:
    """A schedule as a table of ranks and slots, dots where a rank idles.

    Every action takes one slot here, whatever it costs; a pair shows as ``F4+B0``.

    Parameters
    ----------
    schedule : Schedule
        A valid schedule; its sends and receives are left out.
    n_slots, n_ranks : int
        How much is shown at most.

    Returns
    -------
    str
        One line per rank.
    """
    timeline = simulate(schedule, _SLOTS)
    total = int(timeline.makespan)
    shown = min(total, n_slots)
    rows = []
    for rank in range(min(schedule.n_ranks, n_ranks)):
        row = ["."] * shown
        low, high = int(schedule.offsets[rank]), int(schedule.offsets[rank + 1])
        for index in range(low, high):
            slot, action = int(timeline.start[index]), schedule.action(index)
            if slot < shown and action.kind.is_compute:
                row[slot] = str(action) if row[slot] == "." else f"{row[slot]}+{action}"
        rows.append(row)
    widths = [max(len(row[slot]) for row in rows) for slot in range(shown)]
    margin = len(f"rank {len(rows) - 1}")
    lines = []
    for rank, row in enumerate(rows):
        body = " ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        more = " ..." if total > shown else ""
        lines.append(f"{f'rank {rank}':<{margin}}  {body.rstrip()}{more}")
    if schedule.n_ranks > len(rows):
        lines.append(f"({schedule.n_ranks - len(rows)} more ranks)")
    if total > shown:
        lines.append(f"({total - shown} more slots)")
    return "\n".join(lines)
