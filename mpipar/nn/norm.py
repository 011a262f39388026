"""Layer norm (Ba et al. 2016) and RMS norm (Zhang and Sennrich 2019) over the last dim.

The forward pass hands out the normalised input and the reciprocal deviation; the backward passes
need nothing else, so the input itself may be overwritten.
"""

from __future__ import annotations

from mpipar.nn.array import Array, as_rows, empty_like, filled, namespace, row_chunks, store
from mpipar.nn.checks import check_floating, check_shape
from mpipar.nn.linear import bias_backward


def layer_norm(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    eps: float = 1e-5,
    out: Array | None = None,
    normalized: Array | None = None,
) -> tuple[Array, Array, Array]:
    """Centre and scale each row to variance 1, then apply weight and bias.

    Parameters
    ----------
    x : Array
        Shape ``(..., width)``.
    weight : Array
        Shape ``(width,)``.
    bias : Array, optional
        Shape ``(width,)``.
    eps : float
        Added to the variance.
    out, normalized : Array, optional
        Where the results go: shape of `x`, C-contiguous.

    Returns
    -------
    tuple of Array
        The output, the normalised input (shape of `x`) and the reciprocal standard deviation
        (shape ``(n_rows, 1)``): what the backward functions take.

    Raises
    ------
    UnsupportedArray
        If shapes or dtypes do not fit.
    """
    return _forward(x, weight, bias, eps, out, normalized, centred=True)


def rms_norm(
    x: Array,
    weight: Array,
    eps: float = 1e-5,
    out: Array | None = None,
    normalized: Array | None = None,
) -> tuple[Array, Array, Array]:
    """Scale each row to mean square 1, then apply the weight.

    Parameters
    ----------
    x : Array
        Shape ``(..., width)``.
    weight : Array
        Shape ``(width,)``.
    eps : float
        Added to the mean square.
    out, normalized : Array, optional
        Where the results go: shape of `x`, C-contiguous.

    Returns
    -------
    tuple of Array
        As `layer_norm`.

    Raises
    ------
    UnsupportedArray
        If shapes or dtypes do not fit.
    """
    return _forward(x, weight, None, eps, out, normalized, centred=False)


def _forward(
    x: Array,
    weight: Array,
    bias: Array | None,
    eps: float,
    out: Array | None,
    normalized: Array | None,
    centred: bool,
) -> tuple[Array, Array, Array]:
    name = "layer_norm" if centred else "rms_norm"
    check_floating(name, x=x, weight=weight, bias=bias)
    width = x.shape[-1]
    check_shape(name, "weight", weight, (width,))
    if bias is not None:
        check_shape(name, "bias", bias, (width,))
    out = empty_like(x) if out is None else out
    normalized = empty_like(x) if normalized is None else normalized
    check_shape(name, "out", out, tuple(x.shape))
    check_shape(name, "normalized", normalized, tuple(x.shape))
    xp = namespace(x, weight)
    rows, outs, xhats = as_rows(x), as_rows(out, "out"), as_rows(normalized, "normalized")
    rstd = empty_like(x, (rows.shape[0], 1))
    average = filled(x, (width,), 1.0 / width)
    for c in row_chunks(rows):
        xhat, y, r = xhats[c, :], outs[c, :], rstd[c, :]
        if centred:
            xp.subtract(rows[c, :], xp.matmul(rows[c, :], average)[:, None], out=xhat)
        source = xhat if centred else rows[c, :]
        xp.add(xp.vecdot(source, source)[:, None] * (1.0 / width), eps, out=r)
        xp.divide(1.0, xp.sqrt(r, out=r), out=r)
        xp.multiply(source, r, out=xhat)
        xp.multiply(xhat, weight, out=y)
        if bias is not None:
            xp.add(y, bias, out=y)
    return out, normalized, rstd


def layer_norm_backward_input(
    grad: Array,
    weight: Array,
    normalized: Array,
    rstd: Array,
    residual: Array | None = None,
    out: Array | None = None,
    sums: Array | None = None,
) -> Array:
    """Gradient of `layer_norm` with respect to `x`, plus the gradient of a residual branch.

    Parameters
    ----------
    grad : Array
        Gradient of the output, shape ``(..., width)``.
    weight : Array
        Shape ``(width,)``.
    normalized, rstd : Array
        As `layer_norm` returned them.
    residual : Array, optional
        Added to the result; shape of `grad`.
    out : Array, optional
        Shape of `grad`, C-contiguous; may be `residual`.
    sums : Array, optional
        Receives the gradients of weight and bias, which the same sweep yields; shape
        ``(2, width)``.

    Returns
    -------
    Array
        Shape of `grad`.

    Raises
    ------
    UnsupportedArray
        If shapes or dtypes do not fit.
    """
    return _backward(grad, weight, normalized, rstd, residual, out, sums, centred=True)


def rms_norm_backward_input(
    grad: Array,
    weight: Array,
    normalized: Array,
    rstd: Array,
    residual: Array | None = None,
    out: Array | None = None,
    sums: Array | None = None,
) -> Array:
    """Gradient of `rms_norm` with respect to `x`, plus the gradient of a residual branch.

    Parameters
    ----------
    grad : Array
        Gradient of the output, shape ``(..., width)``.
    weight : Array
        Shape ``(width,)``.
    normalized, rstd : Array
        As `rms_norm` returned them.
    residual : Array, optional
        Added to the result; shape of `grad`.
    out : Array, optional
        Shape of `grad`, C-contiguous; may be `residual`.
    sums : Array, optional
        Receives the gradients of weight and bias, which the same sweep yields; shape
        ``(2, width)``.

    Returns
    -------
    Array
        Shape of `grad`.

    Raises
    ------
    UnsupportedArray
        If shapes or dtypes do not fit.
    """
    return _backward(grad, weight, normalized, rstd, residual, out, sums, centred=False)


def _backward(
    grad: Array,
    weight: Array,
    normalized: Array,
    rstd: Array,
    residual: Array | None,
    out: Array | None,
    sums: Array | None,
    centred: bool,
) -> Array:
    name = ("layer" if centred else "rms") + "_norm_backward_input"
    check_floating(name, grad=grad, weight=weight, normalized=normalized, residual=residual)
    width = grad.shape[-1]
    check_shape(name, "weight", weight, (width,))
    for role, array in (("normalized", normalized), ("residual", residual), ("out", out)):
        if array is not None:
            check_shape(name, role, array, tuple(grad.shape))
    out = empty_like(grad) if out is None else out
    xp = namespace(grad, weight)
    rows, xhats, outs = as_rows(grad), as_rows(normalized), as_rows(out, "out")
    others = None if residual is None else as_rows(residual)
    if sums is not None:
        check_shape(name, "sums", sums, (2, width))
        sums[...] = 0
    mean_weight = weight * (1.0 / width)
    for c in row_chunks(rows):
        g, xhat = rows[c, :], xhats[c, :]
        t = xp.multiply(g, xhat)
        along = xp.matmul(t, mean_weight)[:, None]
        if sums is not None:
            bias_backward(t, out=sums[0, :], accumulate=True)
            bias_backward(g, out=sums[1, :], accumulate=True)
        # dx = rstd (w g - mean(w g) - xhat mean(w g xhat)), without the first mean for RMS norm.
        xp.multiply(xhat, along, out=t)
        d = xp.multiply(g, weight)
        if centred:
            xp.subtract(d, xp.matmul(g, mean_weight)[:, None], out=d)
        xp.subtract(d, t, out=d)
        if others is None:
            xp.multiply(d, rstd[c, :], out=outs[c, :])
        else:
            xp.multiply(d, rstd[c, :], out=d)
            xp.add(d, others[c, :], out=outs[c, :])
    return out


def norm_backward_weight(
    grad: Array, normalized: Array, out: Array | None = None, accumulate: bool = False
) -> Array:
    """Gradient of either norm with respect to its weight: the row sum of ``grad * normalized``.

    The gradient of the bias is `bias_backward`.

    Parameters
    ----------
    grad, normalized : Array
        Gradient of the output and normalised input, shape ``(..., width)``.
    out : Array, optional
        Shape ``(width,)``.
    accumulate : bool
        Add to `out` instead of writing it.

    Returns
    -------
    Array
        Shape ``(width,)``.

    Raises
    ------
    UnsupportedArray
        If shapes or dtypes do not fit.
    """
    check_floating("norm_backward_weight", grad=grad, normalized=normalized)
    check_shape("norm_backward_weight", "normalized", normalized, tuple(grad.shape))
    xp = namespace(grad, normalized)
    rows, xhats = as_rows(grad), as_rows(normalized)
    total = filled(grad, (grad.shape[-1],), 0.0)
    for c in row_chunks(rows):
        bias_backward(xp.multiply(rows[c, :], xhats[c, :]), out=total, accumulate=True)
    if out is not None:
        check_shape("norm_backward_weight", "out", out, tuple(total.shape))
    return store(total, out, accumulate)
