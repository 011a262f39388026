"""Proving that a schedule can run: every edge, every message, no deadlock."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from mpipar.errors import ScheduleError
from mpipar.pipeline_parallel.action import Kind
from mpipar.pipeline_parallel.graph import Places, data_edges, rendezvous_edges, walk
from mpipar.pipeline_parallel.schedule import NONE, Bools, Ints, Schedule
from mpipar.pipeline_parallel.text import order_grid

Reason: TypeAlias = Literal[
    "wrong rank", "repeated", "missing", "out of order", "unmatched message", "deadlock"
]


@dataclass(frozen=True)
class Fault:
    """The first thing found that is wrong with a schedule.

    Parameters
    ----------
    reason : str
        The class of fault.
    rank, position : int
        The cell of the grid it shows at.
    message : str
        What is wrong, in one sentence.
    """

    reason: Reason
    rank: int
    position: int
    message: str


def validate(schedule: Schedule) -> Schedule:
    """Refuse a schedule that cannot run to its end, whatever the times.

    Checked: each stage's actions on its own rank; F, and B or I with W, exactly once for each
    stage and microbatch; F before B or I before W; the order of stages; in a lowered schedule a
    send and a receive for each edge between ranks, around the computation that makes and needs
    it, and at most one REDUCE_GRAD, after a stage's last gradient; and that nothing waits for
    itself. A lowered schedule must even run if a send and its receive *both block* until the
    other side has reached its half; a compute-only one always has a lowering that does
    (`add_sends_receives`).

    Parameters
    ----------
    schedule : Schedule
        From a generator, a file or a user.

    Returns
    -------
    Schedule
        The same one.

    Raises
    ------
    ScheduleError
        With the first fault, and the grid around the bad cell.
    """
    fault = find_fault(schedule)
    if fault is not None:
        grid = order_grid(schedule, fault.rank, fault.position)
        where = f"rank {fault.rank}, position {fault.position}"
        raise ScheduleError(
            f"schedule {schedule.name}: {fault.reason} at {where}: {fault.message}\n{grid}"
        )
    return schedule


def find_fault(schedule: Schedule) -> Fault | None:
    """The first fault of a schedule; see `validate`.

    Parameters
    ----------
    schedule : Schedule
        Any schedule.

    Returns
    -------
    Fault or None
        None for a schedule that can run.
    """
    for check in (_ranks, _counts, _local_order, _messages, _reductions, _deadlock):
        for fault in check(schedule):
            return fault
    return None


def _fault(schedule: Schedule, reason: Reason, index: int, message: str) -> Fault:
    rank = int(schedule.rank[index])
    return Fault(reason, rank, index - int(schedule.offsets[rank]), message)


def _first(mask: Bools) -> int | None:
    found = np.flatnonzero(mask)
    return int(found[0]) if found.size else None


def _ranks(schedule: Schedule) -> Iterator[Fault]:
    owner = schedule.stage_to_rank[schedule.stage]
    bad = _first(owner != schedule.rank)
    if bad is not None:
        action = schedule.action(bad)
        text = f"{action} is on this rank, but stage {action.stage} is on rank {owner[bad]}"
        yield _fault(schedule, "wrong rank", bad, text)


def _counts(schedule: Schedule) -> Iterator[Fault]:
    compute = schedule.kind <= Kind.B
    for kinds in ((Kind.F,), (Kind.I, Kind.B), (Kind.W, Kind.B)):
        which = np.flatnonzero(compute & np.isin(schedule.kind, kinds))
        key = schedule.stage[which].astype(np.int64) * schedule.n_microbatches
        yield from _once(schedule, which, key + schedule.microbatch[which], kinds)


def _once(schedule: Schedule, which: Ints, key: Ints, kinds: tuple[Kind, ...]) -> Iterator[Fault]:
    count = np.bincount(key, minlength=schedule.n_stages * schedule.n_microbatches)
    if (count == 1).all():
        return
    if (count > 1).any():
        again = np.ones(len(key), dtype=bool)
        again[np.unique(key, return_index=True)[1]] = False
        index = int(which[np.flatnonzero(again)[0]])
        action = schedule.action(index)
        what = " or ".join(kind.name for kind in kinds)
        text = f"{action}: microbatch {action.microbatch} has {what} already on this stage"
        yield _fault(schedule, "repeated", index, text)
        return
    stage, number = divmod(int(np.flatnonzero(count == 0)[0]), schedule.n_microbatches)
    rank = int(schedule.stage_to_rank[stage])
    what = " or ".join(f"{stage}{kind.name}{number}" for kind in kinds)
    size = int(schedule.offsets[rank + 1] - schedule.offsets[rank])
    yield Fault("missing", rank, size, f"{what} never runs")


def _local_order(schedule: Schedule) -> Iterator[Fault]:
    places = Places(schedule)
    forward, backward, weight = places.forward, places.backward, places.weight
    split = weight != backward
    for early, late, where in (
        (forward, backward, np.ones_like(split)),
        (backward, weight, split),
    ):
        ends = early + schedule.overlapped[early]  # a pair has ended with its second half
        wrong = where & (ends >= late)
        if wrong.any():
            index = int(late[wrong].min())
            before = schedule.action(int(early[wrong][late[wrong].argmin()]))
            text = f"{schedule.action(index)} stands before {before} has ended, which it needs"
            yield _fault(schedule, "out of order", index, text)


def _messages(schedule: Schedule) -> Iterator[Fault]:
    if not schedule.is_lowered:
        return
    places = Places(schedule)
    far = schedule.stage_to_rank[1:] != schedule.stage_to_rank[:-1]
    ends = (
        (Kind.SEND_F, Kind.RECV_F, places.forward, 0),
        (Kind.SEND_B, Kind.RECV_B, places.backward, 1),
    )
    for send, receive, compute, low in ends:
        above = slice(1, None), slice(None, -1)
        yield from _end(schedule, places, send, compute[above[1 - low]], far, low, after=True)
        yield from _end(schedule, places, receive, compute[above[low]], far, 1 - low, after=False)


def _end(
    schedule: Schedule,
    places: Places,
    kind: Kind,
    compute: Ints,
    far: Bools,
    low: int,
    *,
    after: bool,
) -> Iterator[Fault]:
    """One end of the messages of one direction: `low` is the stage that boundary 0 has there."""
    which = np.flatnonzero(schedule.kind == kind)
    boundary = schedule.stage[which] - low
    inside = (boundary >= 0) & (boundary < len(far))
    near = ~inside
    near[inside] = ~far[boundary[inside]]
    if (bad := _first(near)) is not None:
        index = int(which[bad])
        text = f"{schedule.action(index)} would cross no boundary between two ranks"
        yield _fault(schedule, "unmatched message", index, text)
        return
    key = boundary.astype(np.int64) * schedule.n_microbatches + schedule.microbatch[which]
    again = np.ones(len(key), dtype=bool)
    again[np.unique(key, return_index=True)[1]] = False
    if (bad := _first(again)) is not None:
        index = int(which[bad])
        text = f"{schedule.action(index)} moves a message for the second time"
        yield _fault(schedule, "repeated", index, text)
        return
    n_far = len(far)
    table = places.of(kind)[low : low + n_far]
    absent = (table == NONE) & far[:, None]
    if absent.any():
        row, number = (int(i[0]) for i in np.nonzero(absent))
        partner = schedule.action(int(compute[row, number]))
        text = f"{row + low}{kind.name}{number} is missing, which {partner} needs"
        yield _fault(schedule, "unmatched message", int(compute[row, number]), text)
        return
    early, late = (compute, table) if after else (table, compute)
    wrong = far[:, None] & (early >= late)
    if wrong.any():
        index = int(late[wrong].min())
        before = schedule.action(int(early[wrong][late[wrong].argmin()]))
        text = f"{schedule.action(index)} stands before {before}, which it needs"
        yield _fault(schedule, "out of order", index, text)


def _reductions(schedule: Schedule) -> Iterator[Fault]:
    which = np.flatnonzero(schedule.kind == Kind.REDUCE_GRAD)
    if not which.size:
        return
    last = Places(schedule).weight.max(axis=1)
    seen: set[int] = set()
    for index in which.tolist():
        action = schedule.action(index)
        if action.stage in seen:
            yield _fault(schedule, "repeated", index, f"{action} stands here a second time")
        seen.add(action.stage)
        if index < last[action.stage]:
            gradient = schedule.action(int(last[action.stage]))
            text = f"{action} stands before {gradient}, whose gradient it would miss"
            yield _fault(schedule, "out of order", index, text)


def _deadlock(schedule: Schedule) -> Iterator[Fault]:
    edge = data_edges(Places(schedule))
    if schedule.is_lowered:
        # data between ranks travels through its receive; on one rank the edge itself remains
        near = schedule.rank[edge] == schedule.rank
        edge = np.where((edge != NONE) & ~near, NONE, edge).astype(np.int64)
        edge = np.maximum(edge, rendezvous_edges(schedule))
    zero = np.zeros(len(schedule), dtype=np.int64)
    heads = walk(schedule, edge, zero, zero)[2]
    if (heads != schedule.offsets[1:]).any():
        yield _name_cycle(schedule, edge, heads)


def _name_cycle(schedule: Schedule, edge: Ints, heads: Ints) -> Fault:
    """Follow the heads that wait for one another until one comes round again."""
    rank = int(np.flatnonzero(heads != schedule.offsets[1:])[0])
    chain: list[int] = []
    while rank not in chain:
        chain.append(rank)
        rank = int(schedule.rank[edge[heads[rank]]])
    chain = chain[chain.index(rank) :]
    first = chain.index(min(chain))
    chain = chain[first:] + chain[:first]
    shown = [f"{schedule.action(int(heads[r]))} (rank {r})" for r in chain[:6]]
    ending = f"... {len(chain) - 6} more" if len(chain) > 6 else f"{shown[0]} again"
    text = " waits for a rank that stands at ".join([*shown, ending])
    return _fault(schedule, "deadlock", int(heads[chain[0]]), text)
