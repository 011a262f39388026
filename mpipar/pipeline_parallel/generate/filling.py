"""Building a split-backward schedule step by step, with W put where a rank would wait.

The bookkeeping behind ZB-V and the automatic schedule: clocks, memory and the idle time of each
rank as actions are placed one after another. What to place next is the caller's policy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpipar.errors import ScheduleError
from mpipar.pipeline_parallel.action import Kind
from mpipar.pipeline_parallel.costs import Costs, Number, to_ticks
from mpipar.pipeline_parallel.generate.assemble import assemble
from mpipar.pipeline_parallel.schedule import Schedule


@dataclass(frozen=True)
class Problem:
    """Sizes, owners, times and memory of a schedule to be built, in ticks.

    Parameters
    ----------
    n_microbatches : int
        Microbatches.
    owner : tuple of int
        Rank of each stage.
    time : tuple of three lists
        F, I and W of each stage, indexed by `Kind`.
    lag : list
        Transfer time of each boundary, 0 within a rank.
    change : tuple of three lists
        What F, I and W of each stage add to the rank's memory.
    limit : number
        Most that a rank may hold.
    """

    n_microbatches: int
    owner: tuple[int, ...]
    time: tuple[list[Any], ...]
    lag: list[Any]
    change: tuple[list[Any], ...]
    limit: Any

    @classmethod
    def of(cls, owner: Sequence[int], n_microbatches: int, costs: Costs, limit: Number) -> Problem:
        """The problem for given costs.

        Parameters
        ----------
        owner : sequence of int
            Rank of each stage.
        n_microbatches : int
            Microbatches.
        costs : Costs
            Times and memory; without an `activation`, a stage's share of its rank.
        limit : number
            Memory limit in the same unit.

        Returns
        -------
        Problem
            All numbers exact if the costs are.
        """
        n, n_ranks = len(owner), max(owner) + 1
        lag = [
            0 if a == b else t
            for a, b, t in zip(owner, owner[1:], costs.transfers(n), strict=False)
        ]
        fields = ("forward_us", "input_us", "weight_us")
        count = 3 * n * n_microbatches
        times, _ = to_ticks([*(costs.of_stages(f, n) for f in fields), lag], count)
        held = costs.with_activation(n_ranks, n).of_stages("activation", n)
        late = [h * costs.held_for_weight for h in held]
        early = [h - w for h, w in zip(held, late, strict=True)]
        memory, _ = to_ticks([held, early, late, [limit]], count)
        plus, minus, rest, (top,) = (group.tolist() for group in memory)
        change = (plus, [-x for x in minus], [-x for x in rest])
        f, i, w, lags = (group.tolist() for group in times)
        return cls(n_microbatches, tuple(owner), (f, i, w), lags, change, top)


class Filling:
    """A schedule under construction.

    Parameters
    ----------
    problem : Problem
        What is to be built.
    """

    def __init__(self, problem: Problem) -> None:
        n_ranks = max(problem.owner) + 1
        self.problem = problem
        self.clock: list[Any] = [0] * n_ranks
        self.memory: list[Any] = [0] * n_ranks
        self.idle: list[Any] = [0] * n_ranks
        self.most_idle: Any = 0
        self.count = [[0] * len(problem.owner) for _ in range(3)]
        self.waiting: list[deque[int]] = [deque() for _ in range(n_ranks)]
        empty = [None] * problem.n_microbatches
        self._end: list[list[list[Any]]] = [[list(empty) for _ in problem.owner] for _ in "FI"]
        self._cells: list[list[tuple[int, int, int]]] = [[] for _ in range(n_ranks)]
        self._begin: list[Any] = [None] * n_ranks

    def arrival(self, kind: int, stage: int) -> Any:
        """When the input of a stage's next F or I is there.

        Parameters
        ----------
        kind : int
            `Kind.F` or `Kind.I`.
        stage : int
            A stage.

        Returns
        -------
        number or None
            None if its neighbour has not run; 0 if it has none.
        """
        number = self.count[kind][stage]
        neighbour = stage - 1 if kind == Kind.F else stage + 1
        if not 0 <= neighbour < len(self.problem.owner):
            return 0 if kind == Kind.F else self._end[Kind.F][stage][number]
        end = self._end[kind][neighbour][number]
        return None if end is None else end + self.problem.lag[min(stage, neighbour)]

    def put(self, kind: int, stage: int) -> None:
        """Place a stage's next action of a kind at the end of its rank.

        Parameters
        ----------
        kind : int
            `Kind.F`, `Kind.I` or `Kind.W`.
        stage : int
            A stage; W is placed by `put_weight`.
        """
        rank = self.problem.owner[stage]
        number = self.count[kind][stage]
        now = self.clock[rank]
        if kind != Kind.W:
            if self._begin[rank] is not None:
                ready = max(now, self.arrival(kind, stage))
                self.idle[rank] += ready - now
                self.most_idle = max(self.most_idle, self.idle[rank])
                now = ready
            else:
                now = self._begin[rank] = self.arrival(kind, stage)
        now += self.problem.time[kind][stage]
        if kind != Kind.W:
            self._end[kind][stage][number] = now
        self.clock[rank] = now
        self.memory[rank] += self.problem.change[kind][stage]
        self.count[kind][stage] = number + 1
        self._cells[rank].append((kind, stage, number))
        if kind == Kind.I:
            self.waiting[rank].append(stage)

    def put_weight(self, rank: int) -> None:
        """Place the W that has waited longest.

        Parameters
        ----------
        rank : int
            A rank with a W in `waiting`.
        """
        self.put(Kind.W, self.waiting[rank].popleft())

    def make_room(self, rank: int, stage: int) -> None:
        """Place W until a forward of the stage fits into memory.

        Parameters
        ----------
        rank, stage : int
            Where the forward is to run.

        Raises
        ------
        ScheduleError
            If no W is left to place.
        """
        need = self.problem.change[Kind.F][stage]
        while self.memory[rank] + need > self.problem.limit:
            if not self.waiting[rank]:
                raise ScheduleError(f"rank {rank} has no room for another forward")
            self.put_weight(rank)

    def fill(self, kind: int, stage: int, *, short: bool, long: bool, spare: Any = 0) -> None:
        """Place W in the time before a stage's next F or I can start.

        First all that end in time; then one more that ends late, if wanted.

        Parameters
        ----------
        kind, stage : int
            The action that will follow.
        short, long : bool
            Whether to delay it by one W when the wait that is left is within (short) or beyond
            (long) the idle time by which this rank is better off than the worst.
        spare : number
            Idle time granted on top.
        """
        arrival = self.arrival(kind, stage)
        rank = self.problem.owner[stage]
        while self.waiting[rank]:
            ends = self.clock[rank] + self.problem.time[Kind.W][self.waiting[rank][0]]
            if ends > arrival:
                break
            self.put_weight(rank)
        wait = arrival - self.clock[rank]
        if self.waiting[rank] and wait > 0:
            allowed = max(self.most_idle, spare) - self.idle[rank]
            if short if wait <= allowed else long:
                self.put_weight(rank)

    def finish(self) -> None:
        """Place every W that still waits."""
        for rank, waiting in enumerate(self.waiting):
            while waiting:
                self.put_weight(rank)

    @property
    def longest_span(self) -> Any:
        """Longest time from a rank's first start to its last end, in ticks."""
        return max(
            end - begin
            for end, begin in zip(self.clock, self._begin, strict=True)
            if begin is not None
        )

    def schedule(self, name: str) -> Schedule:
        """What was built.

        Parameters
        ----------
        name : str
            Name of the schedule.

        Returns
        -------
        Schedule
            The placed actions.
        """
        rows = []
        for cells in self._cells:
            table = np.array(cells, dtype=np.int64).reshape(-1, 3)
            rows.append((table[:, 0], table[:, 1], table[:, 2]))
        return assemble(name, self.problem.n_microbatches, self.problem.owner, rows)
