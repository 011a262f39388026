"""Refusals of wrong arrays, with what was asked and what would do."""

from __future__ import annotations

import math

from mpipar.errors import OutOfRange, UnsupportedArray
from mpipar.nn.array import Array, namespace


def check_floating(function: str, **arrays: Array | None) -> None:
    """Refuse arrays that are not of one real floating dtype.

    Parameters
    ----------
    function : str
        Who asks, for the message.
    **arrays : Array or None
        The arrays by their names; None is skipped.

    Raises
    ------
    UnsupportedArray
        If one is not floating, or two dtypes differ.
    """
    given = {name: a for name, a in arrays.items() if a is not None}
    xp = namespace(*given.values())
    dtypes = {a.dtype for a in given.values()}
    if len(dtypes) == 1 and xp.isdtype(*dtypes, "real floating"):
        return
    listed = ", ".join(f"{name} is {a.dtype}" for name, a in given.items())
    raise UnsupportedArray(
        f"{function} computes in one real floating dtype, but {listed}; "
        "convert to float32 or float64"
    )


def check_shape(function: str, role: str, array: Array, expected: tuple[int, ...]) -> None:
    """Refuse an array of another shape.

    Parameters
    ----------
    function, role : str
        Who asks, and the name of the array, for the message.
    array : Array
        What was passed.
    expected : tuple of int
        The shape it must have.

    Raises
    ------
    UnsupportedArray
        If the shape differs.
    """
    if tuple(array.shape) != expected:
        raise UnsupportedArray(
            f"{function} needs {role} of shape {expected}, got {tuple(array.shape)}"
        )


def check_indices(role: str, index: Array, stop: int) -> None:
    """Refuse indices that are not whole numbers in ``0..stop``.

    Parameters
    ----------
    role : str
        The name of the array, for the message.
    index : Array
        Indices of any shape.
    stop : int
        One past the largest valid index.

    Raises
    ------
    UnsupportedArray
        If the dtype is not an integer.
    OutOfRange
        If an index lies outside.
    """
    xp = namespace(index)
    if not xp.isdtype(index.dtype, "integral"):
        raise UnsupportedArray(f"{role} must be integers, got {index.dtype}; convert to int64")
    if math.prod(index.shape) == 0:
        return
    low, high = int(xp.min(index)), int(xp.max(index))
    if low < 0 or high >= stop:
        raise OutOfRange(role, f"0..{stop} (half-open)", low if low < 0 else high)
