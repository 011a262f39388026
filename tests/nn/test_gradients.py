"""Every explicit gradient against central finite differences in float64."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from mpipar import nn

Array = np.ndarray


def differences(function: Callable[[Array], Array], x: Array, weights: Array) -> Array:
    """Gradient of ``sum(weights * function(x))`` by central differences."""
    result = np.empty_like(x)
    for index in np.ndindex(*x.shape):
        step = 1e-5 * max(1.0, abs(x[index]))
        values = []
        for sign in (1.0, -1.0):
            moved = x.copy()
            moved[index] += sign * step
            values.append(np.sum(weights * function(moved)))
        result[index] = (values[0] - values[1]) / (2 * step)
    return result


def assert_gradient(actual: Array, function: Callable[[Array], Array], x: Array, w: Array) -> None:
    expected = differences(function, x, w)
    assert actual.shape == expected.shape
    assert actual.dtype == x.dtype
    scale = np.abs(expected).max()
    assert scale > 1e-3  # a gradient of zero would prove nothing
    np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-8 * scale)


@pytest.fixture
def draw() -> Callable[..., Array]:
    generator = np.random.default_rng(7)
    return lambda *shape: generator.normal(size=shape)


def test_linear(draw):
    x, w, b, g = draw(2, 3, 5), draw(4, 5), draw(4), draw(2, 3, 4)
    assert_gradient(nn.linear_backward_input(g, w), lambda a: nn.linear(a, w, b), x, g)
    assert_gradient(nn.linear_backward_weight(x, g), lambda a: nn.linear(x, a, b), w, g)
    assert_gradient(nn.bias_backward(g), lambda a: nn.linear(x, w, a), b, g)


def test_embedding(draw):
    index = np.array([[3, 0, 3], [1, 3, 0]])
    table, g = draw(5, 4), draw(2, 3, 4)
    actual = nn.embedding_backward(index, g, n_rows=5)
    assert_gradient(actual, lambda a: nn.embedding(index, a), table, g)
    assert (actual[[2, 4]] == 0).all()


def test_layer_norm(draw):
    x, w, b, g, other = draw(2, 3, 7) * 3 + 1, draw(7), draw(7), draw(2, 3, 7), draw(2, 3, 7)
    _, xhat, rstd = nn.layer_norm(x, w, b)
    to_x = nn.layer_norm_backward_input(g, w, xhat, rstd)
    assert_gradient(to_x, lambda a: nn.layer_norm(a, w, b)[0], x, g)
    assert_gradient(nn.norm_backward_weight(g, xhat), lambda a: nn.layer_norm(x, a, b)[0], w, g)
    assert_gradient(nn.bias_backward(g), lambda a: nn.layer_norm(x, w, a)[0], b, g)
    sums = np.empty((2, 7))
    with_residual = nn.layer_norm_backward_input(g, w, xhat, rstd, residual=other, sums=sums)
    np.testing.assert_allclose(with_residual, to_x + other, rtol=1e-13)
    assert_gradient(sums[0], lambda a: nn.layer_norm(x, a, b)[0], w, g)
    assert_gradient(sums[1], lambda a: nn.layer_norm(x, w, a)[0], b, g)


def test_rms_norm(draw):
    x, w, g = draw(4, 7) * 3 + 1, draw(7), draw(4, 7)
    _, xhat, rstd = nn.rms_norm(x, w)
    to_x = nn.rms_norm_backward_input(g, w, xhat, rstd)
    assert_gradient(to_x, lambda a: nn.rms_norm(a, w)[0], x, g)
    assert_gradient(nn.norm_backward_weight(g, xhat), lambda a: nn.rms_norm(x, a)[0], w, g)


@pytest.mark.parametrize("function", [nn.gelu, nn.silu])
def test_activation(function, draw):
    x, b, g = draw(3, 9) * 4, draw(9), draw(3, 9)
    slope = np.empty_like(x)
    function(x, b, slope=slope)
    to_x = nn.slope_backward(g, slope)
    assert_gradient(to_x, lambda a: function(a, b), x, g)
    assert_gradient(nn.bias_backward(to_x), lambda a: function(x, a), b, g)


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_cross_entropy(smoothing, draw):
    logits, targets = draw(2, 3, 5) * 2, np.array([[1, -100, 4], [0, 2, 2]])
    scale = np.array(0.25)
    options = {"label_smoothing": smoothing}
    _, lse = nn.cross_entropy(logits, targets, **options)
    actual = nn.cross_entropy_backward(logits, targets, lse, float(scale), **options)
    assert_gradient(
        actual, lambda a: np.array(nn.cross_entropy(a, targets, **options)[0]), logits, scale
    )
    assert (actual[0, 1] == 0).all()


@pytest.mark.parametrize(
    ("heads", "kv_heads", "n_queries", "n_keys"), [(2, 2, 5, 5), (4, 2, 7, 7), (3, 1, 3, 8)]
)
def test_attention(heads, kv_heads, n_queries, n_keys, draw, monkeypatch):
    monkeypatch.setattr("mpipar.nn.attention.QUERY_BLOCK", 2)
    monkeypatch.setattr("mpipar.nn.attention.KEY_BLOCK", 3)
    q, g = draw(2, heads, n_queries, 4), draw(2, heads, n_queries, 4)
    k, v = draw(2, kv_heads, n_keys, 4), draw(2, kv_heads, n_keys, 4)
    out, lse = nn.causal_attention(q, k, v)
    to_q, to_k, to_v = nn.causal_attention_backward(g, q, k, v, out, lse)
    assert_gradient(to_q, lambda a: nn.causal_attention(a, k, v)[0], q, g)
    assert_gradient(to_k, lambda a: nn.causal_attention(q, a, v)[0], k, g)
    assert_gradient(to_v, lambda a: nn.causal_attention(q, k, a)[0], v, g)


def test_rotary(draw):
    x, g = draw(2, 5, 3, 6), draw(2, 5, 3, 6)
    for positions in (np.arange(5), np.array([[0, 1, 2, 3, 4], [7, 9, 2, 2, 30]])):
        tables = nn.rotary_tables(x, positions, 6, base=50.0)
        actual = nn.rotary_backward(g, *tables)
        assert_gradient(actual, lambda a, t=tables: nn.rotary(a, *t), x, g)


def test_swiglu(draw):
    x, g = draw(2, 3, 8) * 2, draw(2, 3, 4)
    slopes = np.empty_like(x)
    nn.swiglu(x, slopes=slopes)
    assert_gradient(nn.swiglu_backward(g, slopes), nn.swiglu, x, g)
