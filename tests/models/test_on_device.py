"""Models whose parameters lie on a device touch no array of the host, alone and tensor-parallel."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpipar.comm import Communicator
from mpipar.models import GPTConfig, LlamaConfig, build_model
from tests.comm.device_math import MathArray

SIZES = {"n_layers": 2, "width": 16, "n_heads": 4, "n_kv_heads": 2, "sequence": 8, "vocabulary": 11}
CONFIGS = [
    GPTConfig(**SIZES, dropout=0.2),
    GPTConfig(**SIZES, tied=True, label_smoothing=0.1),
    LlamaConfig(**SIZES, hidden=24),
]


def gradients(comm: Communicator, config: Any, sequence_parallel: bool, put: Any) -> Any:
    """Loss and gradients with all arrays where `put` puts them."""
    model = build_model(config, comm, sequence_parallel)
    parameters = {name: put(p) for name, p in model.init(0, np.float64).items()}
    grads = {name: put(np.zeros_like(p)) for name, p in model.init(0, np.float64).items()}
    tokens, targets = np.random.default_rng(1).integers(0, 11, (2, 3, 8))
    generator = np.random.Generator(np.random.Philox(3)) if config.dropout else None
    loss, context = model.forward(parameters, put(tokens), put(targets), 0.5, generator)
    model.backward(parameters, context, grads)
    model.finish(grads)
    return float(loss), grads, model.logits(parameters, put(tokens))


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("config", CONFIGS, ids=["dropout", "tied", "llama"])
def test_loss_and_gradients_are_those_of_the_host(
    comm: Communicator, config: Any, sequence_parallel: bool
) -> None:
    sequence_parallel = sequence_parallel and comm.size > 1
    wanted, host, logits = gradients(comm, config, sequence_parallel, np.asarray)
    group = comm.split(0, purpose="device")
    assert group is not None
    loss, found, on_device = gradients(group, config, sequence_parallel, MathArray)
    assert loss == pytest.approx(wanted, rel=1e-12)
    for name, grad in found.items():
        np.testing.assert_allclose(grad._data, host[name], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(on_device._data, logits, rtol=1e-12)
    copied = group.devices.stats.to_host_bytes
    assert (copied > 0) == (comm.size > 1)
