"""The founding surface: shards of a matrix by rows or columns, and the plan of a layer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from mpipar.errors import CountOutOfRange
from mpipar.units import ParallelStrategy
from mpipar.units.remainder import last_takes_rest_range, spread_range


class ShardDim(Enum):
    """Which dim of a matrix (rows, columns) is split; the value is its index."""

    Row = 0
    Column = 1


@dataclass(frozen=True)
class TensorShard:
    """One rank's part of a matrix.

    Parameters
    ----------
    rank, world_size : int
        Which of how many parts.
    dim : ShardDim
        The dim that is split.
    original_shape : tuple of int
        Rows and columns of the whole matrix.
    last_takes_rest : bool
        The last rank takes the remainder, as other libraries have it; else the first ranks take
        one more each.
    """

    rank: int
    world_size: int
    dim: ShardDim
    original_shape: tuple[int, int]
    last_takes_rest: bool = False

    def __post_init__(self) -> None:
        self.range  # noqa: B018 - refuses a rank or size that cannot be

    @property
    def range(self) -> tuple[int, int]:
        """First index of this shard along its dim, and one past the last."""
        split = last_takes_rest_range if self.last_takes_rest else spread_range
        return split(self.original_shape[self.dim.value], self.world_size, self.rank)

    @property
    def start(self) -> int:
        """First index of this shard along its dim."""
        return self.range[0]

    @property
    def end(self) -> int:
        """One past the last index of this shard."""
        return self.range[1]

    @property
    def shard_size(self) -> int:
        """Indices in this shard; may be 0."""
        return self.end - self.start


@dataclass(frozen=True)
class TensorParallelConfig:
    """Number of ranks that share each matrix.

    Parameters
    ----------
    world_size : int
        At least 1, else `CountOutOfRange`.
    """

    world_size: int

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise CountOutOfRange("tensor-parallel world size", "1 or more", self.world_size)

    def make_shard(
        self, rank: int, shape: tuple[int, int], dim: ShardDim, last_takes_rest: bool = False
    ) -> TensorShard:
        """The shard of one rank.

        Parameters
        ----------
        rank : int
            Which rank.
        shape : tuple of int
            Rows and columns of the whole matrix.
        dim : ShardDim
            The dim that is split.
        last_takes_rest : bool
            As in `TensorShard`.

        Returns
        -------
        TensorShard
            Shards of all ranks tile the matrix.
        """
        return TensorShard(rank, self.world_size, dim, shape, last_takes_rest)

    def shard_range(
        self, rank: int, full: int, dim: ShardDim, last_takes_rest: bool = False
    ) -> tuple[int, int]:
        """Indices of one rank along a dim of size `full`.

        Parameters
        ----------
        rank : int
            Which rank.
        full : int
            Size of the dim.
        dim : ShardDim
            The dim that is split.
        last_takes_rest : bool
            As in `TensorShard`.

        Returns
        -------
        tuple of int
            First index, and one past the last.
        """
        return self.make_shard(rank, (full, full), dim, last_takes_rest).range


@dataclass(frozen=True)
class LayerParallelPlan:
    """How one layer is run in parallel, and by which group.

    Parameters
    ----------
    name : str
        Of the layer.
    strategy : ParallelStrategy
        What is split.
    group_id : int
        Number of the group that runs it.
    """

    name: str
    strategy: ParallelStrategy
    group_id: int = 0

    def with_group(self, group_id: int) -> LayerParallelPlan:
        """The same plan for another group.

        Parameters
        ----------
        group_id : int
            Number of the group.

        Returns
        -------
        LayerParallelPlan
            A new plan.
        """
        return replace(self, group_id=group_id)
