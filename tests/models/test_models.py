"""GPT and Llama as functions: gradients, order, buffers, splitting, refusals."""

from __future__ import annotations

import dataclasses
import math

import array_api_strict as strict
import numpy as np
import pytest

from mpipar import nn
from mpipar.errors import EmptyInput, OutOfRange, UnevenSplit, UnsupportedArray
from mpipar.models import GPT, GPTConfig, Llama, LlamaConfig, ModelConfig, build_model
from mpipar.models.parts import Gradients

SMALL = GPTConfig(n_layers=2, width=12, n_heads=4, n_kv_heads=2, sequence=9, vocabulary=11)
LLAMA = LlamaConfig(
    n_layers=2, width=24, n_heads=4, n_kv_heads=2, sequence=9, vocabulary=11, hidden=20
)
both = pytest.mark.parametrize("config", [SMALL, LLAMA], ids=["gpt", "llama"])


def build(config=SMALL, dtype=np.float64, n=9):
    """A model with parameters away from zero, and tokens."""
    model, generator = build_model(config), np.random.default_rng(5)
    parameters = model.init(0, dtype)
    for array in parameters.values():
        array += generator.normal(0, 0.1, array.shape).astype(dtype)
    tokens, targets = generator.integers(0, config.vocabulary, (2, 3, n))
    return model, parameters, tokens, targets


def philox():
    return np.random.Generator(np.random.Philox(3))


def all_gradients(model, parameters, tokens, targets, scale=1.0, generator=None):
    _, context = model.forward(parameters, tokens, targets, scale, generator)
    gradients = {name: np.full_like(p, np.nan) for name, p in parameters.items()}
    model.backward(parameters, context, gradients)
    return gradients


@pytest.mark.parametrize(
    "changes",
    [{}, {"tied": True}, {"dropout": 0.3}, {"label_smoothing": 0.2, "ignore_index": 3}],
    ids=str,
)
@both
def test_gradients_equal_finite_differences(config, changes):
    model, parameters, tokens, targets = build(dataclasses.replace(config, **changes), n=7)
    generator = philox if "dropout" in changes else lambda: None
    gradients = all_gradients(model, parameters, tokens, targets, 0.5, generator())
    pick = np.random.default_rng(0)
    for name, p in parameters.items():
        direction = pick.normal(size=p.shape)
        values = []
        for sign in (1, -1):
            moved = {**parameters, name: p + sign * 1e-5 * direction}
            values.append(model.forward(moved, tokens, targets, 0.5, generator())[0])
        expected = (values[0] - values[1]) / 2e-5
        actual = np.vdot(gradients[name], direction)
        assert actual == pytest.approx(expected, rel=1e-6, abs=1e-7), name


@both
def test_loss_is_the_scaled_sum_and_evaluation_agrees(config):
    model, parameters, tokens, targets = build(config)
    loss = model.loss(parameters, tokens, targets)
    assert model.forward(parameters, tokens, targets, 0.25)[0] == pytest.approx(loss / 4, rel=1e-14)
    # Rows are independent, so the sum over single rows is the same.
    rows = [model.loss(parameters, t[None], y[None]) for t, y in zip(tokens, targets, strict=True)]
    assert sum(rows) == pytest.approx(loss, rel=1e-13)


@both
def test_a_token_changes_no_earlier_loss(config):
    model, parameters, tokens, targets = build(config)
    hidden = np.full_like(targets, model.config.ignore_index)
    hidden[:, :5] = targets[:, :5]
    before = model.loss(parameters, tokens, hidden)
    tokens[:, 5:] = (tokens[:, 5:] + 1) % 11
    assert model.loss(parameters, tokens, hidden) == before
    assert model.loss(parameters, tokens, targets) != pytest.approx(before)


@both
def test_accumulate_adds_and_ready_names_come_in_reverse_forward_order(config):
    for tied in (False, True):
        model, parameters, tokens, targets = build(dataclasses.replace(config, tied=tied))
        once = all_gradients(model, parameters, tokens, targets)
        gradients = {name: g.copy() for name, g in once.items()}
        ready = []

        def on_ready(name, gradients=gradients, once=once, ready=ready):
            np.testing.assert_allclose(gradients[name], 2 * once[name], rtol=1e-12, atol=1e-13)
            ready.append(name)

        _, context = model.forward(parameters, tokens, targets, 1.0)
        model.backward(parameters, context, gradients, accumulate=True, on_ready=on_ready)
        assert ready == list(parameters)[::-1]


@both
def test_input_and_weight_gradients_can_run_apart(config):
    """As a pipeline does: all input gradients first, weight gradients later, in any order."""
    model, parameters, tokens, targets = build(config)
    expected = all_gradients(model, parameters, tokens, targets)
    gradients = {name: np.full_like(p, np.nan) for name, p in parameters.items()}
    x, first = model.embedding.forward(parameters, tokens)
    kept = []
    for block in model.blocks:
        x, saved = block.forward(parameters, x.copy())  # arrived from another stage
        kept.append(saved)
    _, last = model.head.forward(parameters, x, targets)
    grad = model.head.backward_input(parameters, last)
    for block, saved in zip(reversed(model.blocks), reversed(kept), strict=True):
        grad = block.backward_input(parameters, saved, grad.copy())
    model.embedding.backward_input(first, grad)
    to = Gradients(gradients)
    for block, saved in zip(model.blocks, kept, strict=True):
        block.backward_weight(saved, to)
    model.embedding.backward_weight(first, to)
    model.head.backward_weight(last, to)
    for name, g in gradients.items():
        np.testing.assert_array_equal(g, expected[name], err_msg=name)


@both
def test_buffers_are_allocated_once(config):
    model, parameters, tokens, targets = build(dataclasses.replace(config, dropout=0.1))
    counts = []
    for _ in range(4):
        all_gradients(model, parameters, tokens, targets, generator=philox())
        model.loss(parameters, tokens, targets)
        counts.append(model.workspace.n_allocations)
    assert counts[0] > 20
    assert len(set(counts)) == 1
    model.loss(parameters, tokens[:1], targets[:1])
    assert model.workspace.n_allocations > counts[0]


@both
def test_a_lost_context_does_not_hold_memory_or_corrupt_the_next_step(config):
    model, parameters, tokens, targets = build(config)
    expected = all_gradients(model, parameters, tokens, targets)
    model.forward(parameters, tokens, targets, 1.0)  # dropped
    _, context = model.forward(parameters, tokens, targets, 1.0)
    model.loss(parameters, tokens[:, ::-1].copy(), targets)  # must not touch that context
    gradients = {name: np.empty_like(p) for name, p in parameters.items()}
    model.backward(parameters, context, gradients)
    for name, g in gradients.items():
        np.testing.assert_array_equal(g, expected[name])


@both
def test_logits_are_those_of_the_loss(config):
    model, parameters, tokens, targets = build(config)
    logits = model.logits(parameters, tokens)
    assert logits.shape == (3, 9, 11)
    logs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    expected = -np.take_along_axis(logs, targets[..., None], axis=-1).sum()
    assert model.loss(parameters, tokens, targets) == pytest.approx(expected, rel=1e-13)


def test_llama_sees_only_distances_between_positions():
    """The same words later in a row give the same scores if nothing stands before them."""
    model, parameters, tokens, _ = build(dataclasses.replace(LLAMA, n_layers=1))
    q, k = np.random.default_rng(0).normal(size=(2, 1, 9, 4, 6))
    scores = []
    for shift in (0, 1000):
        tables = nn.rotary_tables(q, np.arange(9) + shift, 6)
        scores.append(np.einsum("bqhd,bkhd->bhqk", nn.rotary(q, *tables), nn.rotary(k, *tables)))
    np.testing.assert_allclose(scores[1], scores[0], rtol=1e-9, atol=1e-10)
    # And order matters: a model without positions would give the same last scores.
    swapped = tokens.copy()
    swapped[:, [0, 1]] = tokens[:, [1, 0]]
    changed = (tokens[:, 0] != tokens[:, 1]).nonzero()[0]
    last = [model.logits(parameters, t)[changed, -1] for t in (tokens, swapped)]
    assert np.abs(last[0] - last[1]).max() > 1e-3


def test_llama_has_the_parameters_of_the_paper():
    shapes = Llama(LLAMA).shapes()
    assert not [name for name in shapes if name.endswith("bias") or name.startswith("pos")]
    # SmolLM2-135M: tied, and the published number of parameters.
    config = LlamaConfig(
        n_layers=30, width=576, n_heads=9, n_kv_heads=3, hidden=1536, vocabulary=49152, tied=True
    )
    assert sum(map(math.prod, Llama(config).shapes().values())) == 134_515_008


def test_activations_of_a_step_take_the_bytes_that_are_said():
    """Bytes of one more layer, held between forward and backward."""
    held = []
    for n_layers in (1, 2):
        model, parameters, tokens, targets = build(dataclasses.replace(LLAMA, n_layers=n_layers))
        context = model.forward(parameters, tokens, targets)[1]
        held.append(model.workspace.lent_bytes)
        del context
    widths = 4 * 24 + (24 + 2 * 12) + 24 + 3 * 20  # norms, q k v, attended, hidden
    assert held[1] - held[0] == tokens.size * widths * 8


def test_init_depends_on_seed_and_name_only():
    deep, shallow = (GPT(dataclasses.replace(SMALL, n_layers=n)).init(4) for n in (3, 2))
    assert set(shallow) < set(deep)
    for name in ("tok.weight", "blocks.1.qkv.weight", "head.weight"):
        assert (deep[name] == shallow[name]).all()
        assert deep[name].dtype == np.float32
    assert (GPT(SMALL).init(5)["tok.weight"] != shallow["tok.weight"]).any()
    up = GPT(GPTConfig()).init(0)["blocks.0.up.weight"]
    assert up.std() == pytest.approx((3 * 256) ** -0.5, rel=0.02)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_fresh_model_predicts_almost_uniformly_and_learns(dtype):
    model = GPT(SMALL)
    parameters, (_, _, tokens, targets) = model.init(0, dtype), build()
    start = model.loss(parameters, tokens, targets)
    assert start / targets.size == pytest.approx(np.log(11), rel=0.15)
    for _ in range(30):
        gradients = all_gradients(model, parameters, tokens, targets, 1 / targets.size)
        for name, g in gradients.items():
            assert g.dtype == dtype
            parameters[name] -= 0.5 * g
    assert model.loss(parameters, tokens, targets) < 0.7 * start


def test_dropout_repeats_with_the_generator_and_is_off_in_evaluation():
    model, parameters, tokens, targets = build(dataclasses.replace(SMALL, dropout=0.5))
    losses = [model.forward(parameters, tokens, targets, 1.0, philox())[0] for _ in range(2)]
    assert losses[0] == losses[1]
    plain = build()[0].loss(parameters, tokens, targets)
    assert model.loss(parameters, tokens, targets) == plain != losses[0]
    with pytest.raises(EmptyInput, match="needs generator="):
        model.forward(parameters, tokens, targets, 1.0)


@both
def test_runs_on_array_api_strict(config):
    model, parameters, tokens, targets = build(config)
    expected = all_gradients(model, parameters, tokens, targets)
    loss = model.loss(parameters, tokens, targets)
    p = {name: strict.asarray(a) for name, a in parameters.items()}
    gradients = {name: strict.zeros(a.shape, dtype=a.dtype) for name, a in p.items()}
    actual, context = model.forward(p, strict.asarray(tokens), strict.asarray(targets), 1.0)
    assert actual == pytest.approx(loss, rel=1e-12)
    model.backward(p, context, gradients)
    for name, g in gradients.items():
        np.testing.assert_allclose(np.from_dlpack(g), expected[name], rtol=1e-9, atol=1e-12)


def test_operations_are_counted():
    # 2 layers of (12 + 2 * 6) * 12 + 12 * 12 + 2 * 12 * 48 weights, and a head of 11 * 12.
    weights = 2 * (24 * 12 + 12 * 12 + 2 * 12 * 48) + 11 * 12
    assert GPT(SMALL).n_flops(10) == 10 * (6 * weights + 12 * 2 * 12 * 9)
    assert GPT(dataclasses.replace(SMALL, tied=True)).n_flops(10) == GPT(SMALL).n_flops(10)
    # Queries, keys and values (24 + 2 * 12), output, three hidden maps; and the head.
    weights = 2 * (48 * 24 + 24 * 24 + 3 * 20 * 24) + 11 * 24
    assert Llama(LLAMA).n_flops(10) == 10 * (6 * weights + 12 * 2 * 24 * 9)


@pytest.mark.parametrize(
    ("config", "changes", "error", "says"),
    [
        (SMALL, {"n_heads": 5}, UnevenSplit, "n_heads=4 or 6 would do"),
        (SMALL, {"n_kv_heads": 3}, UnevenSplit, "n_kv_heads=2 or 4 would do"),
        (SMALL, {"n_layers": 0}, OutOfRange, "n_layers must be in range 1 or more"),
        (SMALL, {"dropout": 1.0}, OutOfRange, "dropout"),
        (SMALL, {"hidden_factor": 0}, OutOfRange, "hidden_factor"),
        (LLAMA, {"n_kv_heads": 3}, UnevenSplit, "n_kv_heads=2 or 4 would do"),
        (LLAMA, {"hidden": 0}, OutOfRange, "hidden must be in range 1 or more"),
        (LLAMA, {"rope_base": 0.0}, OutOfRange, "rope_base"),
        (
            LLAMA,
            {"n_heads": 8, "n_kv_heads": 8},
            UnevenSplit,
            "n_heads=1 or 2 or 3 or 4 or 6 or 12",
        ),
    ],
)
def test_impossible_configurations_are_refused(config, changes, error, says):
    with pytest.raises(error, match=says):
        dataclasses.replace(config, **changes)


def test_wrong_calls_are_refused():
    model, parameters, tokens, targets = build()
    with pytest.raises(UnsupportedArray, match=r"tokens of shape \(batch, sequence\)"):
        model.loss(parameters, tokens[0], targets[0])
    with pytest.raises(UnsupportedArray, match=r"targets of shape \(3, 9\)"):
        model.loss(parameters, tokens, targets[:, 1:])
    with pytest.raises(OutOfRange, match=r"1\.\.9, got 18"):
        model.loss(parameters, *(np.hstack([a, a]) for a in (tokens, targets)))
    with pytest.raises(OutOfRange, match="got 11"):
        model.loss(parameters, np.full_like(tokens, 11), targets)
    with pytest.raises(EmptyInput, match=r"lack pos\.weight"):
        model.loss({n: p for n, p in parameters.items() if n != "pos.weight"}, tokens, targets)
    with pytest.raises(UnsupportedArray, match=r"pos\.weight of shape \(9, 12\)"):
        model.loss({**parameters, "pos.weight": np.ones((8, 12))}, tokens, targets)
    _, context = model.forward(parameters, tokens, targets, 1.0)
    with pytest.raises(EmptyInput, match="gradients lack"):
        model.backward(parameters, context, {})
    gradients = {name: np.empty_like(p) for name, p in parameters.items()}
    model.backward(parameters, context, gradients)
    with pytest.raises(EmptyInput, match="used up"):
        model.backward(parameters, context, gradients)
    with pytest.raises(UnsupportedArray, match="neither a GPTConfig nor a LlamaConfig"):
        build_model(ModelConfig())
