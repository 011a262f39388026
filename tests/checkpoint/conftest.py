"""Tiny models of both kinds, and the files that other tools would write of them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mpipar.checkpoint import Extent
from mpipar.comm import ThreadWorld
from mpipar.models import GPTConfig, LlamaConfig, build_model
from mpipar.units.remainder import divisors

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


def assert_parts(opened):
    """What each of some ranks reads of a file is what it would cut out of the whole."""
    whole, config = opened.load(), opened.config
    degrees = divisors(math.gcd(config.n_heads, config.kv_heads, config.hidden))
    assert len(degrees) > 1
    for n in degrees[1:]:
        for comm in ThreadWorld(n).run(lambda comm: comm):
            shards = build_model(config, comm).shards
            parts = {name: Extent.of(shard, comm.rank) for name, shard in shards.items()}
            parts = {name: part for name, part in parts.items() if part is not None}
            found = opened.load(extents=parts)
            for name, shard in shards.items():
                local = np.zeros(shard.local_shape, np.float32)
                local[parts[name].at() if name in parts else ...] = found[name]
                np.testing.assert_array_equal(local, shard.cut(whole[name], comm.rank))


@pytest.fixture(params=MODELS, name="config")
def _config(request):
    return MODELS[request.param]
