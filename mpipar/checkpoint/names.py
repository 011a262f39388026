"""Which tensors of a Hugging Face or GGUF file make up which parameter.

A parameter is a run of foreign tensors, row after row: gate and up of a Llama are two tensors
there and one weight here. Nothing is read or written in this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from mpipar.errors import UnsupportedArray
from mpipar.models import GPTConfig, LlamaConfig, ModelConfig, build_model


@dataclass(frozen=True)
class Names:
    """The names of one kind of file for one kind of model, without ``.weight`` and ``.bias``.

    Attributes
    ----------
    outside : mapping of str to str
        Embedding, last norm and head.
    block : str
        Start of the names of a block, ``{}`` its number.
    inside : mapping of str to tuple of str
        Tensors of each weight of a block, in row order.
    transposed : frozenset of str
        Weights that are stored ``(n_in, n_out)``.
    is_interleaved : bool
        Rows of queries and keys stand in pairs ``2 i, 2 i + 1`` instead of halves.
    """

    outside: Mapping[str, str]
    block: str
    inside: Mapping[str, tuple[str, ...]]
    transposed: frozenset[str] = field(default_factory=frozenset)
    is_interleaved: bool = False


HF_LLAMA = Names(
    {"tok": "model.embed_tokens", "ln": "model.norm", "head": "lm_head"},
    "model.layers.{}.",
    {
        "ln1": ("input_layernorm",),
        "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "proj": ("self_attn.o_proj",),
        "ln2": ("post_attention_layernorm",),
        "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
        "down": ("mlp.down_proj",),
    },
)
HF_GPT2 = Names(
    {"tok": "transformer.wte", "pos": "transformer.wpe", "ln": "transformer.ln_f",
     "head": "lm_head"},
    "transformer.h.{}.",
    {
        "ln1": ("ln_1",),
        "qkv": ("attn.c_attn",),
        "proj": ("attn.c_proj",),
        "ln2": ("ln_2",),
        "up": ("mlp.c_fc",),
        "down": ("mlp.c_proj",),
    },
    transposed=frozenset({"qkv", "proj", "up", "down"}),
)  # fmt: skip
GGUF_LLAMA = Names(
    {"tok": "token_embd", "ln": "output_norm", "head": "output"},
    "blk.{}.",
    {
        "ln1": ("attn_norm",),
        "qkv": ("attn_q", "attn_k", "attn_v"),
        "proj": ("attn_output",),
        "ln2": ("ffn_norm",),
        "gate_up": ("ffn_gate", "ffn_up"),
        "down": ("ffn_down",),
    },
    is_interleaved=True,
)
GGUF_GPT2 = Names(
    {"tok": "token_embd", "pos": "position_embd", "ln": "output_norm", "head": "output"},
    "blk.{}.",
    {
        "ln1": ("attn_norm",),
        "qkv": ("attn_qkv",),
        "proj": ("attn_output",),
        "ln2": ("ffn_norm",),
        "up": ("ffn_up",),
        "down": ("ffn_down",),
    },
)


@dataclass(frozen=True)
class Piece:
    """One foreign tensor and the rows of a parameter that it holds.

    Attributes
    ----------
    name : str
        Of the tensor.
    rows : slice
        Of the parameter.
    shape : tuple of int
        Of those rows, as the parameter has them.
    is_transposed : bool
        The tensor holds them transposed.
    n_heads : int
        Heads whose rows the tensor holds interleaved; 0 if it does not.
    """

    name: str
    rows: slice
    shape: tuple[int, ...]
    is_transposed: bool = False
    n_heads: int = 0

    def to_rows(self, tensor: NDArray[np.generic]) -> NDArray[np.generic]:
        """Bring the tensor into the form of the parameter, a view where that does.

        Parameters
        ----------
        tensor : ndarray
            As the file holds it.

        Returns
        -------
        ndarray
            Rows of the parameter.

        Raises
        ------
        UnsupportedArray
            If it has another shape.
        """
        rows = tensor.T if self.is_transposed else tensor
        if rows.shape != self.shape:
            stored = self.shape[::-1] if self.is_transposed else self.shape
            raise UnsupportedArray(f"{self.name} has shape {tensor.shape} instead of {stored}")
        return halves_from_pairs(rows, self.n_heads) if self.n_heads else rows


def part_of(piece: Piece, rows: slice, columns: slice) -> Piece:
    """Some rows, by whole heads where they are interleaved, and columns of a piece.

    Parameters
    ----------
    piece : Piece
        All of a tensor.
    rows, columns : slice
        With start and stop, counted in the piece; columns of vectors do not matter.

    Returns
    -------
    Piece
        The form of that part of the tensor.
    """
    n = rows.stop - rows.start
    shape = (n, columns.stop - columns.start)[: len(piece.shape)]
    return replace(piece, shape=shape, n_heads=piece.n_heads * n // max(1, piece.shape[0]))


def halves_from_pairs(rows: NDArray[np.generic], n_heads: int) -> NDArray[np.generic]:
    """Order the rows of each head by halves, as `mpipar.nn.rotary` wants them.

    Parameters
    ----------
    rows : ndarray
        Shape ``(n_heads * head_width, ...)``; rows ``2 i`` and ``2 i + 1`` of a head form a pair.
    n_heads : int
        Heads.

    Returns
    -------
    ndarray
        The same shape; rows ``i`` and ``i + head_width / 2`` form that pair.
    """
    pairs = rows.reshape(n_heads, -1, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def pieces(config: ModelConfig, names: Names) -> dict[str, tuple[Piece, ...]]:
    """The foreign tensors of every parameter.

    Parameters
    ----------
    config : ModelConfig
        Shape of the model.
    names : Names
        Of its file.

    Returns
    -------
    dict of str to tuple of Piece
        By the parameter's name, in forward order.
    """
    return {
        name: tuple(_pieces_of(config, names, name, shape))
        for name, shape in build_model(config).shapes().items()
    }


def _pieces_of(config: ModelConfig, names: Names, name: str, shape: tuple[int, ...]) -> list[Piece]:
    *block, part, kind = name.split(".")
    start = names.block.format(block[1]) if block else ""
    tensors = names.inside[part] if block else (names.outside[part],)
    q, kv = config.n_heads, config.kv_heads
    heads = (q, kv, 0) if part == "qkv" and names.is_interleaved else (0,) * len(tensors)
    is_transposed = part in names.transposed and kind == "weight"
    found, low = [], 0
    for tensor, size, n in zip(tensors, _sizes(config, part, shape, len(tensors)), heads,
                               strict=True):  # fmt: skip
        rows = slice(low, low + size)
        piece_shape = (size, *shape[1:])
        found.append(Piece(f"{start}{tensor}.{kind}", rows, piece_shape, is_transposed, n))
        low += size
    return found


def _sizes(config: ModelConfig, part: str, shape: tuple[int, ...], n: int) -> tuple[int, ...]:
    """Rows of each of the `n` tensors of a part."""
    if n == 3:
        heads = (config.n_heads, config.kv_heads, config.kv_heads)
        return tuple(h * config.head_width for h in heads)
    return (shape[0] // n,) * n


def names_for(config: ModelConfig, gguf: bool = False) -> Names:
    """The names that files of a model have.

    Parameters
    ----------
    config : ModelConfig
        A `GPTConfig` or a `LlamaConfig`.
    gguf : bool
        Of GGUF instead of Hugging Face.

    Returns
    -------
    Names
        One of the tables of this module.
    """
    if isinstance(config, LlamaConfig):
        return GGUF_LLAMA if gguf else HF_LLAMA
    if isinstance(config, GPTConfig):
        return GGUF_GPT2 if gguf else HF_GPT2
    raise UnsupportedArray(f"{type(config).__name__} is neither a GPTConfig nor a LlamaConfig")
