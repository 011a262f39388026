"""Passes: schedules in, schedules out. `lower` turns an order into what an executor runs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mpipar.errors import ScheduleError
from mpipar.pipeline_parallel.action import Kind
from mpipar.pipeline_parallel.graph import Places, data_edges, partners, walk
from mpipar.pipeline_parallel.schedule import NONE, Bools, Ints, Schedule


def lower(schedule: Schedule) -> Schedule:
    """Add sends, receives and gradient reductions: the form that an executor runs.

    Parameters
    ----------
    schedule : Schedule
        A valid compute-only schedule.

    Returns
    -------
    Schedule
        Lowered; `Action.message` keys each transfer.
    """
    return add_sends_receives(add_gradient_reduction(schedule))


def compute_only(schedule: Schedule) -> Schedule:
    """Drop sends, receives and gradient reductions.

    Parameters
    ----------
    schedule : Schedule
        Any schedule.

    Returns
    -------
    Schedule
        F, I, W and B in their order.
    """
    return _select(schedule, schedule.kind <= Kind.B)


def merge_backward(schedule: Schedule) -> Schedule:
    """Merge each I that its own W follows at once into a full backward B.

    Parameters
    ----------
    schedule : Schedule
        Any schedule.

    Returns
    -------
    Schedule
        With fewer actions and the same work; a half of an overlapped pair merges too.
    """
    s = schedule
    first = np.zeros(len(s), dtype=bool)
    first[:-1] = (s.kind[:-1] == Kind.I) & (s.kind[1:] == Kind.W)
    first[:-1] &= (s.stage[:-1] == s.stage[1:]) & (s.microbatch[:-1] == s.microbatch[1:])
    first[:-1] &= s.rank[:-1] == s.rank[1:]
    keep = np.ones(len(s), dtype=bool)
    keep[1:] = ~first[:-1]
    return _select(schedule, keep, kind=np.where(first, Kind.B, s.kind))


def split_backward(schedule: Schedule) -> Schedule:
    """Cut each B whose gradient goes to another rank into I and W, the inverse of `merge_backward`.

    The gradient then leaves before the weights' are computed, which shortens the chain of
    backwards at no cost in memory. The first stage's B, whose gradient goes nowhere, stays whole.

    Parameters
    ----------
    schedule : Schedule
        A compute-only schedule.

    Returns
    -------
    Schedule
        The same work in the same order; halves of overlapped pairs stay whole.
    """
    s = schedule
    below = s.stage_to_rank[np.maximum(s.stage - 1, 0)]
    cut = (s.kind == Kind.B) & (s.stage > 0) & (below != s.rank)
    cut[1:] &= ~s.overlapped[:-1]
    which = np.flatnonzero(cut)
    weight = (s.stage[which], np.full_like(s.stage[which], Kind.W), s.microbatch[which])
    halved = replace(s, kind=np.where(cut, Kind.I, s.kind))
    return _insert(halved, which + 1, weight)


def add_gradient_reduction(schedule: Schedule) -> Schedule:
    """Put REDUCE_GRAD after the last weight gradient of each stage.

    Parameters
    ----------
    schedule : Schedule
        A schedule without REDUCE_GRAD.

    Returns
    -------
    Schedule
        With one per stage, so that a data-parallel sum can start while others still compute.
    """
    if (schedule.kind == Kind.REDUCE_GRAD).any():
        raise ScheduleError("the schedule has REDUCE_GRAD already")
    last = np.sort(Places(schedule).weight.max(axis=1))
    last = last[last != NONE]
    stage = schedule.stage[last]
    added = (stage, np.full_like(stage, Kind.REDUCE_GRAD), np.full_like(stage, NONE))
    return _insert(schedule, last + 1, added)


def add_sends_receives(schedule: Schedule) -> Schedule:
    """Put a send behind and a receive before the two ends of every edge between ranks.

    The actions are put into one order that respects all edges; each send comes right after its
    computation and its receive at that same moment in the other rank's list, so all pairs are in
    the same order on both sides: the result runs even if both block.

    Parameters
    ----------
    schedule : Schedule
        A valid schedule without sends and receives.

    Returns
    -------
    Schedule
        Lowered; stages of one rank hand over without a message.

    Raises
    ------
    ScheduleError
        If there are sends already, or the schedule cannot run.
    """
    s = schedule
    if ((s.kind >= Kind.SEND_F) & (s.kind <= Kind.RECV_B)).any():
        raise ScheduleError("the schedule has sends and receives already; see compute_only")
    edge = data_edges(Places(s))
    unit = np.ones(len(s), dtype=np.int64)
    _, when, heads = walk(s, edge, unit, np.zeros_like(unit))
    if (heads != s.offsets[1:]).any():
        raise ScheduleError("this schedule cannot run, see validate")
    into = np.flatnonzero((edge != NONE) & (s.rank[edge] != s.rank))
    of = edge[into]
    key = when * s.n_ranks + s.rank  # the one order: by time, then by rank
    forward = s.kind[into] == Kind.F
    send = np.where(forward, Kind.SEND_F, Kind.SEND_B)
    receive = np.where(forward, Kind.RECV_F, Kind.RECV_B)
    rank = np.concatenate([s.rank, s.rank[of], s.rank[into]])
    moment = np.concatenate([key, key[of], key[of]])
    action = np.arange(len(s))
    # within a moment: the actions of that node, then its sends, in the actions' order
    turn = np.concatenate([action, len(s) + of, len(s) + of])
    order = np.lexsort((turn, moment, rank))
    columns = (
        np.concatenate([s.stage, s.stage[of], s.stage[into]]),
        np.concatenate([s.kind, send, receive]),
        np.concatenate([s.microbatch, s.microbatch[of], s.microbatch[into]]),
        np.concatenate([s.overlapped, np.zeros(2 * len(of), dtype=bool)]),
    )
    offsets = np.concatenate([[0], np.cumsum(np.bincount(rank, minlength=s.n_ranks))])
    stage, kind, number, overlapped = (column[order] for column in columns)
    return replace(
        s, offsets=offsets, stage=stage, kind=kind, microbatch=number, overlapped=overlapped
    )


def defer_receives(schedule: Schedule) -> Schedule:
    """Move each receive as late as it can go without a deadlock under blocking sends.

    A receive moves to just before the action that needs it; it stays earlier only where every
    rank would otherwise wait, and then the lowest such rank's message is taken first. For
    platforms on which a posted receive disturbs computation. One pass, about a million actions
    in two seconds.

    Parameters
    ----------
    schedule : Schedule
        A valid lowered schedule.

    Returns
    -------
    Schedule
        The same actions; sends and computation keep their order.

    Raises
    ------
    ScheduleError
        If the schedule cannot run.
    """
    places = Places(schedule)
    order = _Deferral(schedule, places).run()
    return _select(schedule, np.concatenate([np.array(row, dtype=np.int64) for row in order]))


class _Deferral:
    """Runs the lists without their receives, and takes each when it is needed."""

    def __init__(self, schedule: Schedule, places: Places) -> None:
        self.schedule = schedule
        self.send_of: dict[int, int] = {}  # receive -> send
        self.receive_of: dict[int, int] = {}  # send -> receive
        for sends, receives in partners(places):
            self.send_of.update(zip(receives.tolist(), sends.tolist(), strict=True))
            self.receive_of.update(zip(sends.tolist(), receives.tolist(), strict=True))
        self.needs: dict[int, int] = {}  # computation -> receive
        for receive, consumer in (
            (places.of(Kind.RECV_F), places.forward),
            (places.of(Kind.RECV_B), places.backward),
        ):
            there = receive != NONE
            self.needs.update(zip(consumer[there].tolist(), receive[there].tolist(), strict=True))
        moving = np.flatnonzero((schedule.kind != Kind.RECV_F) & (schedule.kind != Kind.RECV_B))
        ranks = range(schedule.n_ranks)
        self.lists = [moving[schedule.rank[moving] == rank].tolist() for rank in ranks]
        self.heads = [0 for _ in ranks]
        self.out: list[list[int]] = [[] for _ in ranks]
        self.rank = schedule.rank.tolist()

    def run(self) -> list[list[int]]:
        while any(h < len(row) for h, row in zip(self.heads, self.lists, strict=True)):
            moved = [self._advance(rank) for rank in range(len(self.lists))]
            if not any(moved) and not self._force():
                raise ScheduleError("this schedule cannot run, see validate")
        return self.out

    def _head(self, rank: int) -> int | None:
        head = self.heads[rank]
        return self.lists[rank][head] if head < len(self.lists[rank]) else None

    def _advance(self, rank: int) -> bool:
        """Run this rank until it stands at a send, or needs what is not being sent yet."""
        moved = False
        while (action := self._head(rank)) is not None and action not in self.receive_of:
            pair = (action, action + 1) if self.schedule.overlapped[action] else (action,)
            for part in pair:
                receive = self.needs.get(part)
                if receive is None:
                    continue
                if self._head(self.rank[self.send_of[receive]]) != self.send_of[receive]:
                    return moved
                self._take(receive)
                del self.needs[part]
                moved = True
            self.out[rank] += pair
            self.heads[rank] += len(pair)
            moved = True
        return moved

    def _take(self, receive: int) -> None:
        send = self.send_of[receive]
        sender = self.rank[send]
        self.out[sender].append(send)
        self.heads[sender] += 1
        self.out[self.rank[receive]].append(receive)

    def _force(self) -> bool:
        """All wait: take the lowest waiting send's message early."""
        for rank in range(len(self.lists)):
            action = self._head(rank)
            if action is not None and action in self.receive_of:
                receive = self.receive_of[action]
                self._take(receive)
                self.needs = {a: r for a, r in self.needs.items() if r != receive}
                return True
        return False


def _insert(schedule: Schedule, where: Ints, added: tuple[Ints, Ints, Ints]) -> Schedule:
    """Insert actions before flat indices, each on the rank of the action before it."""
    s = schedule
    stage, kind, number = (
        np.insert(old, where, new)
        for old, new in zip((s.stage, s.kind, s.microbatch), added, strict=True)
    )
    overlapped = np.insert(s.overlapped, where, False)
    offsets = s.offsets + np.searchsorted(where - 1, s.offsets, side="left")
    return replace(
        s, offsets=offsets, stage=stage, kind=kind, microbatch=number, overlapped=overlapped
    )


def _select(schedule: Schedule, index: Ints | Bools, kind: Ints | None = None) -> Schedule:
    """Actions chosen by a mask, or put into another order within their ranks."""
    s = schedule
    counts = np.bincount(s.rank[index], minlength=s.n_ranks)
    return replace(
        s,
        offsets=np.concatenate([[0], np.cumsum(counts)]),
        stage=s.stage[index],
        kind=(s.kind if kind is None else kind)[index],
        microbatch=s.microbatch[index],
        overlapped=s.overlapped[index],
    )
