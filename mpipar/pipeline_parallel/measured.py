"""A measured timeline beside its simulation: as text, and as a file that Perfetto opens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from mpipar.errors import ScheduleError
from mpipar.pipeline_parallel.action import Kind
from mpipar.pipeline_parallel.costs import Costs
from mpipar.pipeline_parallel.graph import Times
from mpipar.pipeline_parallel.schedule import Bools
from mpipar.pipeline_parallel.simulation import simulate
from mpipar.pipeline_parallel.text import format_schedule, parse_schedule
from mpipar.pipeline_parallel.timeline import Timeline
from mpipar.pipeline_parallel.trace import chrome_trace

_PARTS = {Kind.F: "forward_us", Kind.I: "input_us", Kind.W: "weight_us", Kind.B: "backward_us"}


def measured_costs(timeline: Timeline) -> Costs:
    """Costs under which a simulation says how long the same work takes without disturbance.

    Parameters
    ----------
    timeline : Timeline
        Of all ranks, measured.

    Returns
    -------
    Costs
        Median time of each kind on each stage, and of a pair; messages cost nothing, and an
        activation is held until its weight gradient is done.
    """
    s = timeline.schedule
    spent = np.asarray(timeline.end - timeline.start, np.float64) / timeline.ticks
    paired = s.overlapped.copy()
    paired[1:] |= s.overlapped[:-1]

    def median(which: Bools) -> float:
        return float(np.median(spent[which])) if which.any() else 0.0

    found: dict[str, Any] = {
        field: [median((s.kind == kind) & (s.stage == i) & ~paired) for i in range(s.n_stages)]
        for kind, field in _PARTS.items()
    }
    if s.overlapped.any():
        found["pair_us"] = median(s.overlapped)
    return Costs(**found, held_for_weight=1)


def predict(measured: Timeline) -> Timeline:
    """Simulate the schedule of a measured timeline with the times of its own actions.

    Parameters
    ----------
    measured : Timeline
        Of all ranks.

    Returns
    -------
    Timeline
        What the measured one is held against.
    """
    return simulate(measured.schedule, measured_costs(measured))


def compare_timelines(measured: Timeline, width: int = 96) -> str:
    """The simulated and the measured timeline of one schedule, on one scale.

    Parameters
    ----------
    measured : Timeline
        Of all ranks.
    width : int
        Characters of the longer one.

    Returns
    -------
    str
        Two pictures and a table; letters are kinds of computation, dots idle time.
    """
    both = {"simulated": predict(measured), "measured": measured}
    scale = width / max(float(t.makespan) for t in both.values())
    lines = []
    for name, timeline in both.items():
        lines.append(f"{name}, {float(timeline.makespan) / 1e3:.2f} ms")
        lines += [f"rank {rank}  {row}" for rank, row in enumerate(_bars(timeline, scale))]
    lines.append(f"{'':<10}{'makespan ms':>13}{'bubble/total':>14}  busy ms and peak of each rank")
    for name, timeline in both.items():
        ranks = [
            f"{float(busy) / 1e3:.2f} ({float(peak):g})"
            for busy, peak in zip(timeline.busy, timeline.peak_memory, strict=True)
        ]
        lines.append(
            f"{name:<10}{float(timeline.makespan) / 1e3:>13.2f}"
            f"{float(timeline.bubble_over_total()):>14.1%}  {', '.join(ranks)}"
        )
    return "\n".join(lines)


def _bars(timeline: Timeline, scale: float) -> list[str]:
    schedule, rows = timeline.schedule, []
    for rank in range(schedule.n_ranks):
        row = ["."] * max(1, round(float(timeline.makespan) * scale))
        for index in range(int(schedule.offsets[rank]), int(schedule.offsets[rank + 1])):
            action = schedule.action(index)
            if action.kind.is_compute:
                low = round(float(timeline.start_us(index)) * scale)
                high = max(low + 1, round(float(timeline.end_us(index)) * scale))
                letter = "P" if schedule.overlapped[index] else action.kind.name
                half = bool(index and schedule.overlapped[index - 1])
                row[low:high] = row[low:high] if half else letter * len(row[low:high])
        rows.append("".join(row))
    return rows


def save_measured(measured: Timeline, path: str | Path) -> None:
    """Write a measured timeline, and its simulation, as one Chrome trace.

    Parameters
    ----------
    measured : Timeline
        Of all ranks.
    path : str or Path
        A JSON file; `load_measured` reads it, and Perfetto shows both, rank by rank.
    """
    trace = chrome_trace(measured)
    n_ranks = measured.schedule.n_ranks
    for event in chrome_trace(predict(measured))["traceEvents"]:
        event["pid"] += n_ranks
        if "id" in event:
            event["id"] = f"simulated-{event['id']}"
        if event["name"] == "process_name":
            event["args"]["name"] = f"simulated {event['args']['name']}"
        if event["name"] == "process_sort_index":
            event["args"]["sort_index"] += n_ranks
        trace["traceEvents"].append(event)
    trace["mpipar"] = {
        "schedule": format_schedule(measured.schedule),
        "start_us": _rounded(measured.start),
        "end_us": _rounded(measured.end),
        "peak_memory": [float(peak) for peak in measured.peak_memory],
    }
    Path(path).write_text(json.dumps(trace), encoding="utf-8")


def _rounded(times: Times) -> list[float]:
    return [round(float(t), 3) for t in times]


def load_measured(path: str | Path) -> Timeline:
    """Read what `save_measured` wrote.

    Parameters
    ----------
    path : str or Path
        The file.

    Returns
    -------
    Timeline
        The measured one.

    Raises
    ------
    ScheduleError
        If the file cannot be read, or holds no measured timeline.
    """
    try:
        kept = json.loads(Path(path).read_text(encoding="utf-8"))["mpipar"]
        times = (np.array(kept["start_us"], float), np.array(kept["end_us"], float))
        peaks = tuple(kept["peak_memory"])
        return Timeline(parse_schedule(kept["schedule"]), *times, 1, peaks)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ScheduleError(f"{path} holds no measured timeline of a pipeline: {error!r}") from None
