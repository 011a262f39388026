"""A timeline as a Gantt picture: one row per rank, one labelled box per action."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from mpipar.errors import ScheduleError
from mpipar.pipeline_parallel.action import Kind
from mpipar.pipeline_parallel.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, told apart under the common colour-vision deficiencies; every box that
# is wide enough also has its letter.
_COLOURS: Final = {
    Kind.F: "#56B4E9",
    Kind.B: "#D55E00",
    Kind.I: "#E69F00",
    Kind.W: "#009E73",
}
_NAMES: Final = {
    Kind.F: "F forward",
    Kind.B: "B backward",
    Kind.I: "I input gradient",
    Kind.W: "W weight gradient",
}
_MOST_BOXES: Final = 20_000


def draw_gantt(timeline: Timeline, axes: Axes, *, title: str | None = None) -> None:
    """Draw a timeline on matplotlib axes.

    Parameters
    ----------
    timeline : Timeline
        Simulated or measured; sends and receives are left out.
    axes : matplotlib.axes.Axes
        Where to draw.
    title : str, optional
        Left out: name, makespan and bubble.

    Raises
    ------
    ScheduleError
        For more than 20,000 boxes, which no picture shows.
    """
    schedule = timeline.schedule
    if len(schedule) > _MOST_BOXES:
        raise ScheduleError(
            f"a picture of {len(schedule)} actions cannot be read; up to {_MOST_BOXES} are drawn"
        )
    unit = float(timeline.makespan) / max(1.0, _inches(timeline) * 72)
    for index in np.flatnonzero(schedule.kind <= Kind.B).tolist():
        second = index > 0 and bool(schedule.overlapped[index - 1])
        _box(timeline, axes, index, second or bool(schedule.overlapped[index]), second, unit)
    axes.set_xlim(0, float(timeline.makespan))
    axes.set_ylim(schedule.n_ranks - 0.5, -0.5)
    axes.set_yticks(range(schedule.n_ranks), [f"rank {r}" for r in range(schedule.n_ranks)])
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.set_facecolor("#F2F2F2")
    axes.set_xlabel("time (µs)")
    bubble = float(timeline.bubble_over_total())
    axes.set_title(
        title or f"{schedule.name}: makespan {float(timeline.makespan):g} µs, bubble {bubble:.1%}",
        loc="left",
    )
    _legend(timeline, axes)


def save_gantt(timelines: Timeline | Sequence[Timeline], path: str | Path) -> None:
    """Save timelines as a picture, one above the other on one time axis; needs the `plot` extra.

    Parameters
    ----------
    timelines : Timeline or sequence of Timeline
        Such as a prediction and a measurement.
    path : str or Path
        The ending chooses the form: png, svg, pdf.

    Raises
    ------
    ScheduleError
        Without matplotlib, or if there is too much to draw.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ScheduleError(
            "a picture needs matplotlib: python -m pip install 'mpipar[plot]'"
        ) from None
    panels = [timelines] if isinstance(timelines, Timeline) else list(timelines)
    heights = [1.3 + 0.42 * timeline.schedule.n_ranks for timeline in panels]
    width = max(_inches(timeline) for timeline in panels)
    figure = Figure(figsize=(width, sum(heights)), layout="constrained")
    grid = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)
    for timeline, axes in zip(panels, grid[:, 0], strict=True):
        draw_gantt(timeline, axes)
        axes.set_xlim(0, max(float(panel.makespan) for panel in panels))
    figure.savefig(path, dpi=150)


def _inches(timeline: Timeline) -> float:
    """Width at which the shortest boxes can hold a number, within a page and a poster."""
    schedule = timeline.schedule
    compute = schedule.kind <= Kind.B
    shortest = float((timeline.end - timeline.start)[compute].min()) / timeline.ticks
    wanted = float(timeline.makespan) / shortest * 0.18 if shortest > 0 else 14.0
    return min(max(wanted, 8.0), 30.0)


def _box(
    timeline: Timeline, axes: Axes, index: int, paired: bool, second: bool, unit: float
) -> None:
    schedule = timeline.schedule
    start = float(timeline.start_us(index))
    width = float(timeline.end_us(index)) - start
    rank, kind = int(schedule.rank[index]), Kind(int(schedule.kind[index]))
    height = 0.42 if paired else 0.84
    bottom = rank - 0.42 + (0.42 if second else 0.0)
    chunk = schedule.stages_of(rank).index(int(schedule.stage[index]))
    shade = 0.5 if chunk % 2 else 0.9
    axes.barh(
        bottom,
        width,
        height,
        start,
        align="edge",
        color=_mix(_COLOURS[kind], shade),
        edgecolor="white",
        linewidth=0.6,
    )
    label = f"{kind.name}{schedule.microbatch[index]}"
    size = min(8.0, width / unit / len(label))
    if size >= 4:
        axes.text(
            start + width / 2,
            bottom + height / 2,
            label,
            ha="center",
            va="center",
            fontsize=size,
            color="black",
        )


def _mix(colour: str, share: float) -> tuple[float, float, float]:
    """A colour mixed with white."""
    red, green, blue = (1 - share * (1 - int(colour[i : i + 2], 16) / 255) for i in (1, 3, 5))
    return red, green, blue


def _legend(timeline: Timeline, axes: Axes) -> None:
    from matplotlib.patches import Patch

    schedule = timeline.schedule
    present = [kind for kind in _NAMES if (schedule.kind == kind).any()]
    handles: list[Any] = [Patch(facecolor=_mix(_COLOURS[k], 0.9), label=_NAMES[k]) for k in present]
    if schedule.n_stages > schedule.n_ranks:
        handles.append(Patch(facecolor="#BBBBBB", label="lighter: every second chunk"))
    axes.legend(
        handles=handles,
        ncols=len(handles),
        loc="upper right",
        bbox_to_anchor=(1.0, 1.14 + 0.2 / schedule.n_ranks),
        frameon=False,
        fontsize=8,
    )
