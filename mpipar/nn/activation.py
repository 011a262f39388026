"""GELU, SiLU and SwiGLU: elementwise functions that hand out their own derivative.

Forward knows everything that the derivative needs while it is in the cache, so it can write the
*slope* (dy/dx) as well, over its own input if that is not needed again. Backward is then one
product for all of them, dropout included: `slope_backward`, and `swiglu_backward` for two inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from mpipar.errors import UnsupportedArray
from mpipar.nn.array import Array, as_rows, empty_like, namespace, row_chunks
from mpipar.nn.checks import check_floating, check_shape

_GELU_LINEAR = math.sqrt(2.0 / math.pi)
_GELU_CUBIC = 0.044715 * _GELU_LINEAR


def gelu(
    x: Array, bias: Array | None = None, out: Array | None = None, slope: Array | None = None
) -> Array:
    """GELU in its tanh approximation (Hendrycks and Gimpel 2016) of ``x + bias``.

    Parameters
    ----------
    x : Array
        Shape ``(..., width)``.
    bias : Array, optional
        Shape ``(width,)``, added first.
    out : Array, optional
        Shape of `x`, C-contiguous.
    slope : Array, optional
        Receives dy/dx; shape of `x`, C-contiguous; may be `x`.

    Returns
    -------
    Array
        Shape of `x`.

    Raises
    ------
    UnsupportedArray
        If shapes or dtypes do not fit.
    """
    return _apply("gelu", _gelu_chunk, x, bias, out, slope)


def silu(
    x: Array, bias: Array | None = None, out: Array | None = None, slope: Array | None = None
) -> Array:
    """SiLU, ``x * sigmoid(x)``, of ``x + bias``.

    Parameters
    ----------
    x : Array
        Shape ``(..., width)``.
    bias : Array, optional
        Shape ``(width,)``, added first.
    out : Array, optional
        Shape of `x`, C-contiguous.
    slope : Array, optional
        Receives dy/dx; shape of `x`, C-contiguous; may be `x`.

    Returns
    -------
    Array
        Shape of `x`.

    Raises
    ------
    UnsupportedArray
        If shapes or dtypes do not fit.
    """
    return _apply("silu", _silu_chunk, x, bias, out, slope)


def _apply(
    name: str,
    chunk_function: Callable[[Any, Array, Array, Array | None, list[Array]], None],
    x: Array,
    bias: Array | None,
    out: Array | None,
    slope: Array | None,
) -> Array:
    check_floating(name, x=x, bias=bias)
    for role, array in (("out", out), ("slope", slope)):
        if array is not None:
            check_shape(name, role, array, tuple(x.shape))
    if bias is not None:
        check_shape(name, "bias", bias, (x.shape[-1],))
    out = empty_like(x) if out is None else out
    xp = namespace(x, bias)
    rows, outs = as_rows(x), as_rows(out, "out")
    slopes = None if slope is None else as_rows(slope, "slope")
    scratch: list[Array] = []
    for c in row_chunks(rows):
        chunk = rows[c, :]
        if not scratch or scratch[0].shape != chunk.shape:
            scratch = [empty_like(chunk) for _ in range(3)]
        if bias is not None:
            chunk = xp.add(chunk, bias, out=scratch[2])
        chunk_function(xp, chunk, outs[c, :], None if slopes is None else slopes[c, :], scratch)
    return out


def _gelu_chunk(xp: Any, x: Array, out: Array, slope: Array | None, scratch: list[Array]) -> None:
    # y = x h with h = (1 + tanh u) / 2 and u = x (c + a x^2);
    # dy/dx = h + x dh/dx = h + y (1 - tanh u) (c + 3 a x^2).
    square, t = scratch[:2]
    xp.multiply(x, x, out=square)
    xp.multiply(square, _GELU_CUBIC, out=t)
    xp.add(t, _GELU_LINEAR, out=t)
    xp.multiply(t, x, out=t)
    xp.tanh(t, out=t)
    if slope is None:
        xp.add(t, 1.0, out=t)
        xp.multiply(t, 0.5, out=t)
        xp.multiply(t, x, out=out)
        return
    xp.multiply(square, 3.0 * _GELU_CUBIC, out=square)
    xp.add(square, _GELU_LINEAR, out=square)
    h = xp.multiply(t, 0.5)
    xp.add(h, 0.5, out=h)
    xp.multiply(h, x, out=out)
    xp.subtract(1.0, t, out=t)
    xp.multiply(t, square, out=t)
    xp.multiply(t, out, out=t)
    xp.add(h, t, out=slope)


def _silu_chunk(xp: Any, x: Array, out: Array, slope: Array | None, scratch: list[Array]) -> None:
    # sigmoid(x) = (1 + tanh(x / 2)) / 2 never overflows; dy/dx = s + y (1 - s).
    s, rest = scratch[:2]
    xp.multiply(x, 0.5, out=s)
    xp.tanh(s, out=s)
    xp.multiply(s, 0.5, out=s)
    xp.add(s, 0.5, out=s)
    xp.multiply(s, x, out=out)
    if slope is not None:
        xp.subtract(1.0, s, out=rest)
        xp.multiply(rest, out, out=rest)
        xp.add(s, rest, out=slope)


def slope_backward(grad: Array, slope: Array, out: Array | None = None) -> Array:
    """Gradient of any elementwise function with respect to its input: ``grad * slope``.

    Parameters
    ----------
    grad : Array
        Gradient of the output.
    slope : Array
        dy/dx as the forward function handed it out; shape of `grad`.
    out : Array, optional
        Shape of `grad`; may be either input.

    Returns
    -------
    Array
        Shape of `grad`.

    Raises
    ------
    UnsupportedArray
        If shapes or dtypes do not fit.
    """
    check_floating("slope_backward", grad=grad, slope=slope)
    check_shape("slope_backward", "slope", slope, tuple(grad.shape))
    out = empty_like(grad) if out is None else out
    return namespace(grad, slope).multiply(grad, slope, out=out)


def swiglu(x: Array, out: Array | None = None, slopes: Array | None = None) -> Array:
    """SwiGLU (Shazeer 2020): ``silu(gate) * up`` of two halves that stand side by side.

    Parameters
    ----------
    x : Array
        Gate, then up: shape ``(..., 2 * width)``.
    out : Array, optional
        Shape ``(..., width)``, C-contiguous.
    slopes : Array, optional
        Receives the derivatives by gate and by up, side by side; shape of `x`, C-contiguous; may be
        `x`.

    Returns
    -------
    Array
        Shape ``(..., width)``.

    Raises
    ------
    UnsupportedArray
        If shapes or dtypes do not fit.
    """
    check_floating("swiglu", x=x)
    width = _half("swiglu", x)
    out = empty_like(x, (*x.shape[:-1], width)) if out is None else out
    check_shape("swiglu", "out", out, (*x.shape[:-1], width))
    if slopes is not None:
        check_shape("swiglu", "slopes", slopes, tuple(x.shape))
    xp = namespace(x)
    rows, outs = as_rows(x), as_rows(out, "out")
    to = None if slopes is None else as_rows(slopes, "slopes")
    for c in row_chunks(rows):
        gate, up = rows[c, :width], rows[c, width:]
        value, slope, *scratch = (empty_like(gate) for _ in range(4))
        _silu_chunk(xp, gate, value, None if to is None else slope, scratch)
        xp.multiply(value, up, out=outs[c, :])
        if to is not None:
            xp.multiply(slope, up, out=to[c, :width])
            to[c, width:] = value
    return out


def swiglu_backward(grad: Array, slopes: Array, out: Array | None = None) -> Array:
    """Gradient of `swiglu` with respect to gate and up, side by side.

    Parameters
    ----------
    grad : Array
        Gradient of the output, shape ``(..., width)``.
    slopes : Array
        As `swiglu` handed them out, shape ``(..., 2 * width)``.
    out : Array, optional
        Shape of `slopes`, C-contiguous; may be `slopes`.

    Returns
    -------
    Array
        Shape of `slopes`.

    Raises
    ------
    UnsupportedArray
        If shapes or dtypes do not fit.
    """
    check_floating("swiglu_backward", grad=grad, slopes=slopes)
    width = _half("swiglu_backward", slopes)
    check_shape("swiglu_backward", "grad", grad, (*slopes.shape[:-1], width))
    out = empty_like(slopes) if out is None else out
    check_shape("swiglu_backward", "out", out, tuple(slopes.shape))
    xp = namespace(grad, slopes)
    grads, rows, outs = as_rows(grad), as_rows(slopes), as_rows(out, "out")
    for c in row_chunks(rows):
        for half in (slice(0, width), slice(width, 2 * width)):
            xp.multiply(grads[c, :], rows[c, half], out=outs[c, half])
    return out


def _half(name: str, x: Array) -> int:
    if x.ndim < 1 or x.shape[-1] % 2:
        raise UnsupportedArray(
            f"{name} needs gate and up side by side, (..., 2 * width), got {tuple(x.shape)}"
        )
    return int(x.shape[-1]) // 2
