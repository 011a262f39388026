"""A GPT and a Llama at any degree of tensor parallelism are the model of one rank, in float64."""

from __future__ import annotations

import dataclasses
import functools
import tracemalloc

import numpy as np
import pytest

from mpipar.comm import ThreadWorld
from mpipar.errors import UnevenSplit
from mpipar.models import GPTConfig, LlamaConfig, build_model
from mpipar.models.parts import Streams
from mpipar.models.stage import ModelStage
from tests.spy import Spy

# 29 token values are padded at every degree above 1.
SHAPE = {"n_layers": 2, "width": 24, "n_heads": 12, "sequence": 12, "vocabulary": 29}
GPT = GPTConfig(**SHAPE)
LLAMA = LlamaConfig(**{**SHAPE, "width": 48}, hidden=36)
CONFIGS = {
    "gpt": dataclasses.replace(GPT, label_smoothing=0.1, ignore_index=3),
    "gpt tied": dataclasses.replace(GPT, tied=True, dropout=0.2),
    "llama": LLAMA,
    "llama tied": dataclasses.replace(LLAMA, tied=True, dropout=0.2),
}
STEPS = 10
each = pytest.mark.parametrize("name", CONFIGS)
ways = pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sp"])


def away_from_zero(model, comm=None):
    """Parameters of the one-rank model with values in biases and norms too, cut for a rank."""
    whole = build_model(model.config).init(4, np.float64)
    rng = np.random.default_rng(5)
    for array in whole.values():
        array += rng.normal(0, 0.1, array.shape)
    return {n: s.cut(whole[n], comm.rank if comm else 0) for n, s in model.shards.items()}


def train(model, parameters):
    """Losses, and the gradients of the last step, of ten steps of two microbatches."""
    rows = np.random.default_rng(1).integers(0, 29, (STEPS, 2, 2, 13))
    rows = np.where(np.arange(STEPS)[:, None, None, None] % 2, rows, rows[:1])
    gradients = {n: np.full_like(p, np.nan) for n, p in parameters.items()}
    curve = []
    for i, step in enumerate(rows):
        total = 0.0
        for k, part in enumerate(step):
            noise = np.random.default_rng([i, k]) if model.config.dropout else None
            loss, context = model.forward(parameters, part[:, :-1], part[:, 1:], 1 / 48, noise)
            model.backward(parameters, context, gradients, k > 0)
            total += loss
        model.finish(gradients)
        curve.append(total)
        for n, p in parameters.items():
            p -= 0.05 * gradients[n]
    return np.array(curve), gradients


@functools.cache
def alone(name):
    model = build_model(CONFIGS[name])
    parameters = away_from_zero(model)
    return (*train(model, parameters), parameters)


def joined(model, comm, local):
    return {n: s.join(comm.all_gather(local[n][None])) for n, s in model.shards.items()}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert np.linalg.norm(found[name] - value) <= 1e-12 * np.linalg.norm(value), name


@pytest.mark.ranks(1, 2, 3, 4)
@each
@ways
def test_ten_steps_at_any_degree_are_those_of_one_rank(comm, name, sequence_parallel):
    model = build_model(CONFIGS[name], comm, sequence_parallel)
    parameters = away_from_zero(model, comm)
    curve, gradients = train(model, parameters)
    wanted, expected, end = alone(name)
    np.testing.assert_allclose(curve, wanted, rtol=1e-12)
    assert curve[-2] < curve[0] - 0.1  # the same rows, seen again
    assert_same(joined(model, comm, gradients), expected)
    assert_same(joined(model, comm, parameters), end)
    assert model.workspace.lent_bytes == 0


@pytest.mark.ranks(2, 3, 4)
@each
def test_each_rank_draws_and_holds_its_part_of_the_whole(comm, name):
    config = CONFIGS[name]
    whole = build_model(config).init(7)
    model = build_model(config, comm)
    local = model.init(7)
    assert local.keys() == whole.keys()
    for n, array in whole.items():
        shard = model.shards[n]
        np.testing.assert_array_equal(local[n], shard.cut(array, comm.rank))
        split = "ln" not in n and n != "pos.weight" and not n.endswith(("proj.bias", "down.bias"))
        padded = -(-29 // comm.size) * comm.size * config.width
        size = padded if n in ("tok.weight", "head.weight") else array.size
        assert local[n].size == (size // comm.size if split else size), n
    sums = comm.all_gather(np.array([float(local["blocks.0.qkv.weight"].sum())]))
    assert len(set(sums.tolist())) == comm.size


@pytest.mark.ranks(2, 3)
@each
@ways
def test_evaluation_and_logits_are_those_of_one_rank(comm, name, sequence_parallel):
    one, model = build_model(CONFIGS[name]), build_model(CONFIGS[name], comm, sequence_parallel)
    tokens = np.random.default_rng(2).integers(0, 29, (2, 13))
    whole, local = away_from_zero(one), away_from_zero(model, comm)
    expected = one.loss(whole, tokens[:, :-1], tokens[:, 1:])
    found = model.loss(local, tokens[:, :-1], tokens[:, 1:])
    assert found == pytest.approx(expected, rel=1e-12)
    np.testing.assert_allclose(
        model.logits(local, tokens[:, :-1]), one.logits(whole, tokens[:, :-1]), atol=1e-12
    )


@pytest.mark.ranks(2, 4)
@each
@ways
def test_two_stages_run_apart_are_the_model(comm, name, sequence_parallel):
    """As in a pipeline: recomputed, input gradients first, weight gradients later."""
    model = build_model(CONFIGS[name], comm, sequence_parallel)
    parameters = away_from_zero(model, comm)
    rows = np.random.default_rng(3).integers(0, 29, (2, 13))
    noise = lambda: np.random.default_rng(6) if model.config.dropout else None  # noqa: E731
    wanted = {n: np.zeros_like(p) for n, p in parameters.items()}
    loss, context = model.forward(parameters, rows[:, :-1], rows[:, 1:], 0.5, noise())
    model.backward(parameters, context, wanted)
    gradients = {n: np.zeros_like(p) for n, p in parameters.items()}
    stages = [
        ModelStage(model, range(0, 1), True, False, np.float64, recompute=True),
        ModelStage(model, range(1, 2), False, True, np.float64),
    ]
    for stage in stages:
        stage.begin(parameters, gradients, [rows], 0.5, [Streams(noise())])
    x = stages[0].forward(0, None)
    assert (x.shape, x.dtype.name) == stages[1].input_spec(0)
    stages[1].forward(0, x)
    assert stages[1].loss == pytest.approx(loss, rel=1e-13)
    stages[0].backward_input(0, stages[1].backward_input(0, None))
    for stage in stages:
        stage.backward_weight(0)
    assert_same(gradients, wanted)


@pytest.mark.ranks(2)
def test_a_degree_that_does_not_divide_is_refused_with_those_that_do(comm):
    small = LlamaConfig(n_layers=1, width=576, n_heads=9, n_kv_heads=3, vocabulary=31)
    with pytest.raises(UnevenSplit, match=r"tp=2; tp=1 or 3 would do \(n_heads=9, kv_heads=3\)"):
        build_model(small, comm)
    with pytest.raises(UnevenSplit, match=r"35.*tp"):
        build_model(dataclasses.replace(LLAMA, hidden=35), comm)
    model = build_model(GPT, comm, sequence_parallel=True)
    local, rows = model.init(0), np.zeros((1, 11), int)
    with pytest.raises(UnevenSplit, match=r"sequence.*11"):
        model.loss(local, rows, rows)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("name", ["gpt", "llama"])
@ways
def test_a_layer_sends_the_bytes_of_the_formula(comm, name, sequence_parallel):
    """8 b s h (t-1)/t elements a layer and rank, forward and backward, either way."""
    sent = []
    for n_layers in (1, 3):
        spy = Spy(comm)
        config = dataclasses.replace(CONFIGS[name], n_layers=n_layers)
        model = build_model(config, spy, sequence_parallel)
        parameters = model.init(0, np.float64)
        gradients = {n: np.zeros_like(p) for n, p in parameters.items()}
        rows = np.random.default_rng(1).integers(0, 29, (3, 13))
        spy.reset()
        _, context = model.forward(parameters, rows[:, :-1], rows[:, 1:])
        model.backward(parameters, context, gradients)
        sent.append(spy.n_bytes)
        before = spy.n_bytes
        model.finish(gradients)
        if not sequence_parallel:
            assert spy.n_bytes == before
    t = comm.size
    assert sent[1] - sent[0] == 2 * 8 * 3 * 12 * config.width * (t - 1) // t * 8


def test_drawing_and_holding_never_takes_memory_of_the_whole():
    config = GPTConfig(n_layers=1, width=256, n_heads=4, sequence=16, vocabulary=8192)
    model = ThreadWorld(4).run(lambda comm: build_model(config, comm))[1]
    tracemalloc.start()
    parameters = model.init(0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    held = sum(array.nbytes for array in parameters.values())
    whole = sum(int(np.prod(shard.shape)) for shard in model.shards.values()) * 4
    assert held < 0.26 * whole
    assert peak < held + (3 << 20) < 0.5 * whole  # runs of rows that are drawn, and copies of them
