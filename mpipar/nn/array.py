"""The array layer: one set of formulas for NumPy and every other array-API library.

`namespace` hands out the array's own library, with ``out=`` on every function: NumPy has it, for
the others the result is copied. Multi-pass elementwise formulas run over row chunks that stay in
the second-level cache (`row_chunks`), which is where their speed comes from.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import array_api_compat
import array_api_compat.numpy as np_compat
import numpy as np

from mpipar.errors import UnsupportedArray

Array = Any
"""An array of any library that follows the array-API standard."""

CHUNK_BYTES = 256 * 1024
"""Bytes of one array that a multi-pass formula works on at a time."""


class _WithOut:
    """A namespace whose functions take ``out=`` although the library's own may not."""

    def __init__(self, xp: Any) -> None:
        self._xp = xp

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._xp, name)
        if not callable(found) or isinstance(found, type):
            return found
        wrapped = _copying_out(found)
        setattr(self, name, wrapped)
        return wrapped


def _copying_out(function: Callable[..., Array]) -> Callable[..., Array]:
    @functools.wraps(function)
    def call(*args: Any, out: Array = None, **keywords: Any) -> Array:
        result = function(*args, **keywords)
        if out is None:
            return result
        out[...] = result
        return out

    return call


_wrapped: dict[str, _WithOut] = {}


def namespace(*arrays: Array) -> Any:
    """Return the array library of `arrays`, with ``out=`` on its functions.

    Parameters
    ----------
    *arrays : Array
        Arrays of one library; None is skipped.

    Returns
    -------
    Any
        An array-API namespace.

    Raises
    ------
    UnsupportedArray
        If the arrays are not arrays, or not of one library.
    """
    given = [a for a in arrays if a is not None]
    if all(isinstance(a, np.ndarray | np.generic) for a in given):
        return np_compat
    try:
        xp = array_api_compat.array_namespace(*given)
    except TypeError as error:
        kinds = ", ".join(sorted({type(a).__name__ for a in given}))
        raise UnsupportedArray(
            f"arrays of one array-API library are needed, got {kinds}; convert them to one first"
        ) from error
    return _wrapped.setdefault(xp.__name__, _WithOut(xp))


def row_chunks(rows: Array, width: int | None = None) -> Iterator[slice]:
    """Cut the rows of a matrix into runs of about `CHUNK_BYTES`.

    Parameters
    ----------
    rows : Array
        Shape ``(n_rows, width)``.
    width : int, optional
        Elements that a row takes up, where it is not the matrix's own width.

    Yields
    ------
    slice
        Consecutive runs of rows that cover all of them.
    """
    width = rows.shape[1] if width is None else width
    # The standard's dtypes need not know their size; a wrong guess costs speed only.
    row_bytes = width * getattr(rows.dtype, "itemsize", 8)
    step = max(1, CHUNK_BYTES // max(1, row_bytes))
    for start in range(0, rows.shape[0], step):
        yield slice(start, min(start + step, rows.shape[0]))


def as_rows(array: Array, role: str = "") -> Array:
    """View an array as a matrix of its last dim.

    Parameters
    ----------
    array : Array
        Any array with at least one dim.
    role : str
        For an array that is written to: its name, and a copy is refused.

    Returns
    -------
    Array
        Shape ``(n_rows, width)``.

    Raises
    ------
    UnsupportedArray
        If `role` is given and the array cannot be viewed so.
    """
    if array.ndim == 2:
        return array
    xp = namespace(array)
    width = array.shape[-1] if array.ndim else 1
    shape = (math.prod(array.shape) // max(1, width), width)
    if not role:
        return xp.reshape(array, shape)
    try:
        return xp.reshape(array, shape, copy=False)
    except (ValueError, AttributeError) as error:
        raise UnsupportedArray(
            f"{role} of shape {array.shape} is not contiguous and cannot be written by rows; "
            "pass a C-contiguous array or a two-dimensional view"
        ) from error


def empty_like(array: Array, shape: tuple[int, ...] | None = None) -> Array:
    """Make an uninitialised array on the same device.

    Parameters
    ----------
    array : Array
        Gives library, dtype and device.
    shape : tuple of int, optional
        Another shape.

    Returns
    -------
    Array
        The new array.
    """
    xp = namespace(array)
    shape = tuple(array.shape) if shape is None else shape
    if xp is np_compat:
        return np.empty(shape, array.dtype)
    return xp.empty(shape, dtype=array.dtype, device=array_api_compat.device(array))


def contiguous(array: Array) -> Array:
    """The array itself if it is a C-ordered one of NumPy, else a copy in C order.

    Parameters
    ----------
    array : Array
        Of any layout.

    Returns
    -------
    Array
        C-ordered, of the same library.
    """
    if isinstance(array, np.ndarray):
        return np.ascontiguousarray(array)
    return namespace(array).asarray(array, copy=True)


def placed(values: np.ndarray, like: Array) -> Array:
    """Values of the host as an array of another library, where `like` lies.

    Parameters
    ----------
    values : numpy.ndarray
        On the host.
    like : Array
        Gives library and device.

    Returns
    -------
    Array
        The new array.
    """
    return namespace(like).asarray(values, device=array_api_compat.device(like))


def filled(like: Array, shape: tuple[int, ...], value: float) -> Array:
    """Make an array of one value on the same device.

    Parameters
    ----------
    like : Array
        Gives library, dtype and device.
    shape : tuple of int
        The shape.
    value : float
        The value.

    Returns
    -------
    Array
        The new array.
    """
    array = empty_like(like, shape)
    array[...] = value
    return array


def arange_like(like: Array, n: int) -> Array:
    """Whole numbers from 0 to `n` on the same device.

    Parameters
    ----------
    like : Array
        Gives library and device.
    n : int
        How many.

    Returns
    -------
    Array
        Shape ``(n,)``, of the library's default integer dtype.
    """
    return namespace(like).arange(n, device=array_api_compat.device(like))


def store(values: Array, out: Array | None = None, accumulate: bool = False) -> Array:
    """Write values into `out`, or add them there.

    Parameters
    ----------
    values : Array
        A result.
    out : Array, optional
        Where it goes; without it `values` itself is returned.
    accumulate : bool
        Add to what `out` holds.

    Returns
    -------
    Array
        `out`, or `values`.

    Raises
    ------
    UnsupportedArray
        If `accumulate` is asked for without an `out`.
    """
    if accumulate and out is None:
        raise UnsupportedArray("accumulate=True needs out=, the array to add to")
    if out is None:
        return values
    if accumulate:
        return namespace(out).add(out, values, out=out)
    out[...] = values
    return out


def deliver(out: Array | None, accumulate: bool, compute: Callable[[Array | None], Array]) -> Array:
    """Let a function write into `out` itself, or add its result there.

    Parameters
    ----------
    out : Array or None
        Where the result goes; None returns a new array.
    accumulate : bool
        Add to what `out` holds.
    compute : callable
        Takes the array to write to, or None for a new one; returns the result.

    Returns
    -------
    Array
        `out`, or the new array.

    Raises
    ------
    UnsupportedArray
        If `accumulate` is asked for without an `out`.
    """
    return store(compute(None), out, True) if accumulate else compute(out)


def add_rows_at(out: Array, index: Array, rows: Array) -> None:
    """Add `rows` to the rows of `out` that `index` names; repeated indices add up.

    Parameters
    ----------
    out : Array
        Shape ``(n_out, width)``, changed in place.
    index : Array
        Shape ``(n,)``, integers in ``0..n_out``.
    rows : Array
        Shape ``(n, width)``.
    """
    xp = namespace(out, rows)
    if index.shape[0] == 0:
        return
    if xp is np_compat:
        order = np.argsort(index, kind="stable")
        ordered = index[order]
        starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
        out[ordered[starts]] += np.add.reduceat(rows[order], starts, axis=0)
        return
    # The standard has no scatter: a block of one-hot rows times `rows` does the same.
    for block in row_chunks(out, index.shape[0]):
        where = array_api_compat.device(index)
        ids = xp.arange(block.start, block.stop, dtype=index.dtype, device=where)
        one_hot = xp.astype(ids[:, None] == index[None, :], rows.dtype)
        out[block, :] = out[block, :] + xp.matmul(one_hot, rows)
