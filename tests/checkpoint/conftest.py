"""Tiny models of both kinds, and the files that other tools would write of them."""

from __future__ import annotations

import numpy as np
import pytest

from mpipar.models import GPTConfig, LlamaConfig, build_model

MODELS = {
    "gpt": GPTConfig(n_layers=2, width=12, n_heads=3, sequence=9, vocabulary=11),
    "gpt-tied": GPTConfig(
        n_layers=1, width=8, n_heads=2, sequence=7, vocabulary=10, tied=True, hidden_factor=3,
        eps=1e-6,
    ),
    "llama": LlamaConfig(
        n_layers=2, width=32, n_heads=4, n_kv_heads=2, sequence=9, vocabulary=13, hidden=64,
        rope_base=500.0, eps=1e-6,
    ),
    "llama-tied": LlamaConfig(
        n_layers=1, width=18, n_heads=3, sequence=7, vocabulary=10, hidden=11, tied=True
    ),
}  # fmt: skip


def drawn(config, dtype=np.float32):
    """Parameters away from zero and one."""
    generator = np.random.default_rng(2)
    parameters = build_model(config).init(0, np.float64)
    return {n: (a + generator.normal(0, 0.1, a.shape)).astype(dtype) for n, a in parameters.items()}


@pytest.fixture(params=MODELS, name="config")
def _config(request):
    return MODELS[request.param]
