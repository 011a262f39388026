"""What the verbs check of their arguments, and where their results go."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpipar.comm.arrays import is_plain, new_array, overlap, unpack
from mpipar.comm.call import Array
from mpipar.comm.device.arrays import address, on_device
from mpipar.errors import CountOutOfRange, LayoutError, UnsupportedArray
from mpipar.units.remainder import spread_sizes


def check_rank(role: str, rank: Any, size: int) -> int:
    """A rank of the group, or a refusal that names the range."""
    index = _whole(role, rank, size)
    if not 0 <= index < size:
        raise CountOutOfRange(role, f"0..{size - 1} (group of {size})", index)
    return index


def _whole(role: str, value: Any, size: int) -> int:
    if isinstance(value, (bool, np.bool_)) or not hasattr(value, "__index__"):
        raise UnsupportedArray(f"{role}={value!r} is no whole number; 0..{size - 1} would do")
    return operator.index(value)


def check_dim(x: Array, dim: int) -> int:
    index, n = operator.index(dim), x.ndim
    if not -n <= index < n:
        raise CountOutOfRange("dim", f"{-n}..{n - 1} for shape {x.shape}", index)
    return index % n


def block_sizes(counts: Sequence[int] | None, total: int, n: int, role: str) -> tuple[int, ...]:
    """Extents along the split dim: the user's, checked, or the spread ones."""
    if counts is None:
        return spread_sizes(total, n)
    sizes = tuple(operator.index(c) for c in counts)
    if len(sizes) != n or min(sizes) < 0 or sum(sizes) != total:
        raise LayoutError(
            f"{role}={list(sizes)} must be {n} sizes of at least 0 that sum to {total}; "
            f"they are {len(sizes)} and sum to {sum(sizes)}; "
            f"{list(spread_sizes(total, n))} would do"
        )
    return sizes


def check_out(out: Any, shape: tuple[int, ...], dtype: np.dtype[Any], like: Any = None) -> None:
    """Refuse an `out` that cannot take the result, or does not lie where `like` lies."""
    if out is None:
        return
    if type(out) is np.ndarray:
        if type(like) is not np.ndarray and like is not None:
            raise UnsupportedArray(
                "x lives on a device and out on the host: both must be on one side"
            )
    elif like is None or type(like) is np.ndarray or not on_device(out):
        raise UnsupportedArray(f"out must be a NumPy array, got {type(out).__name__}")
    if out.shape != shape or (out.dtype is not dtype and out.dtype != dtype):
        raise LayoutError(
            f"out has shape {out.shape} and dtype {out.dtype}; the result has shape {shape} and "
            f"dtype {dtype}"
        )
    if type(out) is np.ndarray and not out.flags.writeable:
        raise UnsupportedArray("out is read-only")


def target(
    out: Any, shape: tuple[int, ...], dtype: np.dtype[Any], like: Any = None
) -> tuple[Array, Callable[[Array], Array]]:
    """A flat buffer for the result where `like` lies, and what turns it into the user's array."""
    if out is None:
        return new_array(like, math.prod(shape), dtype), lambda buffer: buffer.reshape(shape)
    if (
        type(out) is np.ndarray
        and type(like) is np.ndarray
        and out.flags.carray
        and out.shape == shape
        and (out.dtype is dtype or out.dtype == dtype)
    ):  # nothing to refuse: the path of small messages
        return out.reshape(-1), lambda _: out
    check_out(out, shape, dtype, like)
    if is_plain(out):
        return out.reshape(-1), lambda _: out

    def copy_out(buffer: Array) -> Array:
        out[...] = buffer.reshape(shape)
        return out  # type: ignore[no-any-return]

    return new_array(like, math.prod(shape), dtype), copy_out


def joined(
    packed: Array, shape: tuple[int, ...], dim: int, sizes: Sequence[int], out: Any
) -> Array:
    """Packed blocks joined along `dim`, in the user's `out` where there is one."""
    whole = unpack(packed, shape, dim, sizes)
    if out is None:
        return whole
    out[...] = whole
    return out  # type: ignore[no-any-return]


def apart(source: Array, buffer: Array) -> Array:
    """`source`, or `buffer` itself where both are the same memory, or a copy where they overlap."""
    if source is buffer or not overlap(source, buffer):
        return source
    if (
        address(source) == address(buffer)
        and source.size == buffer.size
        and source.dtype == buffer.dtype
    ):
        return buffer
    return source.copy()


def dtype_name(dtype: np.dtype[Any]) -> str:
    """Text from which `named_dtype` makes the type again."""
    if dtype.names is not None:
        return repr(np.lib.format.dtype_to_descr(dtype))
    return dtype.name if dtype.isbuiltin == 2 else dtype.str


def named_dtype(name: str) -> np.dtype[Any]:
    """The dtype of a name; the types of ml_dtypes are loaded when needed."""
    if name.startswith("["):
        return np.dtype(np.lib.format.descr_to_dtype(ast.literal_eval(name)))
    try:
        found: np.dtype[Any] = np.dtype(name)
    except TypeError:
        import ml_dtypes

        found = np.dtype(getattr(ml_dtypes, name))
    return found
