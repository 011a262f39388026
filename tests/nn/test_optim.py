"""AdamW against the textbook formula."""

from __future__ import annotations

import numpy as np
import pytest

from mpipar import nn
from mpipar.errors import OutOfRange, UnsupportedArray


@pytest.mark.parametrize("shape", [(), (3,), (70, 900)])
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_equals_the_textbook_formula(shape, scale):
    generator = np.random.default_rng(0)
    p = generator.normal(size=shape)
    theta, m, v = p.copy(), np.zeros(shape), np.zeros(shape)
    first, second = np.zeros(shape), np.zeros(shape)
    p = np.array(p)
    for step in range(1, 6):
        g = generator.normal(size=shape)
        nn.adamw_update(p, np.array(g), first, second, step, 0.01, 0.9, 0.95, 1e-6, 0.1, scale)
        g = g * scale
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
        m_hat, v_hat = m / (1 - 0.9**step), v / (1 - 0.95**step)
        theta = theta - 0.01 * (0.1 * theta + m_hat / (np.sqrt(v_hat) + 1e-6))
        np.testing.assert_allclose(p, theta, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(first, m, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(second, v, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_narrow_parameters_keep_float32_state(dtype):
    p, g = np.ones(5, dtype), np.full(5, 1e-4, dtype)
    m, v = np.zeros(5, np.float32), np.zeros(5, np.float32)
    nn.adamw_update(p, g, m, v, 1, 0.125)
    # 1e-4 squared underflows in float16 but not in the state.
    np.testing.assert_allclose(v, np.full(5, 1e-3 * float(g[0]) ** 2), rtol=1e-5)
    np.testing.assert_allclose(p, 0.875, rtol=2e-3)
    assert p.dtype == dtype


def test_refusals():
    p, state = np.ones((3, 4)), np.zeros((3, 4), np.float32)
    with pytest.raises(UnsupportedArray, match="must be float64 or wider"):
        nn.adamw_update(p, p, state, state, 1, 0.1)
    with pytest.raises(UnsupportedArray, match=r"gradient of shape \(3, 4\)"):
        nn.adamw_update(p, p[:2], p, p, 1, 0.1)
    with pytest.raises(UnsupportedArray, match="C-contiguous"):
        nn.adamw_update(p.T, p.T, p.T, p.T, 1, 0.1)
    with pytest.raises(OutOfRange, match="step"):
        nn.adamw_update(p, p, p, p, 0, 0.1)
    with pytest.raises(OutOfRange, match="beta2"):
        nn.adamw_update(p, p, p, p, 1, 0.1, beta2=1.0)
