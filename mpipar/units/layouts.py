"""Three layouts that say which part of the global object a rank owns.

Data parallelism splits the batch, tensor parallelism the width, pipeline parallelism the layers.
All are exact: what does not divide is refused, with the nearest sizes that would.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mpipar.errors import RankMismatch
from mpipar.units.counts import (
    GlobalBatchSize,
    LayerCount,
    LayersPerRank,
    LocalBatchSize,
    ModelWidth,
    PipelineStageCount,
    RankId,
    ShardWidth,
    WorldSize,
)
from mpipar.units.quantity import Count, hold
from mpipar.units.shards import ParallelStrategy


class _Layout:
    """What the three share: equal contiguous parts in rank order."""

    strategy: ClassVar[ParallelStrategy]
    world_size: WorldSize

    def _share(self) -> Count:
        raise NotImplementedError

    def owned_by(self, rank: RankId) -> range:
        """Part of the global object that a rank owns.

        Parameters
        ----------
        rank : RankId
            A rank of this layout's world, else `RankMismatch`.

        Returns
        -------
        range
            Indices of samples, features or layers.
        """
        if rank.world_size != self.world_size:
            worlds = f"{rank.world_size}, the layout of one of {self.world_size}"
            raise RankMismatch("layout", f"{rank} is of a world of {worlds}")
        share = int(self._share())
        return range(int(rank) * share, (int(rank) + 1) * share)


@dataclass(frozen=True)
class DataParallelLayout(_Layout):
    """A global batch over ranks; `UnevenSplit` when it does not divide.

    Attributes
    ----------
    global_batch : GlobalBatchSize
        Samples of a step, all ranks together.
    world_size : WorldSize
        Number of ranks.
    """

    strategy = ParallelStrategy.DATA_PARALLEL
    global_batch: GlobalBatchSize
    world_size: WorldSize

    def __post_init__(self) -> None:
        hold(self, global_batch=GlobalBatchSize, world_size=WorldSize)
        self._share()

    def _share(self) -> LocalBatchSize:
        return self.global_batch / self.world_size

    @property
    def local_batch(self) -> LocalBatchSize:
        """Samples of a step on one rank."""
        return self._share()


@dataclass(frozen=True)
class TensorParallelLayout(_Layout):
    """A model width over ranks; `UnevenSplit` when it does not divide.

    Attributes
    ----------
    model_width : ModelWidth
        Features over all ranks.
    world_size : WorldSize
        Number of ranks.
    """

    strategy = ParallelStrategy.TENSOR_PARALLEL
    model_width: ModelWidth
    world_size: WorldSize

    def __post_init__(self) -> None:
        hold(self, model_width=ModelWidth, world_size=WorldSize)
        self._share()

    def _share(self) -> ShardWidth:
        return self.model_width / self.world_size

    @property
    def shard_width(self) -> ShardWidth:
        """Features on one rank."""
        return self._share()


@dataclass(frozen=True)
class PipelineLayout(_Layout):
    """Layers over pipeline stages, one rank a stage; `UnevenSplit` when they do not divide.

    ``layout.stage_count + microbatches`` is the length of the forward schedule.

    Attributes
    ----------
    layer_count : LayerCount
        Layers of the whole model.
    world_size : WorldSize
        Number of ranks, which is the number of stages.
    """

    strategy = ParallelStrategy.PIPELINE_PARALLEL
    layer_count: LayerCount
    world_size: WorldSize

    def __post_init__(self) -> None:
        hold(self, layer_count=LayerCount, world_size=WorldSize)
        self._share()

    def _share(self) -> LayersPerRank:
        return self.layer_count / self.world_size

    @property
    def stage_count(self) -> PipelineStageCount:
        """Number of stages."""
        return PipelineStageCount(int(self.world_size))

    @property
    def layers_per_rank(self) -> LayersPerRank:
        """Layers of one stage."""
        return self._share()
