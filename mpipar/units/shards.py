"""A line of values, and the plan that gives each rank its shard of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate

from mpipar.errors import CountOutOfRange, EmptyInput, RankMismatch
from mpipar.units.counts import (
    RankId,
    RankIndex,
    ShardLength,
    ShardStart,
    TensorElement,
    TensorLength,
    WorldSize,
)
from mpipar.units.quantity import hold


class ParallelStrategy(Enum):
    """What a strategy is called; every one splits another axis of the work (`splits`)."""

    DATA_PARALLEL = "data-parallel"
    TENSOR_PARALLEL = "tensor-parallel"
    PIPELINE_PARALLEL = "pipeline-parallel"

    def __str__(self) -> str:
        return self.value

    @property
    def splits(self) -> str:
        """The axis of the work that this strategy splits."""
        return _AXES[self]


_AXES = {
    ParallelStrategy.DATA_PARALLEL: "batch",
    ParallelStrategy.TENSOR_PARALLEL: "width",
    ParallelStrategy.PIPELINE_PARALLEL: "layers",
}


@dataclass(frozen=True)
class TensorLine:
    """At least one finite value, in order.

    Attributes
    ----------
    values : tuple of TensorElement
        The values.
    """

    values: tuple[TensorElement, ...]

    def __post_init__(self) -> None:
        values = tuple(map(TensorElement, self.values))
        if not values:
            raise EmptyInput("tensor line", "got no values; at least 1 is needed")
        object.__setattr__(self, "values", values)

    @classmethod
    def from_values(cls, values: Iterable[float]) -> TensorLine:
        """Make a line of plain numbers.

        Parameters
        ----------
        values : iterable of float
            At least one number, all finite.

        Returns
        -------
        TensorLine
            The line.

        Raises
        ------
        EmptyInput
            Without a value.
        NonFiniteValue
            For NaN or infinity.
        """
        return cls(tuple(map(TensorElement, values)))

    @property
    def length(self) -> TensorLength:
        """Number of values."""
        return TensorLength(len(self.values))

    @property
    def total(self) -> TensorElement:
        """Sum from first to last; `NonFiniteValue` when it overflows."""
        return TensorElement(sum(map(float, self.values)))

    def segment(self, start: ShardStart, length: ShardLength) -> TensorLine:
        """Cut `length` values out, from offset `start`.

        Parameters
        ----------
        start : ShardStart
            Offset of the first value.
        length : ShardLength
            Number of values.

        Returns
        -------
        TensorLine
            A line of its own.

        Raises
        ------
        CountOutOfRange
            If the segment leaves the line.
        """
        stop = int(start) + int(length)
        if stop > len(self.values):
            raise CountOutOfRange("segment end", f"1..{len(self.values)}", stop)
        return TensorLine(self.values[start:stop])


@dataclass(frozen=True)
class RankShard:
    """Values of one rank, with their owner and their offset in the whole line.

    Attributes
    ----------
    rank : RankId
        The owner.
    start : ShardStart
        Offset of the first value in the whole line.
    values : TensorLine
        The values.
    """

    rank: RankId
    start: ShardStart
    values: TensorLine

    def __post_init__(self) -> None:
        hold(self, start=ShardStart)

    @property
    def length(self) -> ShardLength:
        """Number of values."""
        return ShardLength(int(self.values.length))


@dataclass(frozen=True)
class ShardPlan:
    """One shard a rank, in rank order, that tile the whole line without gap or overlap.

    Attributes
    ----------
    strategy : ParallelStrategy
        Why the line is split.
    shards : tuple of RankShard
        Shard i belongs to rank i; a plan that breaks this is refused with `RankMismatch`.
    """

    strategy: ParallelStrategy
    shards: tuple[RankShard, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "shards", tuple(self.shards))
        if not self.shards:
            raise EmptyInput("shard plan", "got no shards; at least 1 is needed")
        world = WorldSize(len(self.shards))
        starts = accumulate((int(shard.length) for shard in self.shards), initial=0)
        for index, (shard, start) in enumerate(zip(self.shards, starts, strict=False)):
            if shard.rank != RankId(RankIndex(index), world) or int(shard.start) != start:
                raise RankMismatch(
                    "shard plan",
                    f"shard {index} of {world} must be owned by rank {index} of {world} and start "
                    f"at {start}; it has {shard.rank} of {shard.rank.world_size} and {shard.start}",
                )

    @property
    def world_size(self) -> WorldSize:
        """Number of ranks, which is the number of shards."""
        return WorldSize(len(self.shards))

    @property
    def line(self) -> TensorLine:
        """The whole line, joined again."""
        return TensorLine(tuple(v for shard in self.shards for v in shard.values.values))


def shard_tensor_line(line: TensorLine, world: WorldSize, strategy: ParallelStrategy) -> ShardPlan:
    """Split a line into equal contiguous shards in rank order.

    Parameters
    ----------
    line : TensorLine
        The global object.
    world : WorldSize
        Number of ranks.
    strategy : ParallelStrategy
        Why it is split; kept in the plan.

    Returns
    -------
    ShardPlan
        One shard a rank.

    Raises
    ------
    UnevenSplit
        If the length does not divide by the number of ranks.
    """
    world = WorldSize(world)
    length = line.length / world
    starts = [ShardStart(index * int(length)) for index in range(world)]
    shards = (
        RankShard(RankId(RankIndex(index), world), start, line.segment(start, length))
        for index, start in enumerate(starts)
    )
    return ShardPlan(strategy, tuple(shards))
