"""Formulas, models and training on CuPy give what they give on NumPy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpipar import nn
from mpipar.models import GPTConfig, LlamaConfig, build_model
from mpipar.train.trainer import Trainer
from tests.nn import test_array_api as laws
from tests.train import test_on_device as runs

pytestmark = pytest.mark.gpu

LAWS = [law for name, law in vars(laws).items() if name.startswith("test_")
        and name not in ("test_arrays_of_two_libraries_are_refused", "test_attention")]  # fmt: skip


@pytest.fixture
def cp() -> Any:
    from tests.gpu.side import cupy, has_device

    if not has_device():
        pytest.skip("no device works")
    return cupy


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_formulas(cp: Any, law: Any, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(laws, "both", lambda function, *arrays: compare(cp, function, *arrays))
    law(dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention(cp: Any, dtype: Any, kv_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(laws, "both", lambda function, *arrays: compare(cp, function, *arrays))
    laws.test_attention(dtype, kv_heads, monkeypatch)


def compare(cp: Any, function: Any, *arrays: np.ndarray) -> None:
    """Run on NumPy and on CuPy."""
    expected = function(*(a.copy() for a in arrays))
    actual = function(*(cp.asarray(a) for a in arrays))
    for a, e in zip(actual, expected, strict=True):
        if isinstance(e, float):
            assert float(a) == pytest.approx(e, rel=1e-5)
            continue
        assert isinstance(a, cp.ndarray)
        rtol = 1e-4 if e.dtype == np.float32 else 1e-11
        np.testing.assert_allclose(cp.asnumpy(a), e, rtol=rtol, atol=1e-5)


SIZES = {"n_layers": 2, "width": 24, "n_heads": 4, "n_kv_heads": 2, "sequence": 9, "vocabulary": 11}


@pytest.mark.parametrize("config", [GPTConfig(**SIZES), LlamaConfig(**SIZES, hidden=20)], ids=str)
def test_training_goes_down_the_same_way(cp: Any, config: Any) -> None:
    tokens, targets = np.random.default_rng(1).integers(0, 11, (2, 3, 9))
    assert losses(cp, config, tokens, targets) == pytest.approx(
        losses(np, config, tokens, targets), rel=1e-9
    )


def losses(xp: Any, config: Any, tokens: np.ndarray, targets: np.ndarray) -> list[float]:
    """Of five steps of AdamW in float64."""
    model = build_model(config)
    parameters = {name: xp.asarray(p) for name, p in model.init(0, np.float64).items()}
    gradients = {name: xp.zeros_like(p) for name, p in parameters.items()}
    moments = {name: (xp.zeros_like(p), xp.zeros_like(p)) for name, p in parameters.items()}
    tokens, targets, found = xp.asarray(tokens), xp.asarray(targets), []
    for step in range(1, 6):
        loss, context = model.forward(parameters, tokens, targets)
        model.backward(parameters, context, gradients)
        for name, p in parameters.items():
            nn.adamw_update(p, gradients[name], *moments[name], step, 0.01)
        found.append(float(loss))
    assert found[-1] < found[0]
    return found


@pytest.mark.ranks(1)
def test_a_run_has_the_losses_of_the_host(cp: Any, comm: Any, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("of arrays that lie on devices and of those that do not " * 40)
    mesh = {"dp": 1, "pp": 1, "tp": 1}
    wanted = runs.losses(Trainer(comm, runs.recipe(text, "", **mesh)))
    found = runs.losses(Trainer(comm, runs.recipe(text, "cupy", **mesh), tmp_path / "run"))
    assert found == pytest.approx(wanted, rel=1e-8)
