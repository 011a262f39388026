"""What waits for what: the dependency edges of a schedule, and the walk along them.

Every action has a predecessor in its rank's list and at most one edge besides: a forward waits
for the stage below, a backward for the stage above, a send for its receive. An overlapped pair
is one node with two such edges. `walk` runs the ranks' lists along the edges; the simulator
gives it times, the validator only asks where it got stuck.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
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


@dataclass(frozen=True)
class Nodes:
    """Actions with overlapped pairs merged, ready to be walked.

    Parameters
    ----------
    offsets : array of int64, shape (n_ranks + 1,)
        Where each rank's nodes begin.
    of_action : array of int64, shape (n_actions,)
        Node of each action.
    edges : tuple of array of int, each of shape (n_nodes,)
        One edge per node, or two where pairs exist; -1 for none.
    """

    offsets: Ints
    of_action: Ints
    edges: tuple[Ints, ...]

    @classmethod
    def merge(cls, schedule: Schedule, edge: Ints) -> Nodes:
        """Merge the overlapped pairs of a schedule.

        Parameters
        ----------
        schedule : Schedule
            The schedule.
        edge : array of int, shape (n_actions,)
            Edges between its actions.

        Returns
        -------
        Nodes
            Equal to the actions where nothing overlaps.
        """
        if not schedule.overlapped.any():
            return cls(schedule.offsets, np.arange(len(schedule)), (edge,))
        second = np.zeros(len(schedule), dtype=bool)
        second[1:] = schedule.overlapped[:-1]
        node = np.cumsum(~second) - 1
        target = np.where(edge == NONE, NONE, node[edge])
        other = np.full(int(node[-1]) + 1, NONE, dtype=node.dtype)
        other[node[second]] = target[second]
        offsets = np.append(node, node[-1] + 1)[schedule.offsets]
        return cls(offsets, node, (target[~second], other))

    def walk(self, duration: Times, lags: tuple[Times, ...]) -> tuple[Times, Times, Ints]:
        """Run each rank's nodes in order, each as soon as its edges are done.

        Parameters
        ----------
        duration : array, shape (n_nodes,)
            int64, float64 or object (exact Python numbers); the result has the same type.
        lags : tuple of array, each of shape (n_nodes,)
            Delay along each edge; not added where there is none.

        Returns
        -------
        start, end : array, shape (n_nodes,)
            Meaningful for the nodes that ran.
        heads : array of int64, shape (n_ranks,)
            Next node of each rank: ``offsets[1:]`` if all ran, else where the rank is stuck.
        """
        wide = len(self.offsets) > _WIDE and duration.dtype != object
        return (self._walk_wide if wide else self._walk_narrow)(duration, lags)

    def _walk_wide(self, duration: Times, lags: tuple[Times, ...]) -> tuple[Times, Times, Ints]:
        """All ranks at once: each step runs every rank's next node that can run."""
        start = np.zeros_like(duration)
        end = np.zeros(len(duration) + 1, dtype=duration.dtype)  # the last: edge -1, "none"
        done = np.zeros(len(duration) + 1, dtype=bool)
        done[-1] = True
        heads = self.offsets[:-1].copy()
        clock = np.zeros(len(heads), dtype=duration.dtype)
        active = np.flatnonzero(heads < self.offsets[1:])
        while active.size:
            index = heads[active]
            needs = [edge[index] for edge in self.edges]
            ready = done[needs[0]]
            for need in needs[1:]:
                ready = ready & done[need]
            if not ready.all():
                if not ready.any():
                    break
                active_now, index = active[ready], index[ready]
                needs = [need[ready] for need in needs]
            else:
                active_now = active
            begin = clock[active_now]
            for need, lag in zip(needs, lags, strict=True):
                begin = np.maximum(begin, end[need] + lag[index])
            start[index] = begin
            begin = begin + duration[index]
            end[index] = begin
            done[index] = True
            clock[active_now] = begin
            heads[active_now] += 1
            if (heads[active_now] == self.offsets[active_now + 1]).any():
                active = np.flatnonzero(heads < self.offsets[1:])
        return start, end[:-1], heads

    def _walk_narrow(self, duration: Times, lags: tuple[Times, ...]) -> tuple[Times, Times, Ints]:
        """Rank by rank, each as far as it gets: for few ranks, and for any exact number."""
        n = len(duration)
        end: list[Any] = [None] * n + [0]
        start: list[Any] = [0] * n
        times, offsets = duration.tolist(), self.offsets.tolist()
        edge, lag = self.edges[0].tolist(), lags[0].tolist()
        others = [(e.tolist(), d.tolist()) for e, d in zip(self.edges[1:], lags[1:], strict=True)]
        heads, clocks = offsets[:-1], [0] * (len(offsets) - 1)
        order, moved = list(range(len(heads))), True
        while moved:
            moved = False
            for rank in order:
                index, now, stop = heads[rank], clocks[rank], offsets[rank + 1]
                while index < stop:
                    ready = end[edge[index]]
                    if ready is None:
                        break
                    ready += lag[index]
                    for other, delay in others:
                        if (second := end[other[index]]) is None:
                            break
                        ready = max(ready, second + delay[index])
                    else:
                        if ready > now:
                            now = ready
                        start[index] = now
                        now += times[index]
                        end[index] = now
                        index += 1
                        continue
                    break
                moved |= index != heads[rank]
                heads[rank], clocks[rank] = index, now
            order.reverse()  # forwards travel up, backwards down
        dtype = duration.dtype
        ends = [0 if time is None else time for time in end[:-1]]
        return np.array(start, dtype=dtype), np.array(ends, dtype=dtype), np.array(heads)
