"""What the generators share: sizes checked, kinds numbered, rows joined."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from mpipar.errors import CountOutOfRange
from mpipar.pipeline_parallel.action import Kind
from mpipar.pipeline_parallel.schedule import Bools, Ints, Schedule

Row = tuple[Ints, Ints, Ints]


def check_sizes(n_ranks: int, n_microbatches: int, n_chunks: int = 1) -> None:
    """Refuse counts below 1.

    Parameters
    ----------
    n_ranks, n_microbatches, n_chunks : int
        Sizes of a schedule.

    Raises
    ------
    CountOutOfRange
        Naming the count.
    """
    counts = {"ranks": n_ranks, "microbatches": n_microbatches, "chunks": n_chunks}
    for what, count in counts.items():
        if count < 1:
            raise CountOutOfRange(f"number of {what}", "1 or more", count)


def occurrences(kind: npt.ArrayLike) -> Ints:
    """How often each entry's kind occurred before it: 0 0 1 1 for F B F B.

    Parameters
    ----------
    kind : array of int, shape (n,)
        Kinds in order.

    Returns
    -------
    array of int, shape (n,)
        Running count of each kind.
    """
    kinds = np.asarray(kind)
    count = np.empty(len(kinds), dtype=np.int32)
    for value in np.unique(kinds):
        where = np.flatnonzero(kinds == value)
        count[where] = np.arange(len(where))
    return count


def assemble(
    name: str,
    n_microbatches: int,
    stage_to_rank: Iterable[int],
    rows: Sequence[Row],
    overlapped: Sequence[Bools] | None = None,
) -> Schedule:
    """Join one row per rank to a schedule.

    Parameters
    ----------
    name, n_microbatches, stage_to_rank
        As in `Schedule`.
    rows : sequence of (kind, stage, microbatch)
        Arrays of one length each, per rank.
    overlapped : sequence of array of bool, optional
        Per rank; left out, nothing overlaps.

    Returns
    -------
    Schedule
        The rows in rank order.
    """
    sizes = [len(kind) for kind, _, _ in rows]
    kind, stage, number = (np.concatenate([row[i] for row in rows]) for i in range(3))
    pairs = np.zeros(sum(sizes), bool) if overlapped is None else np.concatenate(overlapped)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    owners = np.array(list(stage_to_rank))
    return Schedule(name, n_microbatches, owners, offsets, stage, kind, number, pairs)


def in_turn(n_items: int, *columns: tuple[Kind, int]) -> Ints:
    """Kinds of a rank that runs several sequences in turn, each starting some rounds late.

    In round i, for each (kind, delay) in order, item i - delay of that kind runs if it exists.
    Warm-up and cool-down are the rounds in which some of them do not.

    Parameters
    ----------
    n_items : int
        Items of each sequence.
    *columns : (Kind, int)
        Kind and delay, 0 or more.

    Returns
    -------
    array of int8
        The kinds in order.
    """
    delays = np.array([delay for _, delay in columns])
    item = np.arange(n_items + int(delays.max()))[:, None] - delays
    table = np.broadcast_to(np.array([k for k, _ in columns], dtype=np.int8), item.shape)
    kinds: Ints = table[(item >= 0) & (item < n_items)]
    return kinds


def one_stage_per_rank(name: str, n_microbatches: int, kinds: Sequence[Ints]) -> Schedule:
    """A schedule of one stage per rank in which every kind takes microbatches in order.

    Parameters
    ----------
    name : str
        Name of the schedule.
    n_microbatches : int
        Microbatches.
    kinds : sequence of array of int
        Kinds of each rank's actions in order.

    Returns
    -------
    Schedule
        Microbatches numbered by occurrence.
    """
    rows = [(row, np.full(len(row), rank), occurrences(row)) for rank, row in enumerate(kinds)]
    return assemble(name, n_microbatches, range(len(kinds)), rows)
