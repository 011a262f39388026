"""GGUF files of Llama and GPT-2, read and dequantised by the `gguf` package.

GGUF holds the query and key rows of a Llama in interleaved pairs; they are brought into halves as
they are read, so that everything in memory has one convention (`mpipar.nn.rotary`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpipar.checkpoint.names import names_for
from mpipar.checkpoint.pretrained import Index, Pretrained
from mpipar.errors import CheckpointError, ParallelismError
from mpipar.models import GPTConfig, LlamaConfig, ModelConfig

Array = NDArray[Any]


def open_gguf(path: Path) -> Pretrained:
    """Open a GGUF file; its tensors stay on disk until they are asked for. Local.

    Parameters
    ----------
    path : Path
        The file.

    Returns
    -------
    Pretrained
        The model; tied where the file has no ``output.weight``.

    Raises
    ------
    CheckpointError
        If the file is damaged, holds another kind of model, or `gguf` is not installed.
    """
    gguf = _package(path)
    try:
        reader = gguf.GGUFReader(path)
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        facts = {n: f.contents() for n, f in reader.fields.items() if "tokenizer" not in n}
    except (OSError, ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
        raise CheckpointError(f"{path} is damaged or no GGUF file: {error}") from None
    try:
        config = _config(facts, path, tensors)
    except KeyError as error:
        raise CheckpointError(f"{path} lacks {error.args[0]}") from None
    except (ParallelismError, TypeError, ZeroDivisionError) as error:
        raise CheckpointError(f"{path}: {error}") from None

    def fetch(name: str, at: Index | None) -> Array:
        tensor = tensors[name]
        rows, *columns = at or (slice(None),)
        try:  # rows are quantised each for itself
            found: Array = gguf.dequantize(tensor.data[rows], tensor.tensor_type)
            return found[:, columns[0]] if columns else found
        except (NotImplementedError, ValueError) as error:
            raise CheckpointError(
                f"{path}: {name} of type {tensor.tensor_type.name} cannot be read: {error}"
            ) from None

    return Pretrained(path, config, names_for(config, gguf=True), tensors, fetch)


def read_fields(path: Path, prefix: str) -> dict[str, Any]:
    """Metadata of a GGUF file, such as that of its tokenizer. Local.

    Parameters
    ----------
    path : Path
        The file.
    prefix : str
        Of the names that are wanted.

    Returns
    -------
    dict
        By name without the prefix.

    Raises
    ------
    CheckpointError
        If the file is damaged, or `gguf` is not installed.
    """
    gguf = _package(path)
    try:
        fields = gguf.GGUFReader(path).fields
        return {
            n.removeprefix(prefix): f.contents() for n, f in fields.items() if n.startswith(prefix)
        }
    except (OSError, ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
        raise CheckpointError(f"{path} is damaged or no GGUF file: {error}") from None


def _package(path: Path) -> Any:
    try:
        import gguf
    except ImportError:
        raise CheckpointError(
            f"{path}: reading GGUF needs the gguf package; pip install 'mpipar[gguf]'"
        ) from None
    return gguf


def _config(facts: Mapping[str, Any], path: Path, tensors: Mapping[str, Any]) -> ModelConfig:
    kind = facts["general.architecture"]
    if kind not in ("llama", "gpt2"):
        raise CheckpointError(f"{path}: architecture {kind!r} is not known; llama and gpt2 are")
    width, n_heads = facts[f"{kind}.embedding_length"], facts[f"{kind}.attention.head_count"]
    hidden = facts[f"{kind}.feed_forward_length"]
    shape: dict[str, Any] = {
        "n_layers": facts[f"{kind}.block_count"],
        "width": width,
        "n_heads": n_heads,
        "sequence": facts[f"{kind}.context_length"],
        "vocabulary": int(tensors["token_embd.weight"].shape[1]),
        "tied": "output.weight" not in tensors,
    }
    if kind == "gpt2":
        if hidden % width:
            raise CheckpointError(f"{path}: hidden width {hidden} is no multiple of {width}")
        eps = _shortest(facts["gpt2.attention.layer_norm_epsilon"])
        return GPTConfig(**shape, hidden_factor=hidden // width, eps=eps)
    head_width = width // n_heads
    for key in ("rope.dimension_count", "attention.key_length", "attention.value_length"):
        if facts.get(f"llama.{key}", head_width) != head_width:
            raise CheckpointError(
                f"{path}: llama.{key}={facts[f'llama.{key}']} is not supported; {head_width} "
                "would do"
            )
    scaling = facts.get("llama.rope.scaling.type", "none")
    if scaling != "none":
        raise CheckpointError(f"{path}: rope scaling {scaling!r} is not supported; none would do")
    return LlamaConfig(
        **shape,
        n_kv_heads=facts.get("llama.attention.head_count_kv", n_heads),
        hidden=hidden,
        eps=_shortest(facts["llama.attention.layer_norm_rms_epsilon"]),
        rope_base=_shortest(facts.get("llama.rope.freq_base", 10000.0)),
    )


def _shortest(value: float) -> float:
    """The number that was meant: GGUF keeps it as float32, so 1e-5 comes as 9.99999974e-06."""
    return float(str(np.float32(value)))
