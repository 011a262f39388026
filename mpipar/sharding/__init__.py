"""Sharded arrays: how a global array lies on a mesh, and how it moves to another layout."""

from typing import TYPE_CHECKING, Any

from mpipar.sharding.plan import Kind, Plan, Step, plan_redistribution
from mpipar.sharding.sharding import ArraySpec, Sharding

if TYPE_CHECKING:
    from mpipar.sharding.array import ShardedArray

__all__ = [
    "ArraySpec",
    "Kind",
    "Plan",
    "ShardedArray",
    "Sharding",
    "Step",
    "plan_redistribution",
]


def __getattr__(name: str) -> Any:
    if name == "ShardedArray":
        from mpipar.sharding.array import ShardedArray

        return ShardedArray
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
