"""Which layers each stage holds: spread evenly, or the best contiguous cut by cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TypeAlias

from mpipar.errors import CountOutOfRange, NonFiniteValue, OutOfRange, ScheduleError
from mpipar.pipeline_parallel.costs import Number
from mpipar.units.remainder import spread_sizes

_Allowed: TypeAlias = Callable[[int, int, int], bool]


@dataclass(frozen=True)
class StageAssignment:
    """Contiguous layers for each stage.

    Parameters
    ----------
    assignments : tuple of int
        Stage of layer 0, 1, ..., ascending.
    num_stages : int
        Number of stages; each has at least one layer.
    """

    assignments: tuple[int, ...]
    num_stages: int

    @classmethod
    def uniform(cls, n_layers: int, n_stages: int) -> StageAssignment:
        """Spread layers evenly; the first stages take one more.

        Parameters
        ----------
        n_layers, n_stages : int
            At least as many layers as stages.

        Returns
        -------
        StageAssignment
            Sizes that differ by at most one.

        Raises
        ------
        CountOutOfRange
            If a stage would be empty.
        """
        _check_counts(n_layers, n_stages)
        return cls._of_sizes(spread_sizes(n_layers, n_stages))

    @classmethod
    def optimal(
        cls,
        costs: Sequence[Number],
        n_stages: int,
        *,
        embedding: Number = 0,
        head: Number = 0,
        memory: Sequence[Number] | None = None,
        embedding_memory: Number = 0,
        head_memory: Number = 0,
        memory_limit: Number | Sequence[Number] | None = None,
    ) -> StageAssignment:
        """The contiguous cut whose slowest stage is fastest; ties go to the most even one.

        Exact dynamic programming, O(stages x layers squared).

        Parameters
        ----------
        costs : sequence of number
            Cost of each layer, 0 or more, in any unit.
        n_stages : int
            Number of stages.
        embedding, head : number
            What the first and the last stage do besides their layers.
        memory : sequence of number, optional
            Memory of each layer.
        embedding_memory, head_memory : number
            Memory of embedding and head.
        memory_limit : number or sequence of number, optional
            Most that each stage may hold.

        Returns
        -------
        StageAssignment
            Every stage has at least one layer.

        Raises
        ------
        ScheduleError
            If no cut fits into memory; the message names the least common limit that would do.
        """
        _check_counts(len(costs), n_stages)
        weights = [0] * len(costs) if memory is None else list(memory)
        if len(weights) != len(costs):
            raise ScheduleError(f"memory has {len(weights)} numbers for {len(costs)} layers")
        for value in (*costs, *weights, embedding, head, embedding_memory, head_memory):
            if value != value:
                raise NonFiniteValue("cost of a layer", float(value))
            if value < 0:
                raise OutOfRange("cost of a layer", "0 or more", float(value))
        work = _Sums(costs, embedding, head, n_stages)
        held = _Sums(weights, embedding_memory, head_memory, n_stages)
        limits = memory_limit if isinstance(memory_limit, Sequence) else [memory_limit] * n_stages
        if len(limits) != n_stages:
            raise ScheduleError(f"memory_limit has {len(limits)} numbers for {n_stages} stages")

        def fits(stage: int, low: int, high: int) -> bool:
            limit = limits[stage]
            return limit is None or held(stage, low, high) <= limit

        best = _cut(work, len(costs), n_stages, fits, squares=False)
        if best is None:
            least = _cut(held, len(costs), n_stages, lambda *_: True, squares=False)
            need = max(_parts(held, least or []))
            raise ScheduleError(
                f"no cut of {len(costs)} layers into {n_stages} stages fits memory_limit="
                f"{memory_limit}; a limit of {need} for every stage would do"
            )
        worst = max(_parts(work, best))
        even = _cut(
            work,
            len(costs),
            n_stages,
            lambda stage, low, high: fits(stage, low, high) and work(stage, low, high) <= worst,
            squares=True,
        )
        bounds = [0, *(even or best)]
        return cls._of_sizes([b - a for a, b in pairwise(bounds)])

    @classmethod
    def _of_sizes(cls, sizes: Sequence[int]) -> StageAssignment:
        owners = tuple(stage for stage, size in enumerate(sizes) for _ in range(size))
        return cls(owners, len(sizes))

    def stage_of(self, layer: int) -> int | None:
        """Stage that holds a layer.

        Parameters
        ----------
        layer : int
            A layer.

        Returns
        -------
        int or None
            None for a layer that does not exist.
        """
        return self.assignments[layer] if 0 <= layer < len(self.assignments) else None

    def layers_in_stage(self, stage: int) -> tuple[int, ...]:
        """Layers of a stage.

        Parameters
        ----------
        stage : int
            A stage.

        Returns
        -------
        tuple of int
            Ascending.
        """
        return tuple(i for i, owner in enumerate(self.assignments) if owner == stage)

    def layers_per_stage(self) -> tuple[int, ...]:
        """Number of layers of each stage.

        Returns
        -------
        tuple of int
            One per stage.
        """
        return tuple(self.assignments.count(stage) for stage in range(self.num_stages))


class _Sums:
    """Sum of a stage's layers, with the extras of the first and the last stage."""

    def __init__(self, values: Sequence[Number], first: Number, last: Number, n: int) -> None:
        self.prefix = list(accumulate(values, initial=0))
        self.first, self.last, self.final_stage = first, last, n - 1

    def __call__(self, stage: int, low: int, high: int) -> Number:
        total = self.prefix[high] - self.prefix[low]
        total += self.first if stage == 0 else 0
        return total + (self.last if stage == self.final_stage else 0)


def _check_counts(n_layers: int, n_stages: int) -> None:
    if n_layers < 1:
        raise CountOutOfRange("number of layers", "1 or more", n_layers)
    if not 1 <= n_stages <= n_layers:
        raise CountOutOfRange("number of stages", f"1..{n_layers} (layers)", n_stages)


def _parts(sums: _Sums, bounds: Sequence[int]) -> list[Number]:
    pairs = zip([0, *bounds], bounds, strict=False)
    return [sums(stage, low, high) for stage, (low, high) in enumerate(pairs)]


def _cut(
    sums: _Sums, n_layers: int, n_stages: int, allowed: _Allowed, *, squares: bool
) -> list[int] | None:
    """Ends of the stages that minimise the greatest sum, or the sum of squares; None if none."""
    best: list[tuple[Number, int] | None] = [(0, 0)] + [None] * n_layers
    choices: list[list[tuple[Number, int] | None]] = []
    for stage in range(n_stages):
        row: list[tuple[Number, int] | None] = [None] * (n_layers + 1)
        last = n_layers - (n_stages - 1 - stage)
        for high in range(stage + 1, last + 1):
            for low in range(stage, high):
                before = best[low]
                if before is None or not allowed(stage, low, high):
                    continue
                part = sums(stage, low, high)
                value = before[0] + part * part if squares else max(before[0], part)
                known = row[high]
                if known is None or value < known[0]:
                    row[high] = (value, low)
        choices.append(row)
        best = row
    bounds, high = [n_layers], n_layers
    for row in reversed(choices):
        chosen = row[high]
        if chosen is None:
            return None
        high = chosen[1]
        bounds.append(high)
    return bounds[-2::-1]
