"""The same formulas on array-api-strict, which has the standard's functions and nothing else."""

from __future__ import annotations

import array_api_strict as strict
import numpy as np
import pytest

from mpipar import nn
from mpipar.errors import UnsupportedArray
from mpipar.nn.array import as_rows, namespace


def both(function, *arrays):
    """Run on NumPy and on strict arrays; compare all results, which must be strict arrays."""
    expected = function(*(a.copy() for a in arrays))
    actual = function(*(strict.asarray(a.copy()) for a in arrays))
    for a, e in zip(actual, expected, strict=True):
        if isinstance(e, float):
            assert a == pytest.approx(e, rel=1e-6)
            continue
        assert isinstance(a, type(strict.ones(1)))
        a = np.from_dlpack(a)
        assert a.dtype == e.dtype
        np.testing.assert_allclose(a, e, rtol=1e-5 if e.dtype == np.float32 else 1e-12, atol=1e-6)


def draw(*shape, seed=0, dtype=np.float64):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


dtypes = pytest.mark.parametrize("dtype", [np.float32, np.float64])


@dtypes
def test_linear(dtype):
    def run(x, w, b, g, bucket):
        nn.linear_backward_weight(x, g, out=bucket, accumulate=True)
        return nn.linear(x, w, b), nn.linear_backward_input(g, w), nn.bias_backward(g), bucket

    x, w, b, g = (draw(*s, dtype=dtype) for s in ((2, 3, 5), (4, 5), (4,), (2, 3, 4)))
    both(run, x, w, b, g, draw(4, 5, dtype=dtype))


@dtypes
def test_embedding(dtype):
    def run(index, table, g):
        return nn.embedding(index, table), nn.embedding_backward(index, g, out=table)

    index = np.array([[3, 0, 3], [1, 3, 0]])
    both(run, index, draw(5, 4, dtype=dtype), draw(2, 3, 4, dtype=dtype))


@dtypes
def test_norms(dtype):
    def run(x, w, b, g):
        y, xhat, rstd = nn.layer_norm(x, w, b)
        z, rhat, rms = nn.rms_norm(x, w)
        to_x = nn.layer_norm_backward_input(g, w, xhat, rstd, residual=x)
        return (
            y, z, rms, to_x, nn.rms_norm_backward_input(g, w, rhat, rms),
            nn.norm_backward_weight(g, xhat),
        )  # fmt: skip

    both(run, *(draw(*s, dtype=dtype) for s in ((2, 3, 5), (5,), (5,), (2, 3, 5))))


@dtypes
def test_elementwise(dtype):
    def run(x, b, g):
        slopes = [g + 0, g + 0]
        y, z = nn.gelu(x, b, slope=slopes[0]), nn.silu(x, slope=slopes[1])
        mask = nn.dropout_slope(x, 0.4, np.random.default_rng(3))
        back = nn.slope_backward(g, slopes[0])
        return y, z, mask, back, slopes[1], nn.add_residual(x, g, b, mask)

    both(run, *(draw(*s, dtype=dtype) for s in ((2, 3, 5), (5,), (2, 3, 5))))


@dtypes
def test_loss(dtype):
    def run(logits, targets):
        options = {"label_smoothing": 0.2, "ignore_index": -1}
        loss, lse = nn.cross_entropy(logits, targets, **options)
        back = nn.cross_entropy_backward(logits, targets, lse, 0.5, **options)
        return loss, lse, back

    both(run, draw(2, 3, 5, dtype=dtype), np.array([[1, -1, 4], [0, 2, 2]]))


@dtypes
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention(dtype, kv_heads, monkeypatch):
    monkeypatch.setattr("mpipar.nn.attention.QUERY_BLOCK", 3)
    monkeypatch.setattr("mpipar.nn.attention.KEY_BLOCK", 4)

    def run(q, k, v, g):
        out, lse = nn.causal_attention(q, k, v)
        return out, lse, *nn.causal_attention_backward(g, q, k, v, out, lse)

    q, g = (draw(2, 4, 7, 3, seed=s, dtype=dtype) for s in (0, 1))
    both(run, q, *(draw(2, kv_heads, 7, 3, seed=s, dtype=dtype) for s in (2, 3)), g)


@dtypes
def test_adamw(dtype):
    def run(p, g, m, v):
        nn.adamw_update(p, g, m, v, 3, 0.1, weight_decay=0.1)
        return p, m, v

    both(run, *(abs(draw(4, 5, seed=s, dtype=dtype)) for s in range(4)))


def test_arrays_of_two_libraries_are_refused():
    with pytest.raises(UnsupportedArray, match="one array-API library"):
        namespace(np.ones(2), strict.ones(2))
    turned = strict.permute_dims(strict.ones((2, 3, 4)), (1, 0, 2))
    with pytest.raises(UnsupportedArray, match="not contiguous"):
        as_rows(turned, "out")


@dtypes
def test_rotary_and_swiglu(dtype):
    def run(x, positions, g):
        cos, sin = nn.rotary_tables(x, positions, x.shape[3], 100.0)
        slopes = nn.rotary(x, cos, sin)
        gated = nn.swiglu(x, slopes=slopes)
        return cos, sin, nn.rotary_backward(x, cos, sin), gated, nn.swiglu_backward(g, slopes)

    x, g = draw(2, 5, 3, 6, dtype=dtype), draw(2, 5, 3, 3, dtype=dtype)
    both(run, x, np.arange(5), g)
