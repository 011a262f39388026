"""Rotary position embedding (Su et al. 2021): pairs of features turn by an angle per position.

There is one convention, the half-split one of Hugging Face: feature i of a head is paired with
feature ``i + head_width / 2`` and turns by ``position * base ** (-2 i / head_width)``. Weights of
the interleaved convention (pairs ``2 i, 2 i + 1``, as in GGUF files) have their rows permuted when
they are loaded.
"""

from __future__ import annotations

import math
from typing import Any

import array_api_compat

from mpipar.errors import OutOfRange, UnevenSplit, UnsupportedArray
from mpipar.nn.array import Array, empty_like, namespace, row_chunks
from mpipar.nn.checks import check_floating, check_shape


def rotary_tables(
    like: Array, positions: Array, head_width: int, base: float = 10000.0
) -> tuple[Array, Array]:
    """Cosines and sines of the angles by which positions turn, computed in float64.

    Parameters
    ----------
    like : Array
        Gives library, dtype and device.
    positions : Array
        Whole numbers, shape ``(n,)``, or ``(batch, n)`` where rows differ.
    head_width : int
        Features of a head; even.
    base : float
        Ratio of the longest to the shortest wavelength.

    Returns
    -------
    tuple of Array
        Cosines and sines, shape ``(*positions.shape, head_width / 2)``.

    Raises
    ------
    UnevenSplit
        If a head has no two halves.
    OutOfRange
        If `base` is not above 0.
    """
    if head_width % 2 or head_width < 2:
        raise UnevenSplit(
            "rotary_tables",
            f"head_width={head_width} has no halves; {max(2, head_width - head_width % 2)} "
            f"or {head_width + head_width % 2 or 2} would do",
        )
    if not base > 0.0:
        raise OutOfRange("rotary base", "above 0", base)
    xp = namespace(like, positions)
    where = array_api_compat.device(like)
    pairs = xp.arange(head_width // 2, dtype=xp.float64, device=where)
    frequencies = xp.exp(pairs * (-2.0 / head_width * math.log(base)))
    angles = xp.astype(positions, xp.float64)[..., None] * frequencies
    return xp.astype(xp.cos(angles), like.dtype), xp.astype(xp.sin(angles), like.dtype)


def rotary(x: Array, cos: Array, sin: Array, out: Array | None = None) -> Array:
    """Turn the pairs of each head by the angles of its position.

    Parameters
    ----------
    x : Array
        Queries or keys, shape ``(batch, n, heads, head_width)``, any strides.
    cos, sin : Array
        From `rotary_tables`: shape ``(n, head_width / 2)`` or ``(batch, n, head_width / 2)``.
    out : Array, optional
        Shape of `x`, any strides; may be `x`.

    Returns
    -------
    Array
        Shape of `x`.

    Raises
    ------
    UnsupportedArray
        If shapes or dtypes do not fit.
    """
    return _turn("rotary", x, cos, sin, out, backward=False)


def rotary_backward(grad: Array, cos: Array, sin: Array, out: Array | None = None) -> Array:
    """Gradient of `rotary` with respect to `x`: the same turn the other way round.

    Parameters
    ----------
    grad : Array
        Gradient of the output, shape ``(batch, n, heads, head_width)``, any strides.
    cos, sin : Array
        As given to `rotary`.
    out : Array, optional
        Shape of `grad`, any strides; may be `grad`.

    Returns
    -------
    Array
        Shape of `grad`.

    Raises
    ------
    UnsupportedArray
        If shapes or dtypes do not fit.
    """
    return _turn("rotary_backward", grad, cos, sin, out, backward=True)


def _turn(name: str, x: Array, cos: Array, sin: Array, out: Array | None, backward: bool) -> Array:
    check_floating(name, x=x, cos=cos, sin=sin)
    if x.ndim != 4 or x.shape[3] % 2:
        raise UnsupportedArray(
            f"{name} needs an array of shape (batch, n, heads, even head_width), "
            f"got {tuple(x.shape)}"
        )
    batch, n, n_heads, width = x.shape
    expected = (batch, n, width // 2) if cos.ndim == 3 else (n, width // 2)
    check_shape(name, "cos", cos, expected)
    check_shape(name, "sin", sin, expected)
    out = empty_like(x) if out is None else out
    check_shape(name, "out", out, tuple(x.shape))
    xp = namespace(x, cos, sin)
    for row in range(batch):
        c_row, s_row = (t[row, ...] if t.ndim == 3 else t for t in (cos, sin))
        for c in row_chunks(c_row, n_heads * width):
            _turn_chunk(xp, x[row, c, ...], c_row[c, :], s_row[c, :], out[row, c, ...], backward)
    return out


def _turn_chunk(xp: Any, x: Array, cos: Array, sin: Array, out: Array, backward: bool) -> None:
    """One run of positions, (n, heads, head_width); `out` may be `x`."""
    half = x.shape[2] // 2
    cos, sin = cos[:, None, :], sin[:, None, :]
    low, high = x[..., :half], x[..., half:]
    from_high, from_low = xp.multiply(high, sin), xp.multiply(low, sin)
    xp.multiply(low, cos, out=out[..., :half])
    xp.multiply(high, cos, out=out[..., half:])
    to_low, to_high = (xp.add, xp.subtract) if backward else (xp.subtract, xp.add)
    to_low(out[..., :half], from_high, out=out[..., :half])
    to_high(out[..., half:], from_low, out=out[..., half:])
