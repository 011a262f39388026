"""The table of quantities: one class statement each, with what it divides, adds and scales into.

==========================================  ======================  ==========================
expression                                  result                  fails with
==========================================  ======================  ==========================
``GlobalBatchSize / WorldSize``             `LocalBatchSize`        `UnevenSplit`
``ModelWidth / WorldSize``                  `ShardWidth`            `UnevenSplit`
``LayerCount / WorldSize``                  `LayersPerRank`         `UnevenSplit`
``TensorLength / WorldSize``                `ShardLength`           `UnevenSplit`
``PipelineStageCount + MicroBatchCount``    `PipelineScheduleLength`  `Overflow`
``CommunicationBytes + CommunicationBytes``  `CommunicationBytes`   `Overflow`
``CommunicationBytes * CommunicationRounds``  `CommunicationBytes`  `Overflow`
``Bytes / BytesPerSecond``                  `Seconds`               `NonFiniteValue`
``Bytes / Seconds``                         `BytesPerSecond`        `EmptyInput` (zero bytes)
``Flops / FlopsPerSecond``                  `Seconds`               `NonFiniteValue`
``Flops / Seconds``                         `FlopsPerSecond`        `EmptyInput` (zero work)
==========================================  ======================  ==========================

`Bytes`, `Seconds` and `Flops` also add. Anything not listed is a `TypeError`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar, get_args, overload

from mpipar.errors import CountOutOfRange, OutOfRange, RankMismatch
from mpipar.units.quantity import Count, Measure, Quantity, Summable, hold
from mpipar.units.remainder import exact_size

_R = TypeVar("_R", bound=Quantity)


class WorldSize(Count):
    """Number of ranks of a group."""


class _ResultOf(Quantity, Generic[_R]):
    """A kind whose division gives `_R`, which the class statement names once for both readers."""

    _result: type[Any]

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        arguments = (a for b in cls.__dict__.get("__orig_bases__", ()) for a in get_args(b))
        for result in arguments:
            if isinstance(result, type):
                cls._result = result


class SplitsInto(Count, _ResultOf[_R]):
    """A count that ranks share exactly: divided by a `WorldSize` it gives the share of a rank."""

    def __truediv__(self, world: WorldSize) -> _R:
        if not isinstance(world, WorldSize):
            return NotImplemented
        size = exact_size(int(self), int(world), self.role, world.role)
        share: _R = self._result(size)
        return share


class Spent(_ResultOf[_R]):
    """A kind that is spent at a rate: divided by its rate a time, divided by a time its rate."""

    @overload
    def __truediv__(self, other: _R) -> Seconds: ...
    @overload
    def __truediv__(self, other: Seconds) -> _R: ...
    def __truediv__(self, other: _R | Seconds) -> _R | Seconds:
        if not isinstance(other, Seconds | self._result):
            return NotImplemented
        if not other:
            raise OutOfRange(f"time that divides {self.role}", "of real numbers above 0", 0.0)
        kind: type[Any] = self._result if isinstance(other, Seconds) else Seconds
        quotient: _R | Seconds = kind(self._number / other._number)
        return quotient


class LocalBatchSize(Count):
    """Samples of one step on one rank."""


class GlobalBatchSize(SplitsInto[LocalBatchSize]):
    """Samples of one step on all ranks together."""


class ShardWidth(Count):
    """Part of a model width that one rank owns."""


class ModelWidth(SplitsInto[ShardWidth]):
    """Features of a layer, over all ranks."""


class LayersPerRank(Count):
    """Layers of one pipeline stage."""


class LayerCount(SplitsInto[LayersPerRank]):
    """Layers of the whole model."""


class ShardLength(Count):
    """Elements of a line that one rank owns."""


class TensorLength(SplitsInto[ShardLength]):
    """Elements of a whole line."""


class ShardStart(Count, zero=True):
    """Offset of a shard in the whole line, from 0."""


class RankIndex(Count, zero=True):
    """Index of a rank, from 0, before a world bounds it."""


class TensorElement(Measure, zero=True, negative=True, spec=".1f"):
    """One finite value of a line; prints with one decimal."""


class MicroBatchCount(Count):
    """Microbatches of one step."""


class PipelineScheduleLength(Count, unit="schedule slots"):
    """Slots of a forward pipeline schedule."""


class PipelineStageCount(Count):
    """Stages of a pipeline; with the microbatches it gives the forward schedule's length."""

    def __add__(self, microbatches: MicroBatchCount) -> PipelineScheduleLength:
        if not isinstance(microbatches, MicroBatchCount):
            return NotImplemented
        return PipelineScheduleLength(int(self) - 1 + int(microbatches))


class Seconds(Summable, Measure, zero=True, unit="s"):
    """A time."""


class BytesPerSecond(Measure, unit="bytes/s"):
    """A bandwidth."""


class FlopsPerSecond(Measure, unit="FLOP/s"):
    """A rate of floating-point operations."""


class Flops(Summable, Spent[FlopsPerSecond], Measure, zero=True, unit="FLOP"):
    """Floating-point operations; real, since a training run exceeds ``2**63``."""


class CommunicationRounds(Count, unit="rounds"):
    """Times that a buffer crosses the network in an estimate."""


class _ByteCount(Summable, Spent[BytesPerSecond], Count, unit="bytes"):
    """What both byte counts share."""

    def __mul__(self, rounds: CommunicationRounds) -> Self:
        if not isinstance(rounds, CommunicationRounds):
            return NotImplemented
        return type(self)(int(self) * int(rounds))


class Bytes(_ByteCount, zero=True):
    """A size or an exact amount of traffic, zero allowed."""


class CommunicationBytes(_ByteCount):
    """Bytes that a collective is asked to move; a call that moves none is refused."""


@dataclass(frozen=True)
class RankId:
    """A rank that its world has; prints as ``rank 3``.

    Attributes
    ----------
    index : RankIndex
        Below `world_size`, else `CountOutOfRange`.
    world_size : WorldSize
        The world that bounds it. Ranks of two worlds do not compare (`RankMismatch`).
    """

    index: RankIndex
    world_size: WorldSize

    def __post_init__(self) -> None:
        hold(self, index=RankIndex, world_size=WorldSize)
        if int(self.index) >= int(self.world_size):
            raise CountOutOfRange("rank index", f"0..{self.world_size}", int(self.index))

    def __int__(self) -> int:
        return int(self.index)

    def __index__(self) -> int:
        return int(self.index)

    def _peer(self, other: RankId) -> RankIndex:
        if self.world_size != other.world_size:
            worlds = f"{self.world_size} and {other.world_size}"
            raise RankMismatch("rank order", f"{self} and {other} are of worlds {worlds}")
        return other.index

    def __lt__(self, other: RankId) -> bool:
        return self.index < self._peer(other) if isinstance(other, RankId) else NotImplemented

    def __le__(self, other: RankId) -> bool:
        return self.index <= self._peer(other) if isinstance(other, RankId) else NotImplemented

    def __str__(self) -> str:
        return f"rank {self.index}"

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)
