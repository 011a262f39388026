"""The array layer of the seam: what may be communicated, layouts, and exact reductions.

Nothing outside this module asks what kind of array it holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from mpipar.comm.call import Array, ReduceOp
from mpipar.comm.device.arrays import address, library, on_device, package_of
from mpipar.errors import UnsupportedArray

_LOCATION = (ReduceOp.MIN_LOCATION, ReduceOp.MAX_LOCATION)
_ORDERED = (ReduceOp.MIN, ReduceOp.MAX, *_LOCATION)
_UFUNCS = {
    ReduceOp.SUM: np.add,
    ReduceOp.MEAN: np.add,
    ReduceOp.PRODUCT: np.multiply,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
}


def as_array(x: Any, role: str) -> Array:
    """The user's object as a NumPy array on the host, without a copy where that is possible.

    Parameters
    ----------
    x : array-like
        NumPy array, scalar, nested list, or a CPU array of another library (through DLPack).
    role : str
        Name of the argument in messages.

    Returns
    -------
    ndarray
        Of any layout, in native byte order.

    Raises
    ------
    UnsupportedArray
        For Python objects and for device arrays, which need the device layer.
    """
    if type(x) is not np.ndarray:
        if on_device(x):
            raise UnsupportedArray(
                f"{role} lives on a device; this call reads host memory: copy it with "
                "array.get() or numpy.asarray first"
            )
        if isinstance(x, np.ma.MaskedArray):
            raise UnsupportedArray(
                f"{role} is a masked array, whose mask would be lost: send x.filled(value), or "
                "its data and its mask"
            )
        try:
            x = np.from_dlpack(x) if hasattr(x, "__dlpack__") else np.asarray(x)
        except (TypeError, ValueError, RuntimeError, BufferError) as error:
            raise UnsupportedArray(f"{role} is no array: {error}") from None
    kind = x.dtype
    if kind.hasobject:
        raise UnsupportedArray(
            f"{role} has dtype {kind}: Python objects are not sent; use the *_json verbs"
        )
    if not kind.isnative:
        x = x.astype(kind.newbyteorder("="))
    return x  # type: ignore[no-any-return]


def as_given(x: Any, role: str) -> Any:
    """Like `as_array`, but an array on a device stays there.

    Parameters
    ----------
    x : array-like
        What the user gave.
    role : str
        Name of the argument in messages.

    Returns
    -------
    array
        On the host, or of the device library.
    """
    if type(x) is np.ndarray or not on_device(x):
        return as_array(x, role)
    return library(package_of(x)).array(x)


def new_array(like: Any, shape: int | tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """A C-ordered array where `like` lies, not initialised.

    Parameters
    ----------
    like : array or None
        None for the host.
    shape : int or tuple of int
        Of the new array.
    dtype : dtype
        Of the new array.

    Returns
    -------
    array
        Of the library of `like`.
    """
    if type(like) is np.ndarray or like is None:
        return np.empty(shape, dtype)
    return library(package_of(like)).empty(shape, dtype)


def overlap(a: Any, b: Any) -> bool:
    """Whether two contiguous arrays have memory in common."""
    if type(a) is np.ndarray and type(b) is np.ndarray:
        return np.may_share_memory(a, b)
    if not (on_device(a) and on_device(b)):
        return False
    first, second = address(a), address(b)
    return bool(first < second + b.nbytes and second < first + a.nbytes)


def flat(x: Array) -> Array:
    """The elements in C order as one dimension; a view where the layout allows it.

    Parameters
    ----------
    x : ndarray
        Of any layout.

    Returns
    -------
    ndarray
        Flat and C-contiguous.
    """
    return x.reshape(-1) if is_plain(x) else x.copy("C").reshape(-1)


def is_plain(x: Array) -> bool:
    """Whether the MPI can take the memory as it is: in C order, and aligned for its type."""
    flags = x.flags
    return flags.c_contiguous and (type(x) is not np.ndarray or flags.aligned)


@lru_cache(maxsize=256)
def accumulation_dtype(dtype: np.dtype[Any], op: ReduceOp) -> np.dtype[Any]:
    """In which type a reduction is carried out.

    Parameters
    ----------
    dtype : dtype
        Of the input.
    op : ReduceOp
        The reduction.

    Returns
    -------
    dtype
        float32 for narrower floats, float64 for the mean of whole numbers, else `dtype`.

    Raises
    ------
    UnsupportedArray
        Where the reduction has no meaning: sums of bool, order of complex, anything of text.
    """
    kind = "f" if _is_small_float(dtype) else dtype.kind
    if kind not in "biufc":
        raise UnsupportedArray(f"{op} of dtype {dtype} is not defined; numbers are needed")
    if kind == "b" and op not in _ORDERED:
        raise UnsupportedArray(
            f"{op} of bool is ambiguous: use max for 'any', min for 'all', or convert to int64 "
            "to count"
        )
    if kind == "c" and op in _ORDERED:
        raise UnsupportedArray(f"{op} of complex numbers is not defined: reduce abs(x)")
    if kind in "iu" and op is ReduceOp.MEAN:
        return np.dtype(np.float64)
    if kind == "f" and dtype.itemsize < 4:
        return np.dtype(np.float32)
    return dtype


def _is_small_float(dtype: np.dtype[Any]) -> bool:
    """Whether this is float16, bfloat16 or one of the 8-bit floats of ml_dtypes."""
    return dtype == np.float16 or (
        dtype.kind in "Vf" and dtype.itemsize < 4 and dtype.name.startswith(("bfloat", "float"))
    )


@lru_cache(maxsize=256)
def result_dtype(dtype: np.dtype[Any], op: ReduceOp) -> np.dtype[Any]:
    """Element type of the result of a reduction.

    Parameters
    ----------
    dtype : dtype
        Of the input.
    op : ReduceOp
        The reduction.

    Returns
    -------
    dtype
        That of the input, but float64 for the mean of whole numbers.
    """
    wide = accumulation_dtype(dtype, op)
    return wide if dtype.kind in "iu" else dtype


def reduce_rows(rows: Sequence[Array], op: ReduceOp, out: Array) -> None:
    """Reduce equal flat arrays in rank order into `out`, with the stated accumulation.

    Parameters
    ----------
    rows : sequence of ndarray
        One flat array a rank, in rank order.
    op : ReduceOp
        The reduction; the location forms write values, then ranks, into the halves of `out`.
    out : ndarray
        Flat; may be one of `rows` only if no other row overlaps it.
    """
    dtype = rows[0].dtype
    if op in _LOCATION:
        stack = np.stack(rows)
        where = np.argmin(stack, axis=0) if op is ReduceOp.MIN_LOCATION else np.argmax(stack, 0)
        out["value"] = np.take_along_axis(stack, where[None], axis=0)[0]
        out["rank"] = where
        return
    wide = accumulation_dtype(dtype, op)
    ufunc = _UFUNCS[op]
    with np.errstate(all="ignore"):  # overflow is silent, as in the MPI
        total = rows[0].astype(wide)
        for row in rows[1:]:
            ufunc(total, row.astype(wide, copy=False), out=total)
        if op is ReduceOp.MEAN:
            np.divide(total, len(rows), out=total)
        out[...] = total.astype(out.dtype, copy=False)


def raw_bytes(x: Array) -> memoryview:
    """The bytes of an array, for copies that begin sooner than NumPy's.

    Parameters
    ----------
    x : ndarray
        C-contiguous, not empty.

    Returns
    -------
    memoryview
        Flat.
    """
    try:
        return x.data.cast("B")
    except (BufferError, TypeError, ValueError):  # types that only NumPy knows
        return memoryview(x.reshape(-1).view(np.uint8))  # type: ignore[arg-type]


def location_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Structured type that holds a value and the rank where it was found.

    Parameters
    ----------
    dtype : dtype
        Of the value.

    Returns
    -------
    dtype
        Fields ``value`` and ``rank`` (int64).
    """
    return np.dtype([("value", dtype), ("rank", np.int64)])


def pack(x: Array, dim: int, sizes: Sequence[int]) -> Array:
    """Blocks of `x` along `dim` one after the other, each in C order.

    Parameters
    ----------
    x : ndarray
        What is cut.
    dim : int
        Where it is cut.
    sizes : sequence of int
        Extent of each block along `dim`.

    Returns
    -------
    ndarray
        Flat; a view where `dim` is the outermost dimension of a C-ordered array.
    """
    if is_plain(x) and all(n == 1 for n in x.shape[:dim]):
        return x.reshape(-1)
    packed = new_array(x, x.size, x.dtype)
    start = offset = 0
    for size in sizes:
        block = x[(slice(None),) * dim + (slice(start, start + size),)]
        packed[offset : offset + block.size].reshape(block.shape)[...] = block
        start, offset = start + size, offset + block.size
    return packed  # type: ignore[no-any-return]


def unpack(packed: Array, shape: tuple[int, ...], dim: int, sizes: Sequence[int]) -> Array:
    """The array whose blocks along `dim` are `packed`: the inverse of `pack`.

    Parameters
    ----------
    packed : ndarray
        Flat blocks, one after the other.
    shape : tuple of int
        Shape of the result.
    dim : int
        Where the blocks are joined.
    sizes : sequence of int
        Extent of each block along `dim`.

    Returns
    -------
    ndarray
        C-ordered; a view of `packed` where the blocks are already in place.
    """
    if all(n == 1 for n in shape[:dim]):
        return packed.reshape(shape)
    whole: Array = new_array(packed, shape, packed.dtype)
    start = offset = 0
    for size in sizes:
        block = (*shape[:dim], size, *shape[dim + 1 :])
        n_elements = int(np.prod(block, dtype=np.int64))
        index = (slice(None),) * dim + (slice(start, start + size),)
        whole[index] = packed[offset : offset + n_elements].reshape(block)
        start, offset = start + size, offset + n_elements
    return whole
