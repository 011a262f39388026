"""Several lazy arrays of one device become one: reduced element by element, or joined."""

from __future__ import annotations

from collections.abc import Sequence

from mpipar.comm.call import ReduceOp
from mpipar.device_group.lazy import LazyArray, check_together, reduced_dtype
from mpipar.errors import EmptyInput, LayoutError


def check_alike(arrays: Sequence[LazyArray], what: str) -> None:
    """Refuse arrays of different shapes or dtypes."""
    first = arrays[0]
    for i, array in enumerate(arrays):
        if (array.shape, array.dtype) != (first.shape, first.dtype):
            raise LayoutError(
                f"{what}: shard 0 is {first.dtype} {first.shape}, shard {i} is {array.dtype} "
                f"{array.shape}; all must be alike"
            )


def combine(arrays: Sequence[LazyArray], op: ReduceOp) -> LazyArray:
    """Reduce arrays of one shape element by element, in order; a chain becomes one pass.

    Parameters
    ----------
    arrays : sequence of LazyArray
        Of one shape, dtype and device.
    op : ReduceOp
        Not a location form.

    Returns
    -------
    LazyArray
        Bitwise equal to the left fold.
    """
    check_together(arrays, str(op))
    first, dtype = arrays[0], reduced_dtype(arrays[0].dtype, op)
    check_alike(arrays, str(op))
    if len(arrays) == 1 and dtype == first.dtype:
        return first
    return first.made("combine", *arrays[1:], shape=first.shape, dtype=dtype, reduce_op=op)


def concatenate(arrays: Sequence[LazyArray], dim: int = 0) -> LazyArray:
    """Join arrays along a dim.

    Parameters
    ----------
    arrays : sequence of LazyArray
        Of one dtype and device, alike but for that dim.
    dim : int
        Along which.

    Returns
    -------
    LazyArray
        Joined in order; parts without elements are dropped.

    Raises
    ------
    EmptyInput
        Without an array.
    LayoutError
        If they do not fit together.
    """
    if not arrays:
        raise EmptyInput("concatenate", "got no arrays; at least 1 is needed")
    check_together(arrays, "concatenate")
    first, dim = arrays[0], arrays[0].dim(dim)
    rest = (*first.shape[:dim], *first.shape[dim + 1 :])
    for i, a in enumerate(arrays):
        if (*a.shape[:dim], *a.shape[dim + 1 :]) != rest or a.dtype != first.dtype:
            raise LayoutError(
                f"concatenate along dim {dim}: array 0 is {first.dtype} {first.shape}, array {i} "
                f"is {a.dtype} {a.shape}"
            )
    parts = [a for a in arrays if a.shape[dim]] or [first]
    if len(parts) == 1:
        return parts[0]
    shape = (*first.shape[:dim], sum(a.shape[dim] for a in parts), *first.shape[dim + 1 :])
    return parts[0].made("concatenate", *parts[1:], shape=shape, dim=dim)
