"""Causal attention in blocks, multi-head and grouped-query, with an explicit backward.

The online softmax of Milakov and Gimelshein (2018) in the block order of FlashAttention (Dao et al.
2022): no more than a block of scores exists at a time, and backward rebuilds each from the saved
log-sum-exp. Scores are held transposed, (keys, queries), so that maximum, sum and scale of a query
run along rows. The query heads that share a key head stand side by side as columns of one block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import array_api_compat

from mpipar.errors import UnsupportedArray
from mpipar.nn.array import Array, empty_like, filled, namespace
from mpipar.nn.checks import check_floating, check_shape
from mpipar.units.remainder import divisors

QUERY_BLOCK = 64
"""Queries per block, so the waste above the diagonal is half of this per query."""
KEY_BLOCK = 256
"""Keys per block."""
GROUP_BYTES = 256 * 1024
"""Bytes of scores that are worked on at a time, over as many heads as fit."""


class _Tile(NamedTuple):
    """One block of scores: a run of query rows against a run of keys."""

    queries: slice
    keys: slice
    mask: Array | None  # -inf where the key lies after the query, for the last of these keys
    first: bool  # the first tile of these queries
    last: bool  # the last tile of these queries
    fresh: bool  # the first tile of these keys


def _check(q: Array, k: Array, v: Array) -> None:
    check_floating("causal_attention", q=q, k=k, v=v)
    if q.ndim != 4 or k.ndim != 4:
        raise UnsupportedArray(
            "causal_attention needs q, k and v of shape (batch, heads, sequence, head_width), got "
            f"q {tuple(q.shape)} and k {tuple(k.shape)}"
        )
    check_shape("causal_attention", "v", v, tuple(k.shape))
    batch, n_heads, n_queries, width = q.shape
    check_shape("causal_attention", "k", k, (batch, k.shape[1], k.shape[2], width))
    if k.shape[1] < 1 or n_heads % k.shape[1]:
        raise UnsupportedArray(
            f"causal_attention: n_heads={n_heads} is not a multiple of n_kv_heads={k.shape[1]}; "
            f"n_kv_heads={' or '.join(map(str, divisors(n_heads)))} would do"
        )
    if not 1 <= n_queries <= k.shape[2]:
        raise UnsupportedArray(
            f"causal_attention: {n_queries} queries over {k.shape[2]} keys; 1 to {k.shape[2]} "
            "queries would do, since the last query sees all keys"
        )


def _tiles(q: Array, n_keys: int, group: int) -> Iterator[_Tile]:
    """Tiles at or below the diagonal; the last query block, which sees all keys, comes first."""
    n_queries = q.shape[2]
    offset = n_keys - n_queries
    starts = range(0, n_queries, QUERY_BLOCK)
    masks: dict[int, Array] = {}
    for start in reversed(starts):
        stop = min(start + QUERY_BLOCK, n_queries)
        own, seen = start + offset, stop + offset  # the first and last key of these positions
        if stop - start not in masks:
            masks[stop - start] = _mask(q, stop - start, group)
        mask = masks[stop - start]
        for low in range(0, seen, KEY_BLOCK):
            high = min(low + KEY_BLOCK, seen)
            yield _Tile(
                slice(start, stop),
                slice(low, high),
                mask[max(0, low - own) : high - own, :] if high > own + 1 else None,
                low == 0,
                high == seen,
                start == starts[-1],
            )


def _mask(like: Array, n: int, group: int) -> Array:
    """(keys, group * queries) of the same `n` positions: -inf above the diagonal, else 0."""
    xp = namespace(like)
    positions = xp.arange(n, device=array_api_compat.device(like))
    hidden = positions[:, None] > positions[None, :]
    one = xp.where(hidden, filled(like, (1, 1), -math.inf), filled(like, (1, 1), 0.0))
    return one if group == 1 else xp.concat([one] * group, axis=1)


def _groups(q: Array, k: Array) -> Iterator[tuple[slice, slice]]:
    """Runs of batch rows and of key heads whose scores fit `GROUP_BYTES`."""
    batch, n_heads, n_queries, _ = q.shape
    n_kv, n_keys = k.shape[1:3]
    size = getattr(q.dtype, "itemsize", 8)
    head = min(QUERY_BLOCK, n_queries) * (n_heads // n_kv) * min(KEY_BLOCK, n_keys) * size
    n_fit = max(1, GROUP_BYTES // head)
    n_rows, n = max(1, n_fit // n_kv), min(n_fit, n_kv)
    for row in range(0, batch, n_rows):
        for start in range(0, n_kv, n):
            yield slice(row, min(row + n_rows, batch)), slice(start, min(start + n, n_kv))


def _split_heads(array: Array, n_kv_heads: int) -> Array:
    """(batch, heads, n, width) to (batch, kv_heads, group, n, width), a view."""
    batch, n_heads, n, width = array.shape
    shape = (batch, n_kv_heads, n_heads // n_kv_heads, n, width)
    return namespace(array).reshape(array, shape)


def _columns(block: Array) -> Array:
    """(..., group, n, width) to (..., group * n, width): a view where a group is one head."""
    *outer, group, n, width = block.shape
    if group == 1:
        return block[..., 0, :, :]
    return namespace(block).reshape(block, (*outer, group * n, width))


def _put(target: Array, function: Callable[..., Array], left: Array, right: Array | float) -> None:
    """Write ``function(left, right)`` of columns into a block."""
    if target.shape[-3] == 1:
        function(left, right, out=target[..., 0, :, :])
    else:
        target[...] = namespace(left).reshape(function(left, right), target.shape)


def causal_attention(
    q: Array,
    k: Array,
    v: Array,
    scale: float | None = None,
    out: Array | None = None,
) -> tuple[Array, Array]:
    """Softmax attention in which a query sees the keys up to its own position.

    With more keys than queries the queries are the last positions, as with a key-value cache.
    Extra memory is one block of scores, whatever the sequence.

    Parameters
    ----------
    q : Array
        Shape ``(batch, heads, n_queries, head_width)``, any strides.
    k, v : Array
        Shape ``(batch, kv_heads, n_keys, head_width)``; kv_heads divides heads.
    scale : float, optional
        Factor on the scores; ``head_width ** -0.5`` by default.
    out : Array, optional
        Shape of `q`, any strides.

    Returns
    -------
    tuple of Array
        The output (shape of `q`) and the log-sum-exp of the scores of each query, shape
        ``(batch, kv_heads, 1, group * n_queries)`` in an order private to the backward.

    Raises
    ------
    UnsupportedArray
        If shapes or dtypes do not fit.
    """
    _check(q, k, v)
    xp = namespace(q, k, v)
    out = empty_like(q) if out is None else out
    check_shape("causal_attention", "out", out, tuple(q.shape))
    scale = q.shape[3] ** -0.5 if scale is None else float(scale)
    group = q.shape[1] // k.shape[1]
    lse = empty_like(q, (q.shape[0], k.shape[1], 1, group * q.shape[2]))
    q5, out5 = (_split_heads(a, k.shape[1]) for a in (q, out))
    tiles = list(_tiles(q, k.shape[2], group))
    for rows, heads in _groups(q, k):
        keys, values = k[rows, heads, :, :], v[rows, heads, :, :]
        for tile in tiles:
            if tile.first:
                block = _columns(q5[rows, heads, :, tile.queries, :]) * scale
                top = total = result = None
            s = _scores(xp, keys[:, :, tile.keys, :], block, tile.mask)
            top, total, result = _online(xp, s, values[:, :, tile.keys, :], top, total, result)
            if tile.last:
                target = out5[rows, heads, :, tile.queries, :]
                _put(target, xp.divide, result, xp.matrix_transpose(total))
                lse[rows, heads, :, _lse_columns(tile, group)] = xp.log(total) + top
    return out, lse


def _lse_columns(tile: _Tile, group: int) -> slice:
    return slice(tile.queries.start * group, tile.queries.stop * group)


def _scores(xp: Any, keys: Array, block: Array, mask: Array | None) -> Array:
    s = xp.matmul(keys, xp.matrix_transpose(block))
    if mask is not None:
        tail = s[:, :, s.shape[2] - mask.shape[0] :, :]
        xp.add(tail, mask, out=tail)
    return s


def _online(
    xp: Any, s: Array, values: Array, top: Array | None, total: Array | None, result: Array | None
) -> tuple[Array, Array, Array]:
    """Fold one block of scores into running maximum, sum and output; `s` is overwritten."""
    new_top = xp.max(s, axis=2, keepdims=True)
    if top is not None:
        new_top = xp.maximum(top, new_top)
    xp.subtract(s, new_top, out=s)
    xp.exp(s, out=s)
    ones = filled(s, (1, s.shape[2]), 1.0)
    new_total, new_result = xp.matmul(ones, s), xp.matmul(xp.matrix_transpose(s), values)
    if top is not None:
        shrink = xp.exp(top - new_top)
        new_total = new_total + total * shrink
        new_result = new_result + result * xp.matrix_transpose(shrink)
    return new_top, new_total, new_result


def causal_attention_backward(
    grad: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    scale: float | None = None,
    grad_q: Array | None = None,
    grad_k: Array | None = None,
    grad_v: Array | None = None,
) -> tuple[Array, Array, Array]:
    """Gradients of `causal_attention` with respect to q, k and v.

    Parameters
    ----------
    grad : Array
        Gradient of the output, shape of `q`.
    q, k, v : Array
        As given to `causal_attention`.
    out, lse : Array
        As `causal_attention` returned them.
    scale : float, optional
        As given to `causal_attention`.
    grad_q, grad_k, grad_v : Array, optional
        Where the results go: shapes of q, k and v, any strides.

    Returns
    -------
    tuple of Array
        Gradients of q, k and v.

    Raises
    ------
    UnsupportedArray
        If shapes or dtypes do not fit.
    """
    _check(q, k, v)
    xp = namespace(q, k, v)
    grad_q, grad_k, grad_v = (
        empty_like(a) if g is None else g for a, g in ((q, grad_q), (k, grad_k), (v, grad_v))
    )
    for role, array, like in (
        ("grad", grad, q),
        ("out", out, q),
        ("grad_q", grad_q, q),
        ("grad_k", grad_k, k),
        ("grad_v", grad_v, v),
    ):
        check_shape("causal_attention_backward", role, array, tuple(like.shape))
    scale = q.shape[3] ** -0.5 if scale is None else float(scale)
    split = [_split_heads(a, k.shape[1]) for a in (q, grad, out, grad_q)]
    tiles = list(_tiles(q, k.shape[2], q.shape[1] // k.shape[1]))
    for rows, heads in _groups(q, k):
        of_queries = [a[rows, heads, ...] for a in split]
        of_keys = [a[rows, heads, ...] for a in (k, v, grad_k, grad_v)]
        _backward_group(xp, tiles, of_queries, of_keys, lse[rows, heads, ...], scale)
    return grad_q, grad_k, grad_v


def _backward_group(
    xp: Any,
    tiles: list[_Tile],
    of_queries: list[Array],
    of_keys: list[Array],
    lse: Array,
    scale: float,
) -> None:
    """All tiles of some rows and heads: q, dO, O, dQ by groups, and K, V, dK, dV."""
    group = of_queries[0].shape[2]
    for tile in tiles:
        if tile.first:
            q, grad, out, grad_q = (a[:, :, :, tile.queries, :] for a in of_queries)
            block, g, dq = _columns(q) * scale, _columns(grad), None
            dot = xp.vecdot(g, _columns(out))[:, :, None, :]
        keys, values, dk, dv = (a[:, :, tile.keys, :] for a in of_keys)
        p = _scores(xp, keys, block, tile.mask)
        xp.subtract(p, lse[:, :, :, _lse_columns(tile, group)], out=p)
        xp.exp(p, out=p)
        _write(xp, dv, p, g, tile.fresh)
        # dS = P * (dP - D) with dP = dO V^T, transposed.
        ds = xp.matmul(values, xp.matrix_transpose(g))
        xp.subtract(ds, dot, out=ds)
        xp.multiply(ds, p, out=ds)
        _write(xp, dk, ds, block, tile.fresh)
        part = xp.matmul(xp.matrix_transpose(ds), keys)
        dq = part if dq is None else xp.add(dq, part, out=dq)
        if tile.last:
            _put(grad_q, xp.multiply, dq, scale)


def _write(xp: Any, target: Array, left: Array, right: Array, fresh: bool) -> None:
    """Write a product where nothing was written before, else add it."""
    if fresh:
        xp.matmul(left, right, out=target)
    else:
        xp.add(target, xp.matmul(left, right), out=target)
