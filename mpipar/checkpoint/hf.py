"""Hugging Face folders of GPT-2 and Llama: ``config.json`` and safetensors, read and written."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpipar.checkpoint.names import names_for, pieces
from mpipar.checkpoint.pretrained import Index, Pretrained
from mpipar.errors import CheckpointError, EmptyInput, ParallelismError
from mpipar.models import GPTConfig, LlamaConfig, ModelConfig, build_model
from mpipar.nn.checks import check_shape

Array = NDArray[Any]
Facts = Mapping[str, Any]
_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
# Buffers that old versions stored beside the weights: causal masks and rotary frequencies.
_BUFFERS = re.compile(r".*(\.attn\.(bias|masked_bias)|\.rotary_emb\.inv_freq)")
# What must hold for a model to be computed here as it was trained; a missing key holds.
_GPT2_MUST: dict[str, tuple[Any, ...]] = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
}
_LLAMA_MUST: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False,),
    "mlp_bias": (False,),
}


def open_hf(folder: Path) -> Pretrained:
    """Open a folder with ``config.json`` and one or several safetensors files. Local.

    Parameters
    ----------
    folder : Path
        The folder.

    Returns
    -------
    Pretrained
        The model. Dropout is 0, whatever the folder says; `dataclasses.replace` changes that.

    Raises
    ------
    CheckpointError
        If a file is missing or damaged, or the model is of another kind.
    """
    config = _config(_json(folder / "config.json"), folder / "config.json")
    files = _files(folder)
    names = names_for(config)
    inner = names.outside["tok"].partition(".")[0] + "."
    # The inner model alone is saved without its prefix.
    is_bare = not any(name.startswith(inner) for name in files)
    own = {_full(name, inner, is_bare): name for name in files if not _BUFFERS.fullmatch(name)}
    if config.tied:
        own.pop("lm_head.weight", None)

    def fetch(name: str, at: Index | None) -> Array:
        return _tensor(folder / files[own[name]], own[name], at)

    return Pretrained(folder, config, names, own.keys(), fetch)


def _full(name: str, inner: str, is_bare: bool) -> str:
    return inner + name if is_bare and not name.startswith("lm_head.") else name


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return found


def _files(folder: Path) -> dict[str, str]:
    """The file of every tensor."""
    if not (folder / _INDEX).is_file():
        return dict.fromkeys(_opened(folder / _WEIGHTS).keys(), _WEIGHTS)
    found = _json(folder / _INDEX).get("weight_map")
    if not isinstance(found, dict) or any(Path(str(f)).name != f for f in found.values()):
        raise CheckpointError(f"{folder / _INDEX} has no weight_map of names to files beside it")
    for file in sorted(set(found.values())):
        names = [name for name, f in found.items() if f == file]
        if lost := sorted(set(names) - set(_opened(folder / file).keys())):
            raise CheckpointError(f"{folder / file} lacks {lost[0]}, which the index says it has")
    return found


def _opened(path: Path) -> Any:
    import ml_dtypes  # noqa: F401  # without it NumPy does not know bfloat16
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, "numpy")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None


def _tensor(path: Path, name: str, at: Index | None) -> Array:
    from safetensors import SafetensorError

    try:
        with _opened(path) as file:
            found: Array = file.get_tensor(name) if at is None else file.get_slice(name)[at]
            return found
    except (OSError, SafetensorError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: {name} cannot be read: {error}") from None


def _config(facts: Facts, path: Path) -> ModelConfig:
    kind = facts.get("model_type")
    if kind not in ("gpt2", "llama"):
        raise CheckpointError(f"{path}: model_type {kind!r} is not known; gpt2 and llama are")
    for key, allowed in (_LLAMA_MUST if kind == "llama" else _GPT2_MUST).items():
        if key in facts and facts[key] not in allowed:
            raise CheckpointError(
                f"{path}: {key}={facts[key]!r} is not supported; {allowed[0]!r} would do"
            )
    try:
        return _llama(facts, path) if kind == "llama" else _gpt2(facts, path)
    except KeyError as error:
        raise CheckpointError(f"{path} lacks {error.args[0]}") from None
    except (ParallelismError, TypeError, ZeroDivisionError) as error:
        raise CheckpointError(f"{path}: {error}") from None


def _gpt2(facts: Facts, path: Path) -> GPTConfig:
    width = facts["n_embd"]
    hidden = facts.get("n_inner") or 4 * width
    if hidden % width:
        raise CheckpointError(f"{path}: n_inner={hidden} is no multiple of n_embd={width}")
    return GPTConfig(
        n_layers=facts["n_layer"],
        width=width,
        n_heads=facts["n_head"],
        sequence=facts["n_positions"],
        vocabulary=facts["vocab_size"],
        hidden_factor=hidden // width,
        eps=facts.get("layer_norm_epsilon", 1e-5),
        tied=facts.get("tie_word_embeddings", True),
    )


def _llama(facts: Facts, path: Path) -> LlamaConfig:
    width, n_heads = facts["hidden_size"], facts["num_attention_heads"]
    n_kv_heads = facts.get("num_key_value_heads") or n_heads
    head_width = facts.get("head_dim") or width // n_heads
    if head_width * n_heads != width:
        raise CheckpointError(
            f"{path}: head_dim={head_width} is not supported; hidden_size={width} over "
            f"num_attention_heads={n_heads} would do"
        )
    rope = {**(facts.get("rope_scaling") or {}), **(facts.get("rope_parameters") or {})}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise CheckpointError(f"{path}: rope_type={kind!r} is not supported; 'default' would do")
    return LlamaConfig(
        n_layers=facts["num_hidden_layers"],
        width=width,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        sequence=facts["max_position_embeddings"],
        vocabulary=facts["vocab_size"],
        hidden=facts["intermediate_size"],
        eps=facts.get("rms_norm_eps", 1e-6),
        rope_base=float(rope.get("rope_theta") or facts.get("rope_theta", 10000.0)),
        tied=facts.get("tie_word_embeddings", False),
    )


def export_hf(folder: str | Path, config: ModelConfig, parameters: Mapping[str, Array]) -> Path:
    """Write one safetensors file and ``config.json`` with Hugging Face names. Local.

    Parameters
    ----------
    folder : str or Path
        Made if it is not there; files of these names are replaced, each at once.
    config : ModelConfig
        A `GPTConfig` (GPT-2) or a `LlamaConfig`.
    parameters : mapping of str to ndarray
        All of the model, in the dtype in which they are written.

    Returns
    -------
    Path
        The folder.

    Raises
    ------
    CheckpointError
        If the kind of model that is named cannot hold this one, or writing fails.
    EmptyInput, UnsupportedArray
        If a parameter is missing or has another shape.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    for name, shape in build_model(config).shapes().items():
        if name not in parameters:
            raise EmptyInput("export_hf", f"parameters lack {name}")
        check_shape("export_hf", name, parameters[name], shape)
    facts = json.dumps(_facts(config, parameters["tok.weight"].dtype), indent=2) + "\n"
    tensors = {}
    for name, run in pieces(config, names_for(config)).items():
        for piece in run:
            rows = np.asarray(parameters[name])[piece.rows]
            tensors[piece.name] = np.asarray(rows.T if piece.is_transposed else rows, order="C")
    place = Path(folder)
    scratch = place / f".{_WEIGHTS}.partial"
    try:
        place.mkdir(parents=True, exist_ok=True)
        save_file(tensors, scratch, metadata={"format": "pt"})
        os.replace(scratch, place / _WEIGHTS)
        scratch.write_text(facts, encoding="utf-8")
        os.replace(scratch, place / "config.json")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{place} could not be written: {error}") from None
    return place


def _facts(config: ModelConfig, dtype: np.dtype[Any]) -> dict[str, Any]:
    """What ``config.json`` says."""
    common = {
        "vocab_size": config.vocabulary,
        "tie_word_embeddings": config.tied,
        "dtype": dtype.name,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if isinstance(config, LlamaConfig):
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": config.width,
            "intermediate_size": config.hidden,
            "num_hidden_layers": config.n_layers,
            "num_attention_heads": config.n_heads,
            "num_key_value_heads": config.kv_heads,
            "max_position_embeddings": config.sequence,
            "rms_norm_eps": config.eps,
            "rope_theta": config.rope_base,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            **common,
        }
    if not isinstance(config, GPTConfig) or config.kv_heads != config.n_heads:
        raise CheckpointError(
            f"GPT-2 has as many key and value heads as query heads; n_kv_heads={config.kv_heads} "
            f"cannot be written, n_kv_heads={config.n_heads} would do"
        )
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": config.width,
        "n_inner": config.hidden,
        "n_layer": config.n_layers,
        "n_head": config.n_heads,
        "n_positions": config.sequence,
        "layer_norm_epsilon": config.eps,
        "activation_function": "gelu_new",
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "attn_pdrop": 0.0,
        **common,
    }
