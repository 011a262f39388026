"""Linear maps and embeddings, with input and weight gradients apart.

Weights have the shape ``(n_out, n_in)``, so a row is an output feature and a column-parallel shard
is a run of rows. Leading dims of `x` are merged into one matrix product.
"""

from __future__ import annotations

from mpipar.errors import UnsupportedArray
from mpipar.nn.array import (
    Array,
    add_rows_at,
    as_rows,
    deliver,
    empty_like,
    filled,
    namespace,
    row_chunks,
)
from mpipar.nn.checks import check_floating, check_indices, check_shape


def _check_width(function: str, role: str, array: Array, weight: Array, dim: int) -> None:
    if weight.ndim != 2 or array.ndim < 1 or array.shape[-1] != weight.shape[dim]:
        raise UnsupportedArray(
            f"{function}: {role} of shape {tuple(array.shape)} does not fit weight "
            f"(n_out, n_in)={tuple(weight.shape)}; "
            f"{role} of shape (..., {weight.shape[dim] if weight.ndim == 2 else 'n'}) would do"
        )


def linear(x: Array, weight: Array, bias: Array | None = None, out: Array | None = None) -> Array:
    """Compute ``x @ weight.T + bias``.

    Parameters
    ----------
    x : Array
        Shape ``(..., n_in)``.
    weight : Array
        Shape ``(n_out, n_in)``.
    bias : Array, optional
        Shape ``(n_out,)``.
    out : Array, optional
        Shape ``(..., n_out)``, C-contiguous.

    Returns
    -------
    Array
        Shape ``(..., n_out)``.

    Raises
    ------
    UnsupportedArray
        If shapes or dtypes do not fit.
    """
    check_floating("linear", x=x, weight=weight, bias=bias)
    _check_width("linear", "x", x, weight, 1)
    shape = (*x.shape[:-1], weight.shape[0])
    out = empty_like(x, shape) if out is None else out
    check_shape("linear", "out", out, shape)
    rows = as_rows(out, "out")
    xp = namespace(x, weight)
    xp.matmul(as_rows(x), weight.T, out=rows)
    if bias is not None:
        check_shape("linear", "bias", bias, (weight.shape[0],))
        xp.add(rows, bias, out=rows)
    return out


def linear_backward_input(grad: Array, weight: Array, out: Array | None = None) -> Array:
    """Gradient of `linear` with respect to `x`: ``grad @ weight``.

    Parameters
    ----------
    grad : Array
        Gradient of the output, shape ``(..., n_out)``.
    weight : Array
        Shape ``(n_out, n_in)``.
    out : Array, optional
        Shape ``(..., n_in)``, C-contiguous.

    Returns
    -------
    Array
        Shape ``(..., n_in)``.

    Raises
    ------
    UnsupportedArray
        If shapes or dtypes do not fit.
    """
    check_floating("linear_backward_input", grad=grad, weight=weight)
    _check_width("linear_backward_input", "grad", grad, weight, 0)
    shape = (*grad.shape[:-1], weight.shape[1])
    out = empty_like(grad, shape) if out is None else out
    check_shape("linear_backward_input", "out", out, shape)
    namespace(grad, weight).matmul(as_rows(grad), weight, out=as_rows(out, "out"))
    return out


def linear_backward_weight(
    x: Array, grad: Array, out: Array | None = None, accumulate: bool = False
) -> Array:
    """Gradient of `linear` with respect to `weight`: ``grad.T @ x``.

    Parameters
    ----------
    x : Array
        The input, shape ``(..., n_in)``.
    grad : Array
        Gradient of the output, shape ``(..., n_out)``.
    out : Array, optional
        Shape ``(n_out, n_in)``; may be a view of a larger gradient buffer.
    accumulate : bool
        Add to `out` instead of writing it.

    Returns
    -------
    Array
        Shape ``(n_out, n_in)``.

    Raises
    ------
    UnsupportedArray
        If shapes or dtypes do not fit.
    """
    check_floating("linear_backward_weight", x=x, grad=grad)
    if x.shape[:-1] != grad.shape[:-1]:
        raise UnsupportedArray(
            f"linear_backward_weight: x {tuple(x.shape)} and grad {tuple(grad.shape)} must agree "
            f"in all dims but the last; grad of shape {(*x.shape[:-1], grad.shape[-1])} would do"
        )
    if out is not None:
        check_shape("linear_backward_weight", "out", out, (grad.shape[-1], x.shape[-1]))
    xp = namespace(x, grad)
    rows, grads = as_rows(x), as_rows(grad)
    return deliver(out, accumulate, lambda to: xp.matmul(grads.T, rows, out=to))


def bias_backward(grad: Array, out: Array | None = None, accumulate: bool = False) -> Array:
    """Gradient of an added bias: the sum of `grad` over all dims but the last.

    Parameters
    ----------
    grad : Array
        Gradient of the output, shape ``(..., n)``.
    out : Array, optional
        Shape ``(n,)``.
    accumulate : bool
        Add to `out` instead of writing it.

    Returns
    -------
    Array
        Shape ``(n,)``.

    Raises
    ------
    UnsupportedArray
        If shapes do not fit.
    """
    if out is not None:
        check_shape("bias_backward", "out", out, (grad.shape[-1],))
    xp = namespace(grad)
    rows = as_rows(grad)
    # A product with ones runs at memory speed; a sum over the first dim does not.
    ones = filled(rows, (rows.shape[0],), 1.0)
    return deliver(out, accumulate, lambda to: xp.matmul(ones, rows, out=to))


def embedding(index: Array, weight: Array, out: Array | None = None) -> Array:
    """Look up rows of a table.

    Parameters
    ----------
    index : Array
        Integers in ``0..n_rows``, any shape.
    weight : Array
        The table, shape ``(n_rows, width)``.
    out : Array, optional
        Shape ``(*index.shape, width)``, C-contiguous.

    Returns
    -------
    Array
        Shape ``(*index.shape, width)``.

    Raises
    ------
    UnsupportedArray
        If shapes or dtypes do not fit.
    OutOfRange
        If an index lies outside the table.
    """
    check_floating("embedding", weight=weight)
    check_indices("embedding index", index, weight.shape[0])
    xp = namespace(index, weight)
    shape = (*index.shape, weight.shape[1])
    out = empty_like(weight, shape) if out is None else out
    check_shape("embedding", "out", out, shape)
    rows, flat = as_rows(out, "out"), xp.reshape(index, (-1,))
    for chunk in row_chunks(rows):
        rows[chunk, :] = xp.take(weight, flat[chunk], axis=0)
    return out


def embedding_backward(
    index: Array,
    grad: Array,
    n_rows: int | None = None,
    out: Array | None = None,
    accumulate: bool = False,
) -> Array:
    """Gradient of `embedding` with respect to the table.

    Parameters
    ----------
    index : Array
        As given to `embedding`.
    grad : Array
        Gradient of the output, shape ``(*index.shape, width)``.
    n_rows : int, optional
        Rows of the table; needed without `out`.
    out : Array, optional
        Shape ``(n_rows, width)``.
    accumulate : bool
        Add to `out` instead of writing it.

    Returns
    -------
    Array
        Shape ``(n_rows, width)``.

    Raises
    ------
    UnsupportedArray
        If shapes or dtypes do not fit, or neither `n_rows` nor `out` is given.
    OutOfRange
        If an index lies outside the table.
    """
    width = grad.shape[-1]
    check_shape("embedding_backward", "grad", grad, (*index.shape, width))
    if out is None:
        if n_rows is None:
            raise UnsupportedArray("embedding_backward needs n_rows= or out=")
        if accumulate:
            raise UnsupportedArray("accumulate=True needs out=, the array to add to")
        out = empty_like(grad, (n_rows, width))
    check_shape("embedding_backward", "out", out, (n_rows or out.shape[0], width))
    check_indices("embedding index", index, out.shape[0])
    if not accumulate:
        out[...] = 0
    add_rows_at(out, namespace(index).reshape(index, (-1,)), as_rows(grad))
    return out
