"""A timeline: when each action of a schedule ran, simulated or measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeAlias

import numpy as np

from mpipar.errors import ScheduleError
from mpipar.pipeline_parallel.action import Kind
from mpipar.pipeline_parallel.costs import Number, divide, from_ticks
from mpipar.pipeline_parallel.graph import Times
from mpipar.pipeline_parallel.schedule import Schedule

Length: TypeAlias = Literal["makespan", "longest_span"]


@dataclass(frozen=True, eq=False)
class Timeline:
    """Start and end of every action of a schedule.

    `simulate` makes one; a measured run makes the same from its clocks (float64, `ticks` = 1),
    so that prediction and measurement are compared and drawn by the same code.

    Parameters
    ----------
    schedule : Schedule
        What ran.
    start, end : array, shape (n_actions,)
        In ticks; time 0 is the start of the step.
    ticks : int
        Ticks in a microsecond (exact times are kept as whole ticks).
    peak_memory : tuple of number
        Most held at once by each rank.
    """

    schedule: Schedule
    start: Times
    end: Times
    ticks: int = 1
    peak_memory: tuple[Number, ...] = ()

    def __post_init__(self) -> None:
        if not len(self.start) == len(self.end) == len(self.schedule):
            raise ScheduleError(
                f"{len(self.start)} starts and {len(self.end)} ends for "
                f"{len(self.schedule)} actions"
            )

    def start_us(self, index: int) -> Number:
        """When an action starts.

        Parameters
        ----------
        index : int
            Flat index of the action.

        Returns
        -------
        number
            Microseconds.
        """
        return from_ticks(self.start[index], self.ticks)

    def end_us(self, index: int) -> Number:
        """When an action ends.

        Parameters
        ----------
        index : int
            Flat index of the action.

        Returns
        -------
        number
            Microseconds.
        """
        return from_ticks(self.end[index], self.ticks)

    @cached_property
    def _per_rank(self) -> list[tuple[Any, Any, Any]]:
        """First start, last end and work of each rank, in ticks; computation only."""
        s = self.schedule
        compute = s.kind <= Kind.B
        counted = compute.copy()
        counted[1:] &= ~s.overlapped[:-1]  # both halves of a pair have the pair's times
        work = np.where(counted, self.end - self.start, 0)
        rows = []
        for low, high in zip(s.offsets[:-1].tolist(), s.offsets[1:].tolist(), strict=True):
            mine = compute[low:high]
            if mine.any():
                begin, finish = self.start[low:high][mine].min(), self.end[low:high][mine].max()
                rows.append((begin, finish, work[low:high].sum()))
            else:
                rows.append((0, 0, 0))
        return rows

    def _numbers(self, of: Callable[[Any, Any, Any], Any]) -> tuple[Number, ...]:
        return tuple(from_ticks(of(*row), self.ticks) for row in self._per_rank)

    @property
    def makespan(self) -> Number:
        """Time from 0 to the end of the last computation, in microseconds."""
        return max(self._numbers(lambda first, last, work: last))

    @property
    def spans(self) -> tuple[Number, ...]:
        """Time from the first start to the last end on each rank."""
        return self._numbers(lambda first, last, work: last - first)

    @property
    def longest_span(self) -> Number:
        """The longest of `spans`: what a step costs when steps follow one another closely."""
        return max(self.spans)

    @property
    def busy(self) -> tuple[Number, ...]:
        """Time each rank computes."""
        return self._numbers(lambda first, last, work: work)

    @property
    def idle(self) -> tuple[Number, ...]:
        """Time each rank does not compute, within the makespan."""
        return tuple(self.makespan - busy for busy in self.busy)

    def bubble_over_ideal(self, of: Length = "makespan") -> Number:
        """Idle time over work, (p - 1)/m for 1F1B: the papers' "bubble over ideal".

        Parameters
        ----------
        of : {"makespan", "longest_span"}
            The length in which ranks idle.

        Returns
        -------
        number
            Over all ranks; exact for exact times.
        """
        work = sum(self.busy)
        return divide(getattr(self, of) * len(self.busy) - work, work)

    def bubble_over_total(self, of: Length = "makespan") -> Number:
        """Idle time over all time, (p - 1)/(m + p - 1) for 1F1B: Zero Bubble's bubble rate.

        Parameters
        ----------
        of : {"makespan", "longest_span"}
            The length in which ranks idle.

        Returns
        -------
        number
            Over all ranks; exact for exact times.
        """
        total = getattr(self, of) * len(self.busy)
        return divide(total - sum(self.busy), total)
