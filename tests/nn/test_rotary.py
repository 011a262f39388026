"""Rotary embedding and SwiGLU against their formulas; aliasing, chunks and refusals."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpipar import nn
from mpipar.errors import OutOfRange, UnevenSplit, UnsupportedArray
from mpipar.nn import array

DRAW = np.random.default_rng(3).normal


def by_complex_numbers(x, positions, base):
    """The paper: pairs are complex numbers, turned by position times frequency."""
    half = x.shape[-1] // 2
    pairs = x[..., :half] + 1j * x[..., half:]
    frequencies = np.array([base ** (-2 * i / x.shape[-1]) for i in range(half)])
    turned = pairs * np.exp(1j * np.asarray(positions)[..., None, None] * frequencies)
    return np.concatenate([turned.real, turned.imag], axis=-1)


@settings(max_examples=40)
@given(
    st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 4), st.integers(1, 5)),
    st.integers(0, 10_000),
    st.sampled_from([1.0, 100.0, 10000.0, 500000.0]),
    st.booleans(),
)
def test_rotary_turns_pairs(shape, start, base, by_row):
    batch, n, heads, half = shape
    x = DRAW(size=(batch, n, heads, 2 * half))
    positions = start + np.arange(n)
    if by_row:
        positions = positions + np.arange(batch)[:, None]
    tables = nn.rotary_tables(x, positions, 2 * half, base)
    expected = by_complex_numbers(x, positions, base)
    turned = nn.rotary(x, *tables)
    np.testing.assert_allclose(turned, expected, rtol=1e-9, atol=1e-9)
    # A turn keeps lengths, and backward turns back.
    np.testing.assert_allclose(nn.rotary_backward(turned, *tables), x, rtol=1e-12, atol=1e-13)


def test_a_row_decoded_alone_turns_as_in_the_whole():
    x = DRAW(size=(2, 6, 3, 8))
    whole = nn.rotary(x, *nn.rotary_tables(x, np.arange(6), 8))
    for i in range(6):
        one = nn.rotary(x[:, i : i + 1], *nn.rotary_tables(x, np.array([i]), 8))
        np.testing.assert_array_equal(one, whole[:, i : i + 1])


def test_rotary_in_place_strided_and_in_chunks(monkeypatch):
    x = DRAW(size=(2, 40, 5, 8))
    tables = nn.rotary_tables(x, np.arange(40), 8)
    expected = nn.rotary(x, *tables)
    monkeypatch.setattr(array, "CHUNK_BYTES", 3 * 5 * 8 * 8)
    wide = np.full((2, 40, 7, 8), 9.0)
    wide[:, :, 1:6] = x
    section = wide[:, :, 1:6]
    assert nn.rotary(section, *tables, out=section) is section
    np.testing.assert_array_equal(section, expected)
    assert (wide[:, :, [0, 6]] == 9.0).all()


def test_tables_are_as_exact_at_far_positions_in_float32():
    far = np.array([100_003])
    cos, sin = nn.rotary_tables(np.ones(1, np.float32), far, 64, 10000.0)
    angles = 100_003 * 10000.0 ** (-2 * np.arange(32) / 64)
    assert cos.dtype == np.float32
    np.testing.assert_allclose(cos[0], np.cos(angles), atol=1e-7)
    np.testing.assert_allclose(sin[0], np.sin(angles), atol=1e-7)


def test_swiglu_equals_its_formula_and_may_overwrite_its_input(monkeypatch):
    monkeypatch.setattr(array, "CHUNK_BYTES", 400)
    x, g = DRAW(size=(3, 7, 10)) * 20, DRAW(size=(3, 7, 5))
    gate, up = x[..., :5], x[..., 5:]
    sigmoid = 1 / (1 + np.exp(-gate))
    u = x.copy()
    np.testing.assert_allclose(nn.swiglu(u), gate * sigmoid * up, rtol=1e-12, atol=1e-12)
    np.testing.assert_array_equal(u, x)
    nn.swiglu(u, slopes=u)
    slope = sigmoid * (1 + gate * (1 - sigmoid))
    expected = np.concatenate([g * up * slope, g * gate * sigmoid], axis=-1)
    assert nn.swiglu_backward(g, u, out=u) is u
    np.testing.assert_allclose(u, expected, rtol=1e-9, atol=1e-10)


ONE = np.ones((1, 2, 3, 4))


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: nn.rotary_tables(ONE, np.arange(2), 5), UnevenSplit, "4 or 6 would do"),
        (lambda: nn.rotary_tables(ONE, np.arange(2), 4, -1.0), OutOfRange, "rotary base"),
        (lambda: nn.rotary(ONE[0], ONE, ONE), UnsupportedArray, "even head_width"),
        (lambda: nn.rotary(ONE, np.ones((3, 2)), np.ones((2, 2))), UnsupportedArray, "cos of"),
        (lambda: nn.rotary(ONE, np.ones((2, 2)), np.ones((3, 2))), UnsupportedArray, "sin of"),
        (lambda: nn.swiglu(np.ones((2, 5))), UnsupportedArray, "side by side"),
        (lambda: nn.swiglu(ONE, out=ONE), UnsupportedArray, "out of shape"),
        (lambda: nn.swiglu_backward(ONE, ONE), UnsupportedArray, "grad of shape"),
    ],
)
def test_wrong_arrays_are_refused(call, error, says):
    with pytest.raises(error, match=says):
        call()
