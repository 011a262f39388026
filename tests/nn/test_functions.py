"""Forward values against formulas written out here, dtypes, out=, accumulate= and refusals."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpipar import nn
from mpipar.errors import OutOfRange, UnsupportedArray

sizes = st.integers(1, 6)


def normal(seed, *shape, dtype=np.float64):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


@settings(max_examples=40)
@given(sizes, sizes, sizes, sizes, st.integers(0, 2**31))
def test_linear_is_adjoint_to_its_backward(batch, n, n_in, n_out, seed):
    x, w, y = (
        normal(seed, batch, n, n_in),
        normal(seed + 1, n_out, n_in),
        normal(2, batch, n, n_out),
    )
    forward = np.vdot(nn.linear(x, w), y)
    tolerance = {"rel": 1e-11, "abs": 1e-11}
    assert np.vdot(x, nn.linear_backward_input(y, w)) == pytest.approx(forward, **tolerance)
    assert np.vdot(w, nn.linear_backward_weight(x, y)) == pytest.approx(forward, **tolerance)


@settings(max_examples=40)
@given(st.integers(1, 9), sizes, st.lists(st.integers(0, 8), min_size=1, max_size=30))
def test_embedding_is_adjoint_to_its_backward(extra, width, index):
    index = np.array(index)
    table, y = normal(0, index.max() + extra, width), normal(1, index.size, width)
    forward = np.vdot(nn.embedding(index, table), y)
    back = nn.embedding_backward(index, y, n_rows=table.shape[0])
    assert np.vdot(table, back) == pytest.approx(forward, rel=1e-11, abs=1e-11)
    expected = np.zeros_like(table)
    np.add.at(expected, index, y)
    np.testing.assert_allclose(back, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rows", [1, 3, 1000])
def test_norms_and_activations_equal_their_formulas(rows):
    x, w, b = normal(0, rows, 300) * 5 + 2, normal(1, 300), normal(2, 300)
    centred = x - x.mean(1, keepdims=True)
    layer = centred / np.sqrt((centred**2).mean(1, keepdims=True) + 1e-5) * w + b
    np.testing.assert_allclose(nn.layer_norm(x, w, b)[0], layer, rtol=1e-10, atol=1e-12)
    rms = x / np.sqrt((x**2).mean(1, keepdims=True) + 1e-6) * w
    np.testing.assert_allclose(nn.rms_norm(x, w, eps=1e-6)[0], rms, rtol=1e-10, atol=1e-12)
    z = x + b
    gelu = 0.5 * z * (1 + np.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))
    np.testing.assert_allclose(nn.gelu(x, b), gelu, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(nn.silu(x, b), z / (1 + np.exp(-z)), rtol=1e-10, atol=1e-12)


def test_activations_survive_large_values():
    x = np.array([[-1e4, -50.0, 0.0, 50.0, 1e4]], np.float32)
    for function in (nn.gelu, nn.silu):
        slope = np.empty_like(x)
        y = function(x, slope=slope)
        np.testing.assert_allclose(y, np.maximum(x, 0), atol=1e-12)
        np.testing.assert_allclose(slope, [[0, 0, 0.5, 1, 1]], atol=1e-12)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_equals_the_textbook(smoothing):
    logits, targets = normal(3, 700, 11) * 30, np.arange(700) % 11
    targets[::5] = -1
    loss, _ = nn.cross_entropy(logits, targets, ignore_index=-1, label_smoothing=smoothing)
    expected = 0.0
    for row, t in zip(logits, targets, strict=True):
        if t != -1:
            logp = row - row.max() - np.log(np.exp(row - row.max()).sum())
            expected -= (1 - smoothing) * logp[t] + smoothing * logp.mean()
    assert loss == pytest.approx(expected, rel=1e-12)


def test_cross_entropy_with_all_rows_ignored_is_zero():
    logits, targets = normal(0, 4, 3), np.full(4, -100)
    loss, lse = nn.cross_entropy(logits, targets)
    assert loss == 0.0
    assert (nn.cross_entropy_backward(logits, targets, lse) == 0).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_dtype_is_kept(dtype):
    x, w, b = (
        normal(0, 2, 6, 4, dtype=dtype),
        normal(1, 4, 4, dtype=dtype),
        normal(2, 4, dtype=dtype),
    )
    y, xhat, rstd = nn.layer_norm(x, b, b)
    slope = np.empty_like(x)
    q = normal(3, 2, 2, 6, 4, dtype=dtype)
    wide = np.float64(0.3)  # a NumPy scalar must not widen the arrays it meets
    out, lse = nn.causal_attention(q, q, q, wide)
    targets = np.zeros((2, 6), int)
    _, logsum = nn.cross_entropy(x, targets)
    results = [
        nn.linear(x, w, b), nn.linear_backward_input(x, w), nn.linear_backward_weight(x, x),
        nn.bias_backward(x), nn.embedding(targets, w), nn.embedding_backward(targets, x, 4),
        y, nn.layer_norm_backward_input(x, b, xhat, rstd), nn.norm_backward_weight(x, xhat),
        nn.rms_norm(x, b)[0], nn.gelu(x, b, slope=slope), nn.silu(x), nn.slope_backward(x, slope),
        nn.dropout_slope(x, 0.5, np.random.default_rng(0)), out, lse,
        *nn.causal_attention_backward(q, q, q, q, out, lse, wide),
        logsum, nn.cross_entropy_backward(x, targets, logsum, wide),
    ]  # fmt: skip
    assert {r.dtype for r in results} == {np.dtype(dtype)}


def test_weight_gradients_write_and_add_into_views_of_one_bucket():
    x, g, index = normal(0, 3, 4, 5), normal(1, 3, 4, 2), np.array([[0, 1, 1, 6]] * 3)
    bucket = np.full(10 + 2 + 7 * 5 + 5, np.nan)
    weight, bias = bucket[:10].reshape(2, 5), bucket[10:12]
    table, norm = bucket[12:47].reshape(7, 5), bucket[47:]
    for times in (1, 2):
        options = {"accumulate": times == 2}
        assert nn.linear_backward_weight(x, g, out=weight, **options) is weight
        nn.bias_backward(g, out=bias, **options)
        nn.embedding_backward(index, x, out=table, **options)
        nn.norm_backward_weight(x, x, out=norm, **options)
        expected = np.concatenate([
            np.einsum("abo,abi->oi", g, x).ravel(), g.sum((0, 1)),
            np.einsum("abv,abi->vi", np.eye(7)[index], x).ravel(),
            (x * x).sum((0, 1)),
        ])  # fmt: skip
        np.testing.assert_allclose(bucket, times * expected, rtol=1e-12, atol=1e-12)


def test_dropout_keeps_the_mean_and_repeats_with_the_seed():
    x = np.ones((400, 500), np.float32)

    def mask(seed):
        return nn.dropout_slope(x, 0.3, np.random.Generator(np.random.Philox(seed)))

    first = mask(1)
    # 200,000 draws: the standard error of the share is 0.001.
    assert (first == 0).mean() == pytest.approx(0.3, abs=0.005)
    assert first.mean() == pytest.approx(1.0, abs=0.01)
    assert np.unique(first).size == 2
    assert (first == mask(1)).all()
    # Independent masks agree with probability 0.3**2 + 0.7**2.
    assert (first == mask(2)).mean() == pytest.approx(0.58, abs=0.01)
    assert (nn.dropout_slope(x, 0.0, np.random.default_rng(0)) == 1).all()


def test_add_residual():
    x, y, b, mask = normal(0, 500, 70), normal(1, 500, 70), normal(2, 70), normal(3, 500, 70)
    expected = x + (y + b) * mask
    assert nn.add_residual(x, y, b, mask) is x
    np.testing.assert_allclose(x, expected, rtol=1e-12, atol=1e-12)


X, CUBE = np.ones((3, 4)), np.ones((3, 3, 4))


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: nn.linear(np.ones((2, 5)), np.ones((3, 4))), r"x of shape \(\.\.\., 4\) would do"),
        (lambda: nn.linear(X, np.ones((3, 4), np.float32)), "weight is float32"),
        (lambda: nn.linear(X.astype(int), X.astype(int)), "convert to float32 or float64"),
        (lambda: nn.linear(X, X, np.ones(4)), r"bias of shape \(3,\), got \(4,\)"),
        (lambda: nn.linear(X, X, out=np.ones((3, 4))), r"out of shape \(3, 3\)"),
        (lambda: nn.linear_backward_input(X, X), "grad of shape .* would do"),
        (lambda: nn.linear_backward_weight(X, np.ones((2, 4))), r"grad of shape \(3, 4\) would do"),
        (lambda: nn.linear_backward_weight(X, X, accumulate=True), "needs out="),
        (lambda: nn.silu(CUBE, out=CUBE.copy().swapaxes(0, 1)), "C-contiguous"),
        (lambda: nn.embedding(np.array([1.0]), X), "must be integers"),
        (lambda: nn.embedding_backward(np.array([1]), np.ones((1, 4))), "n_rows= or out="),
        (lambda: nn.layer_norm(X, np.ones(3)), r"weight of shape \(4,\), got \(3,\)"),
        (lambda: nn.cross_entropy(X, np.zeros(2, int)), r"targets of shape \(3,\)"),
        (lambda: nn.slope_backward(X, np.ones((3, 3))), r"slope of shape \(3, 4\)"),
        (lambda: nn.gelu("text"), "array-API"),
    ],
)  # fmt: skip
def test_wrong_arrays_are_refused_with_what_would_do(call, says):
    with pytest.raises(UnsupportedArray, match=says):
        call()


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: nn.embedding(np.array([0, 3]), X), r"0\.\.3 \(half-open\), got 3"),
        (lambda: nn.embedding(np.array([0, -1]), X), "got -1"),
        (lambda: nn.cross_entropy(X, np.array([0, 4, 1])), "got 4"),
        (lambda: nn.cross_entropy(X, np.zeros(3, int), label_smoothing=1.0), "label_smoothing"),
        (lambda: nn.dropout_slope(X, 1.0, np.random.default_rng(0)), "dropout rate"),
    ],
)
def test_values_out_of_range_are_refused(call, says):
    with pytest.raises(OutOfRange, match=says):
        call()
