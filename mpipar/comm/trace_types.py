"""Typed traces of collectives: what went in, what came out, and how many bytes it cost.

Pure values over `mpipar.units`; nothing here communicates. An all-reduce is a reduce-scatter
followed by an all-gather, and the byte figures add up in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from mpipar.errors import CollectiveMismatch, EmptyInput
from mpipar.units import (
    Bytes,
    CommunicationBytes,
    CommunicationRounds,
    ShardLength,
    ShardPlan,
    ShardStart,
    TensorElement,
    TensorLine,
    WorldSize,
)
from mpipar.units.remainder import spread_sizes


class CollectiveKind(Enum):
    """The kinds of communication that a trace may show."""

    ALL_REDUCE = "all-reduce"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_GATHER = "all-gather"
    ALL_TO_ALL = "all-to-all"
    BROADCAST = "broadcast"
    REDUCE = "reduce"
    GATHER = "gather"
    SCATTER = "scatter"
    BARRIER = "barrier"
    POINT_TO_POINT = "point-to-point"

    def __str__(self) -> str:
        return self.value


class ParallelTraceVisibility(Enum):
    """Who may see a trace."""

    PUBLIC = "public"
    RESEARCH_RESTRICTED = "research-restricted"
    PRIVATE = "private"

    def __str__(self) -> str:
        return self.value


# Rounds of the large-world estimate; a kind that is missing here has no ring form.
_ROUNDS = {
    CollectiveKind.REDUCE_SCATTER: 1,
    CollectiveKind.ALL_GATHER: 1,
    CollectiveKind.ALL_REDUCE: 2,
}


def _rounds(kind: CollectiveKind) -> CommunicationRounds:
    if kind not in _ROUNDS:
        known = ", ".join(map(str, _ROUNDS))
        raise CollectiveMismatch(f"no ring form of kind {kind}; there is one of {known}")
    return CommunicationRounds(_ROUNDS[kind])


def exact_ring_bytes(kind: CollectiveKind, shard_bytes: Sequence[int]) -> tuple[Bytes, ...]:
    """Bytes that each rank sends in the ring form of a collective.

    In the reduce-scatter, rank r sends every shard but its own; in the all-gather, every shard
    but that of its right neighbour. With equal shards of a buffer of B bytes that is
    ``(N - 1) / N * B`` each, and twice as much for the all-reduce.

    Parameters
    ----------
    kind : CollectiveKind
        All-reduce, reduce-scatter or all-gather.
    shard_bytes : sequence of int
        Size of every rank's shard, in rank order; zero is allowed.

    Returns
    -------
    tuple of Bytes
        One figure a rank; zero in a world of one.

    Raises
    ------
    CollectiveMismatch
        For a kind without a ring form.
    EmptyInput
        Without a rank.
    """
    _rounds(kind)
    if not shard_bytes:
        raise EmptyInput("exact ring bytes", "got no shards; at least 1 is needed")
    sizes = [int(Bytes(size)) for size in shard_bytes]
    whole = sum(sizes)
    scattered = [whole - own for own in sizes]
    gathered = scattered[1:] + scattered[:1]
    if kind is CollectiveKind.REDUCE_SCATTER:
        return tuple(map(Bytes, scattered))
    if kind is CollectiveKind.ALL_GATHER:
        return tuple(map(Bytes, gathered))
    return tuple(Bytes(s + g) for s, g in zip(scattered, gathered, strict=True))


@dataclass(frozen=True)
class CollectiveTrace:
    """One collective over a line that is sharded over the ranks.

    Each rank brings its shard. The all-reduce gives every rank the sum of all values, the
    all-gather the whole line, the reduce-scatter each rank its part of the shards' element-wise
    sum (so a shard must divide by the number of ranks, else `UnevenSplit`).

    Attributes
    ----------
    kind : CollectiveKind
        All-reduce, reduce-scatter or all-gather; another is refused with `CollectiveMismatch`.
    input : ShardPlan
        Shard of each rank.
    bytes_per_rank : CommunicationBytes
        Size of the full buffer at each rank: what goes in and comes out of an all-reduce, goes
        into a reduce-scatter, comes out of an all-gather.
    """

    kind: CollectiveKind
    input: ShardPlan
    bytes_per_rank: CommunicationBytes

    def __post_init__(self) -> None:
        object.__setattr__(self, "bytes_per_rank", CommunicationBytes(self.bytes_per_rank))
        _ = self.communication_estimate, self.reduced_value, self.output

    @classmethod
    def all_reduce(cls, plan: ShardPlan, bytes_per_rank: CommunicationBytes) -> CollectiveTrace:
        """Every rank gets the sum of all values.

        Parameters
        ----------
        plan : ShardPlan
            Shard of each rank.
        bytes_per_rank : CommunicationBytes
            Size of the buffer that each rank reduces.

        Returns
        -------
        CollectiveTrace
            The trace.
        """
        return cls(CollectiveKind.ALL_REDUCE, plan, bytes_per_rank)

    @classmethod
    def reduce_scatter(cls, plan: ShardPlan, bytes_per_rank: CommunicationBytes) -> CollectiveTrace:
        """Each rank gets its part of the sum of the shards.

        Parameters
        ----------
        plan : ShardPlan
            Shard of each rank.
        bytes_per_rank : CommunicationBytes
            Size of the buffer that each rank puts in.

        Returns
        -------
        CollectiveTrace
            The trace.
        """
        return cls(CollectiveKind.REDUCE_SCATTER, plan, bytes_per_rank)

    @classmethod
    def all_gather(cls, plan: ShardPlan, bytes_per_rank: CommunicationBytes) -> CollectiveTrace:
        """Every rank gets the whole line.

        Parameters
        ----------
        plan : ShardPlan
            Shard of each rank.
        bytes_per_rank : CommunicationBytes
            Size of the buffer that each rank gets out.

        Returns
        -------
        CollectiveTrace
            The trace.
        """
        return cls(CollectiveKind.ALL_GATHER, plan, bytes_per_rank)

    @property
    def reduced_value(self) -> TensorElement:
        """Sum of the shards' sums, which every kind preserves."""
        return TensorElement(sum(float(shard.values.total) for shard in self.input.shards))

    @property
    def output(self) -> tuple[TensorLine, ...]:
        """What each rank holds afterwards, in rank order."""
        world = self.input.world_size
        if self.kind is CollectiveKind.ALL_REDUCE:
            return (TensorLine((self.reduced_value,)),) * int(world)
        if self.kind is CollectiveKind.ALL_GATHER:
            return (self.input.line,) * int(world)
        lengths = [int(shard.length) for shard in self.input.shards]
        if len(set(lengths)) > 1:
            raise CollectiveMismatch(f"reduce-scatter needs shards of one length, got {lengths}")
        columns = zip(*(map(float, s.values.values) for s in self.input.shards), strict=True)
        total = TensorLine.from_values(map(sum, columns))
        part: ShardLength = total.length / world
        return tuple(total.segment(ShardStart(r * int(part)), part) for r in range(world))

    @property
    def communication_estimate(self) -> CommunicationBytes:
        """Large-world estimate a rank: the buffer times 2 rounds (all-reduce) or 1 (the others)."""
        return self.bytes_per_rank * _rounds(self.kind)

    @property
    def exact_bytes_per_rank(self) -> tuple[Bytes, ...]:
        """Bytes that each rank sends, counted from its shard sizes; zero in a world of one."""
        sizes = spread_sizes(int(self.bytes_per_rank), int(self.input.world_size))
        return exact_ring_bytes(self.kind, sizes)


@dataclass(frozen=True)
class MeasuredCollective:
    """One collective of a real run: kind, ranks and bytes, without any values.

    Attributes
    ----------
    kind : CollectiveKind
        What was called.
    world_size : WorldSize
        Ranks of the group; 2 for a message.
    bytes_per_rank : CommunicationBytes
        Size of the full buffer at a rank, as in `CollectiveTrace`.
    """

    kind: CollectiveKind
    world_size: WorldSize
    bytes_per_rank: CommunicationBytes

    @property
    def exact_bytes_per_rank(self) -> tuple[Bytes, ...]:
        """Bytes that each rank sends at least; the first rank is the root, or sends the message.

        All-reduce, reduce-scatter and all-gather in their ring forms; in an all-to-all each rank
        sends all but its own block; a broadcast, a scatter and a message leave the root, a reduce
        and a gather leave the others.
        """
        n, whole = int(self.world_size), int(self.bytes_per_rank)
        sizes = spread_sizes(whole, n)
        if self.kind in _ROUNDS:
            return exact_ring_bytes(self.kind, sizes)
        if self.kind is CollectiveKind.ALL_TO_ALL:
            return tuple(Bytes(whole - own) for own in sizes)
        first, others = {
            CollectiveKind.BROADCAST: (whole if n > 1 else 0, 0),
            CollectiveKind.SCATTER: (whole - sizes[0], 0),
            CollectiveKind.POINT_TO_POINT: (whole, 0),
            CollectiveKind.REDUCE: (0, whole),
            CollectiveKind.GATHER: (0, whole // n),
        }.get(self.kind, (0, 0))
        return (Bytes(first), *(Bytes(others) for _ in range(n - 1)))
