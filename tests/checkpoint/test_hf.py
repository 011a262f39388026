"""Hugging Face folders: round trips, shards, what is read, and what is refused."""

from __future__ import annotations

import dataclasses
import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mpipar.checkpoint import export_hf, hf, open_pretrained
from mpipar.errors import CheckpointError, EmptyInput, UnsupportedArray

from .conftest import MODELS, assert_parts, drawn

GPT, LLAMA, TIED = MODELS["gpt"], MODELS["llama"], MODELS["llama-tied"]


def assert_equal(actual, expected):
    assert list(actual) == list(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(actual[name], array, err_msg=name)


def change(folder, **facts):
    """Change some facts of config.json; None removes one."""
    path = folder / "config.json"
    merged = {**json.loads(path.read_text()), **facts}
    path.write_text(json.dumps({k: v for k, v in merged.items() if v is not None}))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_folder_gives_back_the_model(config, dtype, tmp_path):
    parameters = drawn(config, dtype)
    opened = open_pretrained(export_hf(tmp_path / "a" / "b", config, parameters))
    assert opened.config == dataclasses.replace(config, n_kv_heads=opened.config.n_kv_heads)
    assert opened.config.kv_heads == config.kv_heads
    loaded = opened.load(dtype=dtype)
    assert_equal(loaded, parameters)
    assert {a.dtype for a in loaded.values()} == {np.dtype(dtype)}
    assert sorted(p.name for p in (tmp_path / "a" / "b").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]


def test_names_and_layouts_are_those_of_the_tools(tmp_path):
    """Written down from the published files of GPT-2 and Llama."""
    parameters = drawn(LLAMA)
    found = load_file(export_hf(tmp_path, LLAMA, parameters) / "model.safetensors")
    assert len(found) == 2 * 9 + 3
    start, qkv = "model.layers.1.", parameters["blocks.1.qkv.weight"]
    np.testing.assert_array_equal(found[start + "self_attn.q_proj.weight"], qkv[:32])
    np.testing.assert_array_equal(found[start + "self_attn.k_proj.weight"], qkv[32:48])
    np.testing.assert_array_equal(found[start + "self_attn.v_proj.weight"], qkv[48:])
    up = parameters["blocks.1.gate_up.weight"][64:]
    np.testing.assert_array_equal(found[start + "mlp.up_proj.weight"], up)
    assert found["lm_head.weight"].shape == (13, 32)
    parameters = drawn(GPT)
    found = load_file(export_hf(tmp_path, GPT, parameters) / "model.safetensors")
    qkv = parameters["blocks.0.qkv.weight"]
    np.testing.assert_array_equal(found["transformer.h.0.attn.c_attn.weight"], qkv.T)
    assert found["transformer.wpe.weight"].shape == (9, 12)


def test_shards_of_an_index_are_read_where_they_are_needed(config, tmp_path, monkeypatch):
    parameters = drawn(config)
    tensors = load_file(export_hf(tmp_path, config, parameters) / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    parts = [dict(list(tensors.items())[i::2]) for i in range(2)]
    for file, part in zip(files, parts, strict=True):
        save_file(part, tmp_path / file)
    where = {name: f for f, part in zip(files, parts, strict=True) for name in part}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    opened = open_pretrained(tmp_path)
    assert_equal(opened.load(), parameters)
    read, tensor = [], hf._tensor

    def spy(path, name, at):
        read.append((path.name, name))
        return tensor(path, name, at)

    monkeypatch.setattr(hf, "_tensor", spy)
    names = ["blocks.0.qkv.weight", "blocks.0.ln1.weight"]
    some = opened.load(names[::-1] if config is GPT else names)
    assert_equal(some, {n: parameters[n] for n in parameters if n in names})
    assert len(read) == (4 if "Llama" in type(config).__name__ else 2)
    assert all(where[name] == file for file, name in read)


def test_bfloat16_is_widened(tmp_path):
    parameters = drawn(LLAMA, ml_dtypes.bfloat16)
    loaded = open_pretrained(export_hf(tmp_path, LLAMA, parameters)).load()
    assert_equal(loaded, {n: a.astype(np.float32) for n, a in parameters.items()})
    assert loaded["tok.weight"].dtype == np.float32


def test_an_inner_model_with_old_buffers_is_read(tmp_path):
    """As the published GPT-2: no prefix, masks stored beside the weights, a tied head or a copy."""
    config = MODELS["gpt-tied"]
    parameters = drawn(config)
    file = export_hf(tmp_path, config, parameters) / "model.safetensors"
    bare = {n.removeprefix("transformer."): a for n, a in load_file(file).items()}
    extra = {"h.0.attn.bias": np.ones((1, 1, 7, 7)), "lm_head.weight": bare["wte.weight"]}
    save_file({**bare, **extra}, file)
    change(tmp_path, tie_word_embeddings=None, n_inner=24)
    opened = open_pretrained(tmp_path)
    assert opened.config.tied
    assert_equal(opened.load(), parameters)


def test_a_second_export_replaces_the_first(tmp_path):
    export_hf(tmp_path, GPT, drawn(GPT))
    parameters = drawn(TIED)
    assert_equal(open_pretrained(export_hf(tmp_path, TIED, parameters)).load(), parameters)


@pytest.mark.parametrize(
    ("config", "facts", "says"),
    [
        (LLAMA, {"model_type": "mamba"}, "'mamba' is not known; gpt2 and llama are"),
        (LLAMA, {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported; 'silu' would do"),
        (LLAMA, {"attention_bias": True}, "attention_bias=True"),
        (LLAMA, {"head_dim": 16}, "head_dim=16 is not supported"),
        (LLAMA, {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type='linear'"),
        (LLAMA, {"rope_parameters": {"rope_type": "llama3"}}, "rope_type='llama3'"),
        (LLAMA, {"hidden_size": None}, "lacks hidden_size"),
        (LLAMA, {"num_attention_heads": 5}, "head_dim=6 is not supported"),
        (LLAMA, {"num_attention_heads": 0}, "config.json"),
        (LLAMA, {"hidden_size": "wide"}, "config.json"),
        (LLAMA, {"num_hidden_layers": 3}, "lacks model.layers.2.input_layernorm.weight, "),
        (LLAMA, {"num_hidden_layers": 1}, "and 6 more, which this Llama has no use for"),
        (LLAMA, {"vocab_size": 14}, r"embed_tokens.weight has shape \(13, 32\) instead of \(14, 3"),
        (GPT, {"activation_function": "relu"}, "activation_function='relu'"),
        (GPT, {"n_inner": 50}, "n_inner=50 is no multiple of n_embd=12"),
        (GPT, {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by"),
        (GPT, {"n_inner": 24}, r"c_fc.weight has shape \(12, 48\) instead of \(12, 24\)"),
    ],
)  # fmt: skip
def test_models_that_would_be_computed_wrongly_are_refused(config, facts, says, tmp_path):
    export_hf(tmp_path, config, drawn(config))
    change(tmp_path, **facts)
    with pytest.raises(CheckpointError, match=says):
        open_pretrained(tmp_path).load()


def test_a_bias_that_the_model_has_no_place_for_is_refused(tmp_path):
    file = export_hf(tmp_path, LLAMA, drawn(LLAMA)) / "model.safetensors"
    bias = {"model.layers.0.self_attn.q_proj.bias": np.ones(32, np.float32)}
    save_file({**load_file(file), **bias}, file)
    with pytest.raises(CheckpointError, match=r"q_proj.bias, which this Llama has no use for"):
        open_pretrained(tmp_path)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.7, 0.99, 0.9999])
def test_a_file_cut_short_is_refused_by_name(share, tmp_path):
    file = export_hf(tmp_path, LLAMA, drawn(LLAMA)) / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        open_pretrained(tmp_path)


def test_missing_and_wrong_files_are_refused_by_name(tmp_path):
    with pytest.raises(CheckpointError, match=r"neither a folder with config\.json nor a \.gguf"):
        open_pretrained(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read"):
        open_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="is no JSON"):
        open_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="no JSON object"):
        open_pretrained(tmp_path)
    file = export_hf(tmp_path, LLAMA, drawn(LLAMA)) / "model.safetensors"
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "../model.safetensors"}}))
    with pytest.raises(CheckpointError, match="names to files beside it"):
        open_pretrained(tmp_path)
    index.write_text(json.dumps({"weight_map": {"model.nothing": "model.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"lacks model\.nothing, which the index says"):
        open_pretrained(tmp_path)
    index.unlink()
    file.unlink()
    with pytest.raises(CheckpointError, match=r"model.safetensors cannot be read"):
        open_pretrained(tmp_path)


def test_wrong_calls_are_refused(tmp_path):
    parameters = drawn(LLAMA)
    opened = open_pretrained(export_hf(tmp_path, LLAMA, parameters))
    with pytest.raises(CheckpointError, match=r"no parameter pos\.weight"):
        opened.load(["pos.weight"])
    with pytest.raises(EmptyInput, match=r"lack ln\.weight"):
        export_hf(tmp_path, LLAMA, {n: a for n, a in parameters.items() if n != "ln.weight"})
    with pytest.raises(UnsupportedArray, match=r"tok\.weight of shape \(13, 32\)"):
        export_hf(tmp_path, LLAMA, {**parameters, "tok.weight": np.ones((2, 32))})
    grouped = dataclasses.replace(GPT, n_kv_heads=1)
    with pytest.raises(CheckpointError, match="n_kv_heads=1 cannot be written, n_kv_heads=3"):
        export_hf(tmp_path, grouped, drawn(grouped))
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="could not be written"):
        export_hf(tmp_path / "file", LLAMA, parameters)
    assert_equal(opened.load(), parameters)


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_a_rank_reads_its_part_of_a_folder(tmp_path, name):
    assert_parts(open_pretrained(export_hf(tmp_path / name, MODELS[name], drawn(MODELS[name]))))
