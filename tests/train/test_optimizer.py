"""The schedule by hand, and AdamW against its formula written out."""

import numpy as np
import pytest

from mpipar.train.optimizer import AdamW, learning_rate
from mpipar.train.recipe import TrainRecipe


def test_schedule_by_hand():
    recipe = TrainRecipe(steps=12, warmup_steps=4, learning_rate=8.0, final_learning_rate=2.0)
    rates = [learning_rate(recipe, s) for s in range(1, 13)]
    assert rates[:4] == [2.0, 4.0, 6.0, 8.0]
    # Half a cosine from 8 to 2 over 8 steps: 5 + 3 cos(k pi / 8).
    half = np.sqrt(0.5)
    cosines = [0.9238795325112867, half, 0.3826834323650898, 0.0]
    expected = [5 + 3 * c for c in [*cosines, *(-c for c in cosines[-2::-1]), -1.0]]
    assert rates[4:] == pytest.approx(expected, rel=1e-14)


def test_schedule_without_and_with_nothing_but_warm_up():
    recipe = TrainRecipe(steps=2, warmup_steps=0, learning_rate=4.0, final_learning_rate=1.0)
    assert [learning_rate(recipe, s) for s in (1, 2)] == [2.5, 1.0]
    recipe = TrainRecipe(steps=2, warmup_steps=9, learning_rate=4.0)
    assert [learning_rate(recipe, s) for s in (1, 2)] == [2.0, 4.0]


@pytest.mark.parametrize(
    ("dtype", "state"), [("f2", "f4"), ("f4", "f4"), ("f8", "f8")], ids=["f2", "f4", "f8"]
)
def test_state_is_float32_at_least(dtype, state):
    optimizer = AdamW({"w": np.ones((2, 2), dtype)}, ["w"], TrainRecipe())
    assert {n: a.dtype for n, a in optimizer.state().items()} == {
        "adam.m.w": state,
        "adam.v.w": state,
    }
    before = optimizer.state()["adam.m.w"]
    optimizer.step({"w": np.ones((2, 2), dtype)}, 1)
    assert optimizer.state()["adam.m.w"] is before  # what a checkpoint reads and writes
    assert before.any()


def test_decay_spares_vectors_and_only_named_parameters_move():
    recipe = TrainRecipe(steps=5, warmup_steps=0, weight_decay=0.25, beta1=0.5, beta2=0.75, eps=0.1)
    rng = np.random.default_rng(0)
    start = {"w": rng.normal(size=(3, 2)), "b": rng.normal(size=3), "frozen": np.ones((2, 2))}
    parameters = {n: a.copy() for n, a in start.items()}
    optimizer = AdamW(parameters, ["w", "b"], recipe)
    m, v = (dict.fromkeys(start, 0.0) for _ in range(2))
    for step in range(1, 4):
        gradients = {n: rng.normal(size=a.shape) for n, a in start.items()}
        rate = optimizer.step(gradients, step, gradient_scale=0.5)
        assert rate == learning_rate(recipe, step)
        for name, decay in (("w", 0.25), ("b", 0.0)):
            g = 0.5 * gradients[name]
            m[name] = 0.5 * m[name] + 0.5 * g
            v[name] = 0.75 * v[name] + 0.25 * g**2
            unbiased = np.sqrt(v[name] / (1 - 0.75**step)) + 0.1
            update = m[name] / (1 - 0.5**step) / unbiased + decay * start[name]
            start[name] = start[name] - rate * update
            np.testing.assert_allclose(parameters[name], start[name], rtol=1e-13)
    np.testing.assert_array_equal(parameters["frozen"], 1.0)
