"""Schedules as text: our own form, PyTorch's CSV, and the grid of messages and terminals."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from pathlib import Path

from mpipar.errors import ScheduleError
from mpipar.pipeline_parallel.action import Cell, parse_action
from mpipar.pipeline_parallel.schedule import Schedule, placement

_HEADER = re.compile(
    r"schedule (?P<name>\S+) ranks=(?P<ranks>\d+) stages=(?P<stages>\d+)"
    r" microbatches=(?P<microbatches>\d+) placement=(?P<placement>\S+)"
)
_FSDP = re.compile(r"\d+(UNSHARD|RESHARD)")


def format_schedule(schedule: Schedule) -> str:
    """Write a schedule as text that `parse_schedule` reads back to an equal value.

    Parameters
    ----------
    schedule : Schedule
        Any schedule, valid or not.

    Returns
    -------
    str
        A header line, then one line ``rank R: ACTION ACTION ...`` per rank.
    """
    owners = tuple(schedule.stage_to_rank.tolist())
    place = ",".join(map(str, owners))
    for style in ("loop", "v"):
        even = schedule.n_stages % schedule.n_ranks == 0
        if even and owners == placement(style, schedule.n_ranks, schedule.n_stages):
            place = style
            break
    lines = [
        f"schedule {schedule.name} ranks={schedule.n_ranks} stages={schedule.n_stages} "
        f"microbatches={schedule.n_microbatches} placement={place}"
    ]
    for rank in range(schedule.n_ranks):
        lines.append(f"rank {rank}: " + " ".join(map(str, schedule.actions(rank))))
    return "\n".join(line.rstrip() for line in lines) + "\n"


def parse_schedule(text: str) -> Schedule:
    """Read the text form of a schedule.

    Parameters
    ----------
    text : str
        As `format_schedule` writes it; empty lines and lines that start with ``#`` are skipped.

    Returns
    -------
    Schedule
        Not validated beyond its numbers' ranges.

    Raises
    ------
    ScheduleError
        With the line that is wrong.
    """
    kept = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    match = _HEADER.fullmatch(kept[0].strip()) if kept else None
    if match is None:
        raise ScheduleError(
            f"first line {kept[0] if kept else ''!r}: expected 'schedule NAME ranks=R stages=S "
            "microbatches=M placement=loop' (or placement=v, or one rank per stage: 0,1,...)"
        )
    n_ranks, n_stages = int(match["ranks"]), int(match["stages"])
    if match["placement"] in ("loop", "v"):
        owners: Sequence[int] = placement(match["placement"], n_ranks, n_stages)
    else:
        owners = [int(rank) for rank in match["placement"].split(",")]
    if len(owners) != n_stages or len(kept) != n_ranks + 1:
        raise ScheduleError(
            f"the header says {n_ranks} ranks and {n_stages} stages; there are {len(kept) - 1} "
            f"rank lines and {len(owners)} placements"
        )
    rows: list[list[Cell]] = []
    for rank, line in enumerate(kept[1:]):
        label, _, cells = line.partition(":")
        if label.split() != ["rank", str(rank)]:
            raise ScheduleError(f"expected a line 'rank {rank}: ...', got {line[:40]!r}")
        rows.append([parse_action(cell) for cell in cells.split()])
    return Schedule.from_actions(
        rows,
        name=match["name"],
        stage_to_rank=owners,
        n_microbatches=int(match["microbatches"]),
    )


def format_csv(schedule: Schedule) -> str:
    """Write a schedule in PyTorch pipelining's CSV: one row per rank, one cell per action.

    Parameters
    ----------
    schedule : Schedule
        Compute-only for PyTorch's ``compute_only`` form, lowered for ``compute_comms``.

    Returns
    -------
    str
        CSV text; name and placement are not part of this form.
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerows([str(a) for a in schedule.actions(r)] for r in range(schedule.n_ranks))
    return out.getvalue()


def parse_csv(text: str, *, name: str = "csv") -> Schedule:
    """Read PyTorch pipelining's CSV, compute-only or lowered.

    Empty cells (bubbles) are dropped: a schedule is an order. So are UNSHARD and RESHARD, which
    prefetch parameters on one rank and order nothing between ranks.

    Parameters
    ----------
    text : str
        One row per rank.
    name : str
        Name to give, since the form has none.

    Returns
    -------
    Schedule
        Placement and number of microbatches are those of the rows.

    Raises
    ------
    ScheduleError
        With row and column of a cell that is no action.
    """
    rows: list[list[Cell]] = []
    for rank, row in enumerate(csv.reader(io.StringIO(text))):
        cells: list[Cell] = []
        for column, cell in enumerate(row):
            if cell.strip() and not _FSDP.fullmatch(cell.strip()):
                try:
                    cells.append(parse_action(cell))
                except ScheduleError as error:
                    raise ScheduleError(f"row {rank}, column {column}: {error}") from None
        rows.append(cells)
    return Schedule.from_actions(rows, name=name)


def read_schedule(path: str | Path) -> Schedule:
    """Read a schedule from a file in either form, told apart by the first word.

    Parameters
    ----------
    path : str or Path
        A file that begins with ``schedule`` (our text) or with an action (CSV).

    Returns
    -------
    Schedule
        To be passed to `validate`.

    Raises
    ------
    ScheduleError
        If the file cannot be read or is in neither form.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ScheduleError(f"cannot read the schedule {path}: {error}") from None
    body = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    if body and body[0].startswith("schedule"):
        return parse_schedule(text)
    return parse_csv(text, name=re.sub(r"[\s=,]+", "_", path.stem) or "csv")


def order_grid(schedule: Schedule, rank: int, position: int, reach: int = 5) -> str:
    """The schedule as a grid of ranks and list positions with one cell marked.

    Parameters
    ----------
    schedule : Schedule
        Any schedule, valid or not.
    rank, position : int
        The cell to mark; a position past the end marks the place after it.
    reach : int
        How many ranks and positions around the cell are shown when the grid is large.

    Returns
    -------
    str
        One line per rank, the cell between ``>`` and ``<``, no trailing newline.
    """
    low_rank = 0 if schedule.n_ranks <= 2 * reach else max(rank - reach, 0)
    high_rank = min(max(rank + reach, 2 * reach) + 1, schedule.n_ranks)
    longest = max(int(n) for n in (schedule.offsets[1:] - schedule.offsets[:-1]))
    low = 0 if longest <= 4 * reach else max(position - reach, 0)
    high = low + (4 * reach if low == 0 else 2 * reach) + 1
    rows = []
    for row in range(low_rank, high_rank):
        base = int(schedule.offsets[row])
        size = int(schedule.offsets[row + 1]) - base
        cells = [str(schedule.action(base + i)) for i in range(low, min(high, size))]
        cells += [""] * (high - low - len(cells))
        if row == rank and low <= position < high:
            cells[position - low] = f">{cells[position - low] or 'end'}<"
        rows.append(cells)
    used = max((i + 1 for row in rows for i, cell in enumerate(row) if cell), default=0)
    widths = [max(len(row[i]) for row in rows) for i in range(used)]
    ahead = f"... {low} before " if low else ""
    lines = []
    for row, cells in zip(range(low_rank, high_rank), rows, strict=True):
        body = " ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=False))
        more = " ..." if int(schedule.offsets[row + 1] - schedule.offsets[row]) > high else ""
        lines.append(f"rank {row:>{len(str(high_rank - 1))}}: {ahead}{body.rstrip()}{more}")
    hidden = schedule.n_ranks - (high_rank - low_rank)
    return "\n".join(lines + ([f"({hidden} more ranks)"] if hidden else []))
