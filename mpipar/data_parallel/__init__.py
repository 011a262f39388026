"""Data parallelism for the user's own model: any mapping of names to arrays."""

from typing import TYPE_CHECKING, Any

from mpipar.data_parallel.buckets import Bucket, plan_buckets

if TYPE_CHECKING:
    from mpipar.data_parallel.data_parallel import DataParallel

__all__ = ["Bucket", "DataParallel", "plan_buckets"]


def __getattr__(name: str) -> Any:
    if name == "DataParallel":
        from mpipar.data_parallel.data_parallel import DataParallel

        return DataParallel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
