"""Exported folders as the `transformers` package reads and computes them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from mpipar.checkpoint import export_hf, open_pretrained
from mpipar.models import LlamaConfig, build_model

from .conftest import drawn

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.bench, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_logits_and_names(config, dtype, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = dataclasses.replace(config, sequence=40)
    parameters = drawn(config, dtype)
    export_hf(tmp_path, config, parameters)
    llama = isinstance(config, LlamaConfig)
    kind = transformers.LlamaForCausalLM if llama else transformers.GPT2LMHeadModel
    twin, told = kind.from_pretrained(
        tmp_path, dtype=getattr(torch, dtype), output_loading_info=True
    )
    assert not any(told.values()), told
    tokens = np.random.default_rng(0).integers(0, config.vocabulary, (3, 40))
    with torch.no_grad():
        expected = twin.eval()(torch.from_numpy(tokens)).logits.numpy()
    actual = build_model(config).logits(parameters, tokens)
    error = np.abs(actual - expected).max() / np.abs(expected).max()
    print(f"largest error over the largest score: {error:.1e}")
    # Its Llama norms and turns in float32, whatever the dtype of the weights.
    assert error < (1e-12 if dtype == "float64" and not llama else 2e-6)
    # And back: a folder that the other tool wrote.
    twin.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    theirs = open_pretrained(tmp_path / "theirs")
    assert theirs.config.kv_heads == config.kv_heads
    assert dataclasses.replace(theirs.config, n_kv_heads=config.n_kv_heads) == config
    for name, array in theirs.load(dtype=dtype).items():
        np.testing.assert_array_equal(array, parameters[name], err_msg=name)
