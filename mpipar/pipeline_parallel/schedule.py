"""The schedule value: for each rank a list of actions, and which rank owns which stage."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from mpipar.errors import CountOutOfRange, EmptyInput, ScheduleError
from mpipar.pipeline_parallel.action import Action, Cell, Kind, OverlappedPair

Ints: TypeAlias = npt.NDArray[np.signedinteger[Any]]
Bools: TypeAlias = npt.NDArray[np.bool_]

NONE = -1


def placement(style: str, n_ranks: int, n_stages: int) -> tuple[int, ...]:
    """Which rank owns each stage, for the two usual shapes.

    Parameters
    ----------
    style : {"loop", "v"}
        "loop": stage s on rank s mod n_ranks. "v": there and back again, so that the first and
        the last stage share rank 0 (ZB-V, DualPipeV).
    n_ranks, n_stages : int
        `n_stages` is a multiple of `n_ranks`.

    Returns
    -------
    tuple of int
        Rank of stage 0, 1, ...

    Raises
    ------
    ScheduleError
        For another style, or stages that do not fill the ranks evenly.
    """
    if n_ranks < 1:
        raise CountOutOfRange("number of ranks", "1 or more", n_ranks)
    if n_stages < 1 or n_stages % n_ranks:
        below = max(n_stages // n_ranks, 1) * n_ranks
        raise ScheduleError(f"{n_stages} stages do not fill {n_ranks} ranks evenly; {below} would")
    if style == "loop":
        return tuple(s % n_ranks for s in range(n_stages))
    if style == "v":
        there = (*range(n_ranks), *reversed(range(n_ranks)))
        return tuple(there[s % (2 * n_ranks)] for s in range(n_stages))
    raise ScheduleError(f"placement {style!r} is unknown; use 'loop' or 'v'")


@dataclass(frozen=True, eq=False)
class Schedule:
    """An immutable pipeline schedule, stored as integer arrays (actions are views of them).

    The actions of rank r stand at ``offsets[r]:offsets[r + 1]`` of the flat arrays. A schedule
    is an order, not a timetable: times come from `simulate`. It is *compute-only* (F, I, W, B)
    or *lowered* (with sends, receives and gradient reductions, for an executor).

    Parameters
    ----------
    name : str
        What it is called in texts; no blanks.
    n_microbatches : int
        Microbatches of one step.
    stage_to_rank : array of int, shape (n_stages,)
        Owner of each stage.
    offsets : array of int64, shape (n_ranks + 1,)
        Where each rank's actions begin.
    stage : array of int32, shape (n_actions,)
        Of each action.
    kind : array of int8, shape (n_actions,)
        Values of `Kind`.
    microbatch : array of int32, shape (n_actions,)
        -1 for REDUCE_GRAD.
    overlapped : array of bool, shape (n_actions,)
        True where an action runs together with the next one of its rank.

    Raises
    ------
    ScheduleError
        If the arrays do not fit together or name a stage or microbatch that does not exist.
    """

    name: str
    n_microbatches: int
    stage_to_rank: Ints
    offsets: Ints
    stage: Ints
    kind: Ints
    microbatch: Ints
    overlapped: Bools

    def __post_init__(self) -> None:
        kinds: dict[str, Any] = {"stage_to_rank": np.int32, "offsets": np.int64}
        kinds |= {"stage": np.int32, "kind": np.int8, "microbatch": np.int32}
        for field, dtype in {**kinds, "overlapped": np.bool_}.items():
            array = np.ascontiguousarray(getattr(self, field), dtype=dtype).view()
            array.flags.writeable = False
            object.__setattr__(self, field, array)
        self._check()

    def _check(self) -> None:
        if self.n_microbatches < 1:
            raise CountOutOfRange("number of microbatches", "1 or more", self.n_microbatches)
        if self.n_ranks < 1 or self.n_stages < 1:
            raise EmptyInput("schedule", "at least one rank and one stage are needed")
        if not self.name or any(c.isspace() or c in "=," for c in self.name):
            raise ScheduleError(f"schedule name {self.name!r} must have no blank, '=' or ','")
        sizes = {len(self.stage), len(self.kind), len(self.microbatch), len(self.overlapped)}
        if sizes != {int(self.offsets[-1])} or (np.diff(self.offsets) < 0).any():
            raise ScheduleError("the arrays of a schedule must have offsets[-1] entries each")
        self._check_range("rank of a stage", self.stage_to_rank, 0, self.n_ranks)
        self._check_range("stage", self.stage, 0, self.n_stages)
        self._check_range("kind", self.kind, 0, len(Kind))
        reduce = self.kind == Kind.REDUCE_GRAD
        self._check_range("microbatch", self.microbatch[~reduce], 0, self.n_microbatches)
        first = np.flatnonzero(self.overlapped)
        if first.size:
            second = np.minimum(first + 1, len(self) - 1)
            backward = np.isin(self.kind[second], (Kind.I, Kind.B)) & ~self.overlapped[second]
            whole = (first + 1 < len(self)) & (self.rank[first] == self.rank[second])
            if not ((self.kind[first] == Kind.F) & backward & whole).all():
                raise ScheduleError("an overlapped pair is a forward, then a backward")

    def _check_range(self, what: str, values: Ints, low: int, high: int) -> None:
        if values.size and (values.min() < low or values.max() >= high):
            bad = int(values.min() if values.min() < low else values.max())
            raise ScheduleError(f"{what} {bad} does not exist: the range is {low}..{high - 1}")

    @classmethod
    def from_actions(
        cls,
        rows: Sequence[Iterable[Cell]],
        *,
        name: str = "custom",
        stage_to_rank: Sequence[int] | None = None,
        n_microbatches: int | None = None,
    ) -> Schedule:
        """Build a schedule from one list of actions per rank.

        Parameters
        ----------
        rows : sequence of iterable of Action or OverlappedPair
            The actions of rank 0, 1, ...
        name : str
            Name of the schedule.
        stage_to_rank : sequence of int, optional
            Owner of each stage; left out, the rank on which a stage first appears.
        n_microbatches : int, optional
            Left out, one more than the highest that appears.

        Returns
        -------
        Schedule
            Not validated beyond the ranges of its numbers.
        """
        flat: list[tuple[int, int, int, bool]] = []
        offsets = [0]
        for row in rows:
            for cell in row:
                parts = cell if isinstance(cell, OverlappedPair) else (cell,)
                for i, (stage, kind, number) in enumerate(parts):
                    number = NONE if number is None else number
                    flat.append((stage, kind, number, i + 1 < len(parts)))
            offsets.append(len(flat))
        if not flat:
            raise EmptyInput("schedule", "no action was given")
        table = np.array(flat, dtype=np.int64)
        if stage_to_rank is None:
            stage_to_rank = _first_seen(table[:, 0], np.array(offsets))
        n_mb = int(table[:, 2].max()) + 1 if n_microbatches is None else n_microbatches
        columns = (table[:, 0], table[:, 1], table[:, 2], table[:, 3].astype(bool))
        return cls(name, n_mb, np.array(stage_to_rank), np.array(offsets), *columns)

    @property
    def n_ranks(self) -> int:
        """Number of ranks."""
        return len(self.offsets) - 1

    @property
    def n_stages(self) -> int:
        """Number of stages, a multiple of the ranks where every rank owns as many."""
        return len(self.stage_to_rank)

    @property
    def is_lowered(self) -> bool:
        """True with sends and receives in it, or where one rank owns all and needs none."""
        sends = bool(((self.kind >= Kind.SEND_F) & (self.kind <= Kind.RECV_B)).any())
        return sends or bool((self.stage_to_rank == self.stage_to_rank[0]).all())

    @cached_property
    def rank(self) -> Ints:
        """Rank of each action, shape (n_actions,)."""
        return np.repeat(np.arange(self.n_ranks, dtype=np.int32), np.diff(self.offsets))

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Stages that a rank owns, ascending.

        Parameters
        ----------
        rank : int
            A rank.

        Returns
        -------
        tuple of int
            Its stages.
        """
        return tuple(np.flatnonzero(self.stage_to_rank == rank).tolist())

    def __len__(self) -> int:
        """Number of actions, a pair counted as two."""
        return len(self.stage)

    def action(self, index: int) -> Action:
        """The action at a flat index.

        Parameters
        ----------
        index : int
            Flat index.

        Returns
        -------
        Action
            A view; one half of its pair where it is overlapped.
        """
        number = int(self.microbatch[index])
        kind = Kind(int(self.kind[index]))
        return Action(int(self.stage[index]), kind, None if number == NONE else number)

    def actions(self, rank: int, start: int = 0, stop: int | None = None) -> Iterator[Cell]:
        """The actions of one rank in order, overlapped pairs as one.

        Parameters
        ----------
        rank : int
            A rank.
        start, stop : int, optional
            Positions in the rank's list; a pair cut in half is not allowed.

        Yields
        ------
        Action or OverlappedPair
            Views.
        """
        low, high = int(self.offsets[rank]), int(self.offsets[rank + 1])
        index = low + start
        end = high if stop is None else min(low + stop, high)
        while index < end:
            if self.overlapped[index]:
                yield OverlappedPair(self.action(index), self.action(index + 1))
                index += 1
            else:
                yield self.action(index)
            index += 1

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Schedule):
            return NotImplemented
        arrays = ("stage_to_rank", "offsets", "stage", "kind", "microbatch", "overlapped")
        return (self.name, self.n_microbatches) == (other.name, other.n_microbatches) and all(
            np.array_equal(getattr(self, a), getattr(other, a)) for a in arrays
        )

    def __hash__(self) -> int:
        return hash((self.name, self.n_microbatches, self.stage.tobytes(), self.kind.tobytes()))

    def __repr__(self) -> str:
        return (
            f"<Schedule {self.name}: {self.n_ranks} ranks, {self.n_stages} stages, "
            f"{self.n_microbatches} microbatches, {len(self)} actions>"
        )


def _first_seen(stage: Ints, offsets: Ints) -> list[int]:
    """Rank on which each stage first appears."""
    stages, first = np.unique(stage, return_index=True)
    missing = sorted(set(range(int(stages[-1]) + 1)) - set(stages.tolist()))
    if missing:
        raise ScheduleError(f"no rank has an action of stage {', '.join(map(str, missing))}")
    ranks: list[int] = (np.searchsorted(offsets, first, side="right") - 1).tolist()
    return ranks
