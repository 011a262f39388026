"""Blockwise attention against the naive quadratic formula, and its memory."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from mpipar import nn
from mpipar.errors import UnsupportedArray


def naive(q, k, v, scale=None):
    """Softmax attention with all scores at once, in float64."""
    q, k, v = (a.astype(np.float64) for a in (q, k, v))
    k, v = (np.repeat(a, q.shape[1] // k.shape[1], axis=1) for a in (k, v))
    scores = q @ k.swapaxes(2, 3) * (q.shape[3] ** -0.5 if scale is None else scale)
    seen = np.tri(q.shape[2], k.shape[2], k.shape[2] - q.shape[2], dtype=bool)
    scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v


def draw(shape, seed, dtype=np.float64):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


SHAPES = [
    (1, 1, 1, 1, 1),
    (2, 4, 4, 64, 64),
    (1, 6, 2, 65, 65),
    (2, 2, 1, 130, 130),
    (1, 3, 3, 300, 300),
    (1, 4, 2, 1, 77),
    (1, 4, 2, 70, 333),
]


@pytest.mark.parametrize(("batch", "heads", "kv_heads", "n_queries", "n_keys"), SHAPES)
def test_equals_the_naive_formula(batch, heads, kv_heads, n_queries, n_keys):
    q = draw((batch, heads, n_queries, 8), 0) * 4
    k, v = (draw((batch, kv_heads, n_keys, 8), seed) * 4 for seed in (1, 2))
    out, _ = nn.causal_attention(q, k, v)
    np.testing.assert_allclose(out, naive(q, k, v), rtol=1e-10, atol=1e-12)
    scaled, _ = nn.causal_attention(q, k, v, scale=0.1)
    np.testing.assert_allclose(scaled, naive(q, k, v, 0.1), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("batch", "heads", "kv_heads", "n_queries", "n_keys"), SHAPES)
def test_backward_does_not_depend_on_the_blocks(
    batch, heads, kv_heads, n_queries, n_keys, monkeypatch
):
    q, g = (draw((batch, heads, n_queries, 8), seed) for seed in (0, 3))
    k, v = (draw((batch, kv_heads, n_keys, 8), seed) for seed in (1, 2))
    results = []
    for blocks in ((64, 256, 2**19), (1024, 1024, 2**30), (17, 40, 1)):
        for name, size in zip(("QUERY_BLOCK", "KEY_BLOCK", "GROUP_BYTES"), blocks, strict=True):
            monkeypatch.setattr(f"mpipar.nn.attention.{name}", size)
        out, lse = nn.causal_attention(q, k, v)
        results.append(nn.causal_attention_backward(g, q, k, v, out, lse))
    for other in results[1:]:
        for actual, expected in zip(other, results[0], strict=True):
            np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=1e-11)


def test_strided_views_of_one_joint_buffer():
    joint = draw((2, 70, 8, 4), 0)  # 4 query heads, 2 key heads, 2 value heads
    q, k, v = (joint[:, :, s].swapaxes(1, 2) for s in (slice(4), slice(4, 6), slice(6, 8)))
    g, grads = draw((2, 70, 4, 4), 1).swapaxes(1, 2), np.full_like(joint, np.nan)
    buffer = np.empty((2, 70, 4, 4))
    out, lse = nn.causal_attention(q, k, v, out=buffer.swapaxes(1, 2))
    np.testing.assert_allclose(buffer.swapaxes(1, 2), naive(q, k, v), rtol=1e-10, atol=1e-12)
    views = [grads[:, :, s].swapaxes(1, 2) for s in (slice(4), slice(4, 6), slice(6, 8))]
    nn.causal_attention_backward(g, q, k, v, out, lse, None, *views)
    expected = nn.causal_attention_backward(g, q.copy(), k.copy(), v.copy(), out, lse)
    for view, other in zip(views, expected, strict=True):
        np.testing.assert_allclose(view, other, rtol=1e-10, atol=1e-12)


def test_later_keys_change_nothing():
    q, k, v = (draw((1, 2, 100, 8), seed) for seed in range(3))
    before, _ = nn.causal_attention(q, k, v)
    k[:, :, 60:], v[:, :, 60:] = 1e3, -1e3
    after, _ = nn.causal_attention(q, k, v)
    assert (before[:, :, :60] == after[:, :, :60]).all()
    assert (before[:, :, 60:] != after[:, :, 60:]).any()


def test_large_scores_stay_finite_in_float32():
    q, k, v = (draw((1, 1, 300, 8), seed, np.float32) * 100 for seed in range(3))
    out, lse = nn.causal_attention(q, k, v)
    assert np.isfinite(lse).all()
    np.testing.assert_allclose(out, naive(q, k, v), rtol=1e-3, atol=1e-1)
    grads = nn.causal_attention_backward(q, q, k, v, out, lse)
    assert all(np.isfinite(a).all() for a in grads)


def peak(n):
    q, k, v, g = (draw((1, 1, n, 8), seed, np.float32) for seed in range(4))
    tracemalloc.start()
    out, lse = nn.causal_attention(q, k, v)
    nn.causal_attention_backward(g, q, k, v, out, lse)
    size = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return size


def test_memory_is_not_quadratic_in_the_sequence():
    short, long = peak(1024), peak(4096)
    # All scores of the long one would take 64 MiB; four times the sequence may take four times.
    assert long < 2 * 2**20
    assert long < 4.5 * short


@pytest.mark.parametrize(
    ("q", "k", "says"),
    [
        ((1, 4, 3, 8), (1, 3, 3, 8), "n_kv_heads=1 or 2 or 4 would do"),
        ((1, 4, 5, 8), (1, 4, 3, 8), "1 to 3 queries would do"),
        ((1, 4, 3, 8), (1, 4, 3, 6), r"k of shape \(1, 4, 3, 8\)"),
        ((4, 3, 8), (4, 3, 8), r"\(batch, heads, sequence, head_width\)"),
    ],
)
def test_wrong_shapes_are_refused(q, k, says):
    with pytest.raises(UnsupportedArray, match=says):
        nn.causal_attention(np.ones(q), np.ones(k), np.ones(k))
