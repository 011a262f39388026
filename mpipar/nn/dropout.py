"""Dropout masks from a seeded generator, and the residual sum that applies them."""

from __future__ import annotations

import array_api_compat
import numpy as np

from mpipar.errors import OutOfRange
from mpipar.nn.array import Array, as_rows, empty_like, namespace, row_chunks
from mpipar.nn.checks import check_floating, check_shape


def dropout_slope(
    like: Array, rate: float, generator: np.random.Generator, out: Array | None = None
) -> Array:
    """Draw a dropout mask: 0 with probability `rate`, else the scale that keeps the mean.

    Multiply by it forward, and backward with `slope_backward`. The rate is rounded to a multiple of
    2**-16 and the scale is exact for the rounded rate. The same generator state gives the same mask
    on any device.

    Parameters
    ----------
    like : Array
        Gives shape, dtype and device.
    rate : float
        Probability of dropping, in [0, 1).
    generator : numpy.random.Generator
        A seeded generator; a counter-based one (Philox) makes masks independent of order.
    out : Array, optional
        Shape of `like`, C-contiguous.

    Returns
    -------
    Array
        Shape of `like`.

    Raises
    ------
    OutOfRange
        If `rate` is not in [0, 1).
    UnsupportedArray
        If shapes or dtypes do not fit.
    """
    if not 0.0 <= rate < 1.0:
        raise OutOfRange("dropout rate", "[0, 1)", rate)
    check_floating("dropout_slope", like=like)
    out = empty_like(like) if out is None else out
    check_shape("dropout_slope", "out", out, tuple(like.shape))
    xp = namespace(like)
    threshold = min(round(rate * 65536), 65535)
    scale = 65536 / (65536 - threshold)
    rows, where = as_rows(out, "out"), array_api_compat.device(out)
    for c in row_chunks(rows):
        draws = generator.integers(0, 65536, size=rows[c, :].shape, dtype=np.uint16)
        kept = xp.asarray((draws >= threshold).astype(np.float32), device=where)
        xp.multiply(xp.astype(kept, like.dtype), scale, out=rows[c, :])
    return out


def add_residual(
    residual: Array, branch: Array, bias: Array | None = None, slope: Array | None = None
) -> Array:
    """Add ``(branch + bias) * slope`` to the residual stream in place, in one sweep.

    Parameters
    ----------
    residual : Array
        Shape ``(..., width)``, C-contiguous, changed in place.
    branch : Array
        Shape of `residual`, C-contiguous; overwritten.
    bias : Array, optional
        Shape ``(width,)``.
    slope : Array, optional
        A dropout mask of `dropout_slope`; shape of `residual`.

    Returns
    -------
    Array
        `residual`.

    Raises
    ------
    UnsupportedArray
        If shapes or dtypes do not fit.
    """
    check_floating("add_residual", residual=residual, branch=branch, bias=bias, slope=slope)
    check_shape("add_residual", "branch", branch, tuple(residual.shape))
    xp = namespace(residual, branch)
    rows, branches = as_rows(residual, "residual"), as_rows(branch, "branch")
    slopes = None if slope is None else as_rows(slope)
    for c in row_chunks(rows):
        y = branches[c, :]
        if bias is not None:
            xp.add(y, bias, out=y)
        if slopes is not None:
            xp.multiply(y, slopes[c, :], out=y)
        xp.add(rows[c, :], y, out=rows[c, :])
    return residual
