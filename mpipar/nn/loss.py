"""Softmax cross-entropy with ignore index and label smoothing (Szegedy et al. 2016).

With smoothing e over V classes the loss of a row is (1 - e) (lse - z_t) + e (lse - mean z).
Forward keeps only the log-sum-exp of each row; backward rebuilds the softmax from it.
"""

from __future__ import annotations

from typing import Any

import array_api_compat
import numpy as np

from mpipar.errors import OutOfRange
from mpipar.nn.array import Array, as_rows, empty_like, namespace, row_chunks
from mpipar.nn.checks import check_floating, check_indices, check_shape


def _prepare(
    xp: Any, logits: Array, targets: Array, ignore_index: int, label_smoothing: float
) -> tuple[Array, Array]:
    """Targets as one column with ignored ones set to 0, and a column of 1 (counted) or 0."""
    check_floating("cross_entropy", logits=logits)
    check_shape("cross_entropy", "targets", targets, tuple(logits.shape[:-1]))
    if not 0.0 <= label_smoothing < 1.0:
        raise OutOfRange("label_smoothing", "[0, 1)", label_smoothing)
    flat = xp.reshape(targets, (-1, 1))
    counted = flat != ignore_index
    flat = xp.where(counted, flat, xp.zeros_like(flat))
    check_indices("cross_entropy target", flat, logits.shape[-1])
    return flat, xp.astype(counted, logits.dtype)


def cross_entropy(
    logits: Array,
    targets: Array,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> tuple[float, Array]:
    """Sum of the cross-entropies of all rows that are not ignored.

    Parameters
    ----------
    logits : Array
        Shape ``(..., n_classes)``.
    targets : Array
        Integers of shape ``logits.shape[:-1]``.
    ignore_index : int
        Target value of rows that do not count.
    label_smoothing : float
        Share of the target spread over all classes, in [0, 1).

    Returns
    -------
    loss : float
        The sum in nats, accumulated in float64.
    lse : Array
        Log-sum-exp of each row, shape ``(n_rows, 1)``, for `cross_entropy_backward`.

    Raises
    ------
    UnsupportedArray
        If shapes or dtypes do not fit.
    OutOfRange
        If a target or `label_smoothing` lies outside its range.
    """
    xp = namespace(logits, targets)
    flat, counted = _prepare(xp, logits, targets, ignore_index, label_smoothing)
    rows = as_rows(logits)
    n_classes = rows.shape[1]
    lse = empty_like(rows, (rows.shape[0], 1))
    total = 0.0
    for c in row_chunks(rows):
        z = rows[c, :]
        top = xp.max(z, axis=1, keepdims=True)
        p = xp.subtract(z, top)
        xp.exp(p, out=p)
        xp.add(xp.log(xp.sum(p, axis=1, keepdims=True)), top, out=lse[c, :])
        expected = xp.take_along_axis(z, flat[c, :], axis=1)
        if label_smoothing:
            mean = xp.sum(z, axis=1, keepdims=True) * (label_smoothing / n_classes)
            expected = expected * (1.0 - label_smoothing) + mean
        losses = (lse[c, :] - expected) * counted[c, :]
        total += float(xp.sum(losses, dtype=xp.float64))
    return total, lse


def cross_entropy_backward(
    logits: Array,
    targets: Array,
    lse: Array,
    scale: float = 1.0,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    out: Array | None = None,
) -> Array:
    """Gradient of ``scale * cross_entropy`` with respect to the logits.

    Parameters
    ----------
    logits, targets : Array
        As given to `cross_entropy`.
    lse : Array
        As `cross_entropy` returned it.
    scale : float
        Gradient of the loss sum.
    ignore_index : int
        As given to `cross_entropy`.
    label_smoothing : float
        As given to `cross_entropy`.
    out : Array, optional
        Shape of `logits`, C-contiguous; may be `logits`.

    Returns
    -------
    Array
        Shape of `logits`.

    Raises
    ------
    UnsupportedArray
        If shapes or dtypes do not fit.
    OutOfRange
        If a target or `label_smoothing` lies outside its range.
    """
    xp = namespace(logits, targets)
    flat, counted = _prepare(xp, logits, targets, ignore_index, label_smoothing)
    out = empty_like(logits) if out is None else out
    check_shape("cross_entropy_backward", "out", out, tuple(logits.shape))
    rows, outs = as_rows(logits), as_rows(out, "out")
    weight = counted * float(scale)
    for c in row_chunks(rows):
        p, w = outs[c, :], weight[c, :]
        xp.subtract(rows[c, :], lse[c, :], out=p)
        xp.exp(p, out=p)
        xp.multiply(p, w, out=p)
        if label_smoothing:
            xp.subtract(p, w * (label_smoothing / rows.shape[1]), out=p)
        _subtract_at(xp, p, flat[c, :], w * (1.0 - label_smoothing))
    return out


def _subtract_at(xp: Any, rows: Array, index: Array, values: Array) -> None:
    if isinstance(rows, np.ndarray):
        rows[np.arange(rows.shape[0]), index[:, 0]] -= values[:, 0]
        return
    where = array_api_compat.device(index)
    hit = xp.arange(rows.shape[1], dtype=index.dtype, device=where)[None, :] == index
    xp.subtract(rows, xp.astype(hit, rows.dtype) * values, out=rows)
