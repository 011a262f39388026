"""Tensor and sequence parallelism: conjugate operators, and layers that hold 1/n of their weights.

Layers have ``forward``, ``backward_input`` and ``backward_weight``, take their parameters as a
mapping and need no model around them.
"""

from typing import TYPE_CHECKING, Any

from mpipar.tensor_parallel.founding import (
    LayerParallelPlan,
    ShardDim,
    TensorParallelConfig,
    TensorShard,
)
from mpipar.tensor_parallel.parameter import ShardedParameter, check_heads

if TYPE_CHECKING:
    from mpipar.tensor_parallel.linear import ColumnParallel, Linear, RowParallel
    from mpipar.tensor_parallel.operators import (
        AllGatherReduceScatter,
        AllReduceCopy,
        CopyAllReduce,
        GatherSplit,
        ReduceScatterAllGather,
        SplitGather,
    )
    from mpipar.tensor_parallel.random import draw_parameter, draw_shard, dropout_slope_shard
    from mpipar.tensor_parallel.sequence import SequenceParallelNorm, sum_replicated
    from mpipar.tensor_parallel.vocabulary import VocabParallelCrossEntropy, VocabParallelEmbedding

__all__ = [
    "AllGatherReduceScatter",
    "AllReduceCopy",
    "ColumnParallel",
    "CopyAllReduce",
    "GatherSplit",
    "LayerParallelPlan",
    "Linear",
    "ReduceScatterAllGather",
    "RowParallel",
    "SequenceParallelNorm",
    "ShardDim",
    "ShardedParameter",
    "SplitGather",
    "TensorParallelConfig",
    "TensorShard",
    "VocabParallelCrossEntropy",
    "VocabParallelEmbedding",
    "check_heads",
    "draw_parameter",
    "draw_shard",
    "dropout_slope_shard",
    "sum_replicated",
]

_ACTING = {
    "linear": ("ColumnParallel", "Linear", "RowParallel"),
    "operators": (
        "AllGatherReduceScatter",
        "AllReduceCopy",
        "CopyAllReduce",
        "GatherSplit",
        "ReduceScatterAllGather",
        "SplitGather",
    ),
    "random": ("draw_parameter", "draw_shard", "dropout_slope_shard"),
    "sequence": ("SequenceParallelNorm", "sum_replicated"),
    "vocabulary": ("VocabParallelCrossEntropy", "VocabParallelEmbedding"),
}


def __getattr__(name: str) -> Any:
    import importlib

    for module, names in _ACTING.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
