"""From text to tokens and back, as the model's own files say."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from mpipar.errors import CheckpointError

TOKENIZER = "tokenizer.json"
_CONTROL, _USER = 3, 4  # token types of GGUF that stand for themselves
_DIGITS_APART = ("smollm", "starcoder", "refact", "command-r")


class Tokenizer(Protocol):
    """What generation asks for."""

    stop: int | None

    def encode(self, text: str) -> list[int]:
        """Tokens of a text."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens."""


class Bytes:
    """A token is a byte, as in the models that `mpipar train` makes without other data."""

    stop: int | None = None

    def encode(self, text: str) -> list[int]:
        """UTF-8.

        Parameters
        ----------
        text : str
            Any.

        Returns
        -------
        list of int
            From 0 to 255.
        """
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        """From UTF-8.

        Parameters
        ----------
        tokens : sequence of int
            From 0 to 255.

        Returns
        -------
        str
            With replacement characters where bytes are no text.
        """
        return bytes(tokens).decode(errors="replace")


class Learned:
    """A tokenizer of the ``tokenizers`` package.

    Parameters
    ----------
    inner : tokenizers.Tokenizer
        What does it.
    stop : int or None
        The token that ends a text.
    """

    def __init__(self, inner: Any, stop: int | None) -> None:
        self._inner, self.stop = inner, stop

    def encode(self, text: str) -> list[int]:
        """Tokens of a text.

        Parameters
        ----------
        text : str
            Any.

        Returns
        -------
        list of int
            Without tokens around it, unless the file says so.
        """
        found: list[int] = self._inner.encode(text).ids
        return found

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens.

        Parameters
        ----------
        tokens : sequence of int
            Of this vocabulary.

        Returns
        -------
        str
            Without control tokens.
        """
        text: str = self._inner.decode(list(tokens))
        return text


def open_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a model: ``tokenizer.json`` in or beside it, else what a GGUF file holds.

    Parameters
    ----------
    path : Path
        Folder or GGUF file.

    Returns
    -------
    Tokenizer
        Ready.

    Raises
    ------
    CheckpointError
        If there is none, it cannot be read, or the package for it is missing.
    """
    folder = path if path.is_dir() else path.parent
    if (folder / TOKENIZER).is_file():
        return _from_file(folder)
    if path.is_file():
        return _from_gguf(path)
    raise CheckpointError(f"{path} has no tokenizer: {folder / TOKENIZER} is missing")


def _package() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise CheckpointError(
            "reading a tokenizer needs the tokenizers package; pip install 'mpipar[generate]'"
        ) from None
    return tokenizers


def _from_file(folder: Path) -> Learned:
    tokenizers = _package()
    try:
        inner = tokenizers.Tokenizer.from_file(str(folder / TOKENIZER))
    except Exception as error:  # the package has no narrower class
        raise CheckpointError(f"{folder / TOKENIZER} cannot be read: {error}") from None
    return Learned(inner, _stop_of(folder))


def _stop_of(folder: Path) -> int | None:
    for name in ("generation_config.json", "config.json"):
        try:
            found = json.loads((folder / name).read_text(encoding="utf-8")).get("eos_token_id")
        except (OSError, ValueError, AttributeError):
            continue
        first = found[0] if isinstance(found, list) and found else found
        if isinstance(first, int):
            return first
    return None


def _from_gguf(path: Path) -> Learned:
    from mpipar.checkpoint.gguf_file import read_fields

    tokenizers = _package()
    facts = read_fields(path, "tokenizer.ggml.")
    kind = facts.get("model")
    if kind != "gpt2":
        raise CheckpointError(
            f"{path}: its tokenizer is of kind {kind!r}; 'gpt2' (byte-level BPE) is read from "
            f"GGUF, others from a {TOKENIZER} beside the file"
        )
    words = facts["tokens"]
    vocabulary = {word: number for number, word in enumerate(words)}
    merges = [tuple(merge.split(" ", 1)) for merge in facts["merges"]]
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
    level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    if facts.get("pre") in _DIGITS_APART:
        digits = tokenizers.pre_tokenizers.Digits(individual_digits=True)
        level = tokenizers.pre_tokenizers.Sequence([digits, level])
    inner.pre_tokenizer = level
    inner.decoder = tokenizers.decoders.ByteLevel()
    types = facts.get("token_type", [])
    special = [w for w, t in zip(words, types, strict=False) if t in (_CONTROL, _USER)]
    inner.add_special_tokens([tokenizers.AddedToken(word, special=True) for word in special])
    return Learned(inner, facts.get("eos_token_id"))
