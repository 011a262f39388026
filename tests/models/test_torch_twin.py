"""Loss and all gradients against independent PyTorch models in float64."""

from __future__ import annotations

import numpy as np
import pytest

from mpipar.models import GPTConfig, LlamaConfig, build_model

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.bench

from benchmarks.torch_gpt import TorchGPT  # noqa: E402
from benchmarks.torch_llama import TorchLlama  # noqa: E402

CONFIGS = [
    GPTConfig(n_layers=2, width=64, n_heads=4, sequence=130),
    GPTConfig(n_layers=2, width=48, n_heads=6, n_kv_heads=2, sequence=70, vocabulary=97),
    GPTConfig(n_layers=1, width=32, n_heads=2, n_kv_heads=1, sequence=40, tied=True),
    GPTConfig(n_layers=1, width=32, n_heads=2, sequence=40, label_smoothing=0.1, ignore_index=7),
    LlamaConfig(n_layers=2, width=64, n_heads=4, sequence=130, hidden=90),
    LlamaConfig(n_layers=2, width=48, n_heads=6, n_kv_heads=2, sequence=70, rope_base=1e5),
    LlamaConfig(n_layers=2, width=36, n_heads=9, n_kv_heads=3, sequence=300, hidden=50, tied=True),
    LlamaConfig(n_layers=1, width=32, n_heads=2, n_kv_heads=1, sequence=40, label_smoothing=0.1),
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_loss_and_gradients(config, record_property):
    model, generator = build_model(config), np.random.default_rng(0)
    parameters = model.init(0, np.float64)
    twin = (TorchLlama if isinstance(config, LlamaConfig) else TorchGPT)(config).double()
    assert {n for n, _ in twin.named_parameters()} == set(parameters)
    for name, p in parameters.items():
        p += generator.normal(0, 0.1, p.shape)
        twin.get_parameter(name).data = torch.from_numpy(p.copy())
    n = config.sequence - 3
    tokens, targets = generator.integers(0, config.vocabulary, (2, 2, n))
    loss, context = model.forward(parameters, tokens, targets, 1 / 64)
    gradients = {name: np.full_like(p, np.nan) for name, p in parameters.items()}
    model.backward(parameters, context, gradients)
    expected = torch.nn.functional.cross_entropy(
        twin(torch.from_numpy(tokens)).reshape(-1, config.vocabulary),
        torch.from_numpy(targets).reshape(-1),
        reduction="sum",
        ignore_index=config.ignore_index,
        label_smoothing=config.label_smoothing,
    )
    (expected / 64).backward()
    assert loss == pytest.approx(expected.item() / 64, rel=1e-10)
    worst = 0.0
    for name, actual in gradients.items():
        reference = twin.get_parameter(name).grad.numpy()
        worst = max(worst, np.abs(actual - reference).max() / np.abs(reference).max())
    print(f"largest relative error of a gradient: {worst:.1e}")
    assert worst < 1e-10


@pytest.mark.parametrize("kind", [GPTConfig, LlamaConfig])
def test_runs_on_torch_tensors(kind):
    config = kind(n_layers=1, width=16, n_heads=2, sequence=12, vocabulary=11, dropout=0.1)
    model, generator = build_model(config), np.random.default_rng(0)
    arrays = model.init(0, np.float64)
    tokens, targets = generator.integers(0, 11, (2, 3, 12))
    results = []
    for convert in (np.asarray, torch.from_numpy):
        p = {name: convert(a) for name, a in arrays.items()}
        g = {name: convert(np.empty_like(a)) for name, a in arrays.items()}
        masks = np.random.default_rng(1)
        loss, context = model.forward(p, convert(tokens), convert(targets), 1.0, masks)
        model.backward(p, context, g)
        results.append([loss, *(np.asarray(a) for a in g.values())])
    for actual, expected in zip(results[1], results[0], strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=1e-12)
