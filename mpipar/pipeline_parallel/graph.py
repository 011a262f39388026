"""What waits for what: the dependency edges of a schedule, and the walk along them.

Every action has a predecessor in its rank's list and at most one edge besides: a forward waits
for the stage below, a backward for the stage above, a send for its receive. In an
overlapped pair the first half is a gate: it waits for its edge, and the pair runs, with its own
edge, as the second. `walk` runs the ranks' lists along the edges; the simulator gives it times,
the validator only asks where it got stuck.
"""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from mpipar.pipeline_parallel.action import Kind
from mpipar.pipeline_parallel.schedule import NONE, Ints, Schedule

Times: TypeAlias = npt.NDArray[Any]

# From this many ranks on, a step of the array walk moves enough actions to pay for itself.
_WIDE = 96


class Places:
    """Where each action of a schedule stands: flat indices by stage and microbatch."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self._shape = (schedule.n_stages, schedule.n_microbatches)

    def of(self, *kinds: Kind) -> Ints:
        """Flat indices of actions of these kinds.

        Parameters
        ----------
        *kinds : Kind
            Kinds that take each other's place, such as I and B.

        Returns
        -------
        array of int32 or int64, shape (n_stages, n_microbatches)
            The last one where there are several, -1 where there is none.
        """
        s = self.schedule
        index_type = np.int32 if len(s) < 2**31 else np.int64
        table = np.full(self._shape, NONE, dtype=index_type)
        which = np.flatnonzero(np.isin(s.kind, kinds)).astype(index_type)
        table[s.stage[which], s.microbatch[which]] = which
        return table

    @cached_property
    def forward(self) -> Ints:
        """Places of F."""
        return self.of(Kind.F)

    @cached_property
    def backward(self) -> Ints:
        """Places of I or B."""
        return self.of(Kind.I, Kind.B)

    @cached_property
    def weight(self) -> Ints:
        """Places of W or B."""
        return self.of(Kind.W, Kind.B)


def data_edges(places: Places) -> Ints:
    """The action whose result each forward and backward needs from a neighbouring stage.

    Parameters
    ----------
    places : Places
        Of the schedule.

    Returns
    -------
    array of int, shape (n_actions,)
        Flat index, or -1: stage 0's forward, W, and everything that only waits in its own list
        (the last stage's backward waits for its own forward).
    """
    edge = np.full(len(places.schedule), NONE, dtype=places.forward.dtype)
    for into, of in (
        (places.forward[1:], places.forward[:-1]),
        (places.backward[:-1], places.backward[1:]),
        (places.backward[-1:], places.forward[-1:]),
    ):
        there = (into != NONE) & (of != NONE)
        edge[into[there]] = of[there]
    return edge


def rendezvous_edges(schedule: Schedule) -> Ints:
    """Edges under which a send and its receive complete together, both blocking.

    Each of the two waits for the action *before* the other in that one's list, which is when the
    other is reached.

    Parameters
    ----------
    schedule : Schedule
        A lowered schedule in which every message has one send and one receive.

    Returns
    -------
    array of int, shape (n_actions,)
        Flat index, or -1 for computation and for partners that come first in their list.
    """
    places = Places(schedule)
    edge = np.full(len(schedule), NONE, dtype=np.int64)
    for send, receive in partners(places):
        for into, of in ((send, receive), (receive, send)):
            first = np.isin(of, schedule.offsets)
            edge[into] = np.where(first, NONE, of - 1)
    return edge


def partners(places: Places) -> list[tuple[Ints, Ints]]:
    """Flat indices of sends and of the receives that match them.

    Parameters
    ----------
    places : Places
        Of a lowered schedule.

    Returns
    -------
    list of (sends, receives)
        Forward messages, then backward ones; messages with one end only are left out.
    """
    pairs = []
    below = (places.of(Kind.SEND_F)[:-1], places.of(Kind.RECV_F)[1:])
    above = (places.of(Kind.SEND_B)[1:], places.of(Kind.RECV_B)[:-1])
    for send, receive in (below, above):
        both = (send != NONE) & (receive != NONE)
        pairs.append((send[both], receive[both]))
    return pairs


def walk(schedule: Schedule, edge: Ints, duration: Times, lag: Times) -> tuple[Times, Times, Ints]:
    """Run each rank's actions in order, each as soon as its edge is done.

    Parameters
    ----------
    schedule : Schedule
        The schedule; its pairs run once both halves can, for the time of the second one.
    edge : array of int, shape (n_actions,)
        What each action waits for besides its list, -1 for nothing.
    duration : array, shape (n_actions,)
        int64, float64 or object (exact Python numbers); the result has the same type.
    lag : array, shape (n_actions,)
        Delay along each edge, 0 where there is none.

    Returns
    -------
    start, end : array, shape (n_actions,)
        Meaningful for the actions that ran.
    heads : array of int64, shape (n_ranks,)
        Next action of each rank: ``offsets[1:]`` if all ran, else where the rank is stuck.
    """
    first = np.flatnonzero(schedule.overlapped)
    if first.size:
        edge = edge + np.append(schedule.overlapped, False)[edge]  # done when the pair is
        duration = duration.copy()
        duration[first] = 0  # the first half is a gate
    wide = schedule.n_ranks >= _WIDE and duration.dtype != object
    end, heads = (_walk_wide if wide else _walk_narrow)(schedule.offsets, edge, duration, lag)
    before = np.zeros_like(end[:-1])
    before[1:] = end[:-2]
    before[schedule.offsets[:-1][np.diff(schedule.offsets) > 0]] = 0
    start = np.maximum(before, end[edge] + lag)
    start[first], end[first] = start[first + 1], end[first + 1]
    return start, end[:-1], heads


def _walk_wide(offsets: Ints, edge: Ints, duration: Times, lag: Times) -> tuple[Times, Ints]:
    """All ranks at once: each step runs every rank's next action that can run."""
    end = np.zeros(len(duration) + 1, dtype=duration.dtype)  # the last: edge -1, "none"
    done = np.zeros(len(duration) + 1, dtype=bool)
    done[-1] = True
    heads, stops = offsets[:-1].copy(), offsets[1:]
    clock = np.zeros(len(heads), dtype=duration.dtype)
    active = np.flatnonzero(heads < stops)
    while active.size:
        index, ranks = heads[active], active
        need = edge[index]
        ready = done[need]
        if not ready.all():
            if not ready.any():
                break
            index, need, ranks = index[ready], need[ready], active[ready]
        now = np.maximum(clock[ranks], end[need] + lag[index]) + duration[index]
        end[index] = now
        done[index] = True
        clock[ranks] = now
        index += 1
        heads[ranks] = index
        if (index == stops[ranks]).any():
            active = np.flatnonzero(heads < stops)
    return end, heads


def _walk_narrow(offsets: Ints, edge: Ints, duration: Times, lag: Times) -> tuple[Times, Ints]:
    """Rank by rank, each as far as it gets: for few ranks, and for any exact number."""
    end: list[Any] = [None] * len(duration)
    end.append(0)  # edge -1, "none"
    bounds = offsets.tolist()
    rows = [
        zip(
            edge[low:high].tolist(),
            lag[low:high].tolist(),
            duration[low:high].tolist(),
            strict=True,
        )
        for low, high in pairwise(bounds)
    ]
    waiting = [next(row, None) for row in rows]
    heads, clocks = bounds[:-1], [0] * len(rows)
    order, moved = list(range(len(rows))), True
    while moved:
        moved = False
        for rank in order:
            action = waiting[rank]
            if action is None or end[action[0]] is None:
                continue
            row, index, now = rows[rank], heads[rank], clocks[rank]
            need, delay, time = action
            while (ready := end[need]) is not None:
                ready += delay
                if ready > now:
                    now = ready
                now += time
                end[index] = now
                index += 1
                action = next(row, None)
                if action is None:
                    break
                need, delay, time = action
            waiting[rank] = action
            heads[rank], clocks[rank], moved = index, now, True
        order.reverse()  # forwards travel up, backwards down
    ends = [0 if time is None else time for time in end]
    return np.array(ends, dtype=duration.dtype), np.array(heads)
