"""Text as bytes or tokens: reading it, its bigram entropy, a sampler whose position is exact."""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpipar.comm import Communicator
from mpipar.errors import EmptyInput, RecipeError, UnevenSplit

Tokens = NDArray[np.uint8] | NDArray[np.int32]
"""Bytes of a text, or tokens of another vocabulary."""
_BLOCK = 1 << 14
_CHUNK = 1 << 18
_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "__pycache__", "idle_test"}


def standard_library() -> list[Path]:
    """The sources of this Python's standard library, without its tests.

    Returns
    -------
    list of Path
        Sorted.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = (p for p in root.rglob("*.py") if not _SKIPPED & set(p.relative_to(root).parts))
    return sorted(files)


def read_text(path: str) -> Tokens:
    """All bytes of a file, of a folder's files (sorted, none hidden), or the standard library.

    Parameters
    ----------
    path : str
        File or folder; empty for the standard library. A ``.npy`` file holds tokens.

    Returns
    -------
    ndarray of uint8 or int32
        The bytes, or the tokens.

    Raises
    ------
    RecipeError
        If there is no such file or folder, or it cannot be read.
    EmptyInput
        If there is nothing in it.
    """
    place = Path(path)
    if not path:
        files = standard_library()
    elif place.is_dir():
        files = sorted(p for p in place.rglob("*") if p.is_file() and not _is_hidden(p, place))
    elif place.is_file() and place.suffix == ".npy":
        return _read_tokens(place)
    elif place.is_file():
        files = [place]
    else:
        raise RecipeError(f"data.path {path!r} is neither a file nor a folder")
    try:
        data = b"".join(p.read_bytes() for p in files)
    except OSError as error:
        raise RecipeError(f"data.path: {error.filename} cannot be read: {error.strerror}") from None
    if not data:
        raise EmptyInput("read_text", f"no bytes in {path or 'the standard library'!r}")
    return np.frombuffer(data, np.uint8)


def _read_tokens(path: Path) -> NDArray[np.int32]:
    try:
        tokens = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise RecipeError(f"data.path: {path} cannot be read as an array: {error}") from None
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise RecipeError(
            f"data.path: {path} holds {tokens.dtype} of shape {tokens.shape}; tokens are whole "
            "numbers in one dim"
        )
    if not tokens.size:
        raise EmptyInput("read_text", f"no tokens in {path}")
    if not 0 <= int(tokens.min()) <= int(tokens.max()) < 2**31:
        raise RecipeError(f"data.path: {path} holds tokens below 0 or above {2**31 - 1}")
    return tokens.astype(np.int32)  # type: ignore[no-any-return]


def _is_hidden(path: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(folder).parts)


def share_text(comm: Communicator, path: str) -> Tokens:
    """The text that rank 0 reads, on every rank. Collective.

    Parameters
    ----------
    comm : Communicator
        All ranks.
    path : str
        As in `read_text`; read by rank 0 only.

    Returns
    -------
    ndarray of uint8 or int32
        Equal on every rank; an error of rank 0 is raised on all.
    """
    texts: list[Tokens] = []

    def read() -> list[Any]:
        texts.append(read_text(path))
        return [texts[0].size, texts[0].dtype.name]

    size, dtype = comm.made_by_root(read)
    text = texts[0] if texts else np.empty(size, dtype)
    return comm.broadcast(text)  # type: ignore[no-any-return]


def bigram_entropy(text: Tokens) -> float:
    """Conditional entropy of a byte or token given the one before it, in nats.

    Parameters
    ----------
    text : ndarray of uint8 or int32
        At least two bytes or tokens.

    Returns
    -------
    float
        ``H(X_t | X_t-1)`` of the empirical bigram distribution: what the best predictor reaches
        that sees one byte or token of context and is tuned on this very text.
    """
    if text.size < 2:
        raise EmptyInput("bigram_entropy", f"{text.size} bytes have no bigram")
    if text.dtype != np.uint8:
        return _sparse_bigram_entropy(text)
    flat = np.zeros(65536, np.int64)
    for start in range(0, text.size - 1, _CHUNK):
        part = text[start : start + _CHUNK + 1].astype(np.int64)
        flat += np.bincount(part[:-1] * 256 + part[1:], minlength=65536)
    counts = flat.reshape(256, 256)
    first = counts.sum(axis=1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.where(counts > 0, np.log(counts / first), 0.0)
    return float(-(counts * logs).sum() / counts.sum())


def _sparse_bigram_entropy(text: Tokens) -> float:
    """The same by sorting, for vocabularies whose table of pairs would be too large."""
    n_tokens = int(text.max()) + 1
    pairs, counts = np.unique(text[:-1].astype(np.int64) * n_tokens + text[1:], return_counts=True)
    first = np.bincount(text[:-1])[pairs // n_tokens]
    return float(-(counts * np.log(counts / first)).sum() / counts.sum())


@dataclass(frozen=True)
class Corpus:
    """A text cut into a part to train on and a part that is held out.

    Parameters
    ----------
    train, held_out : ndarray of uint8 or int32
        Blocks of 16384 go to one or the other, spread evenly over the text.
    digest : str
        Hash of the whole text.
    bigram_entropy : float
        Of the whole text, in nats.
    """

    train: Tokens
    held_out: Tokens
    digest: str
    bigram_entropy: float

    @classmethod
    def cut(cls, text: Tokens, held_out: float) -> Corpus:
        """Cut a text.

        Parameters
        ----------
        text : ndarray of uint8 or int32
            The whole.
        held_out : float
            Share that is held out, above 0 and below 1.

        Returns
        -------
        Corpus
            Every k-th block held out; a short text is cut once, near its end.
        """
        digest = hashlib.blake2b(text.tobytes(), digest_size=16).hexdigest()
        every = max(2, round(1 / held_out))
        n_blocks = -(-text.size // _BLOCK)
        if n_blocks < every:
            stop = min(text.size - 1, max(1, round(text.size * (1 - held_out))))
            return cls(text[:stop], text[stop:], digest, bigram_entropy(text))
        blocks = [text[i * _BLOCK : (i + 1) * _BLOCK] for i in range(n_blocks)]
        kept = np.concatenate([b for i, b in enumerate(blocks) if i % every != every - 1])
        held = np.concatenate([b for i, b in enumerate(blocks) if i % every == every - 1])
        return cls(kept, held, digest, bigram_entropy(text))


class Sampler:
    """Rows of a text in an order that depends on the seed and the position alone.

    Every epoch visits each row once, in a fresh order; the n-th row of the run is the same
    whatever the number of ranks, so a run goes on exactly at any position and degree.

    Parameters
    ----------
    text : ndarray of uint8 or int32
        To train on.
    sequence : int
        Tokens of a row; its targets are those one further.
    seed : int
        Of the order.
    """

    def __init__(self, text: Tokens, sequence: int, seed: int) -> None:
        self.n_rows = (text.size - 1) // sequence
        if self.n_rows < 1:
            raise UnevenSplit(
                "text / sequence",
                f"{text.size} bytes hold no row of {sequence} tokens and a target; "
                f"sequence={max(1, text.size - 1)} at most",
            )
        self._text = text
        self._sequence = sequence
        self._seed = seed
        self._orders: dict[int, NDArray[np.int64]] = {}

    def rows(self, start: int, stop: int) -> NDArray[np.int64]:
        """Tokens and targets of rows `start` to `stop` of the run.

        Parameters
        ----------
        start, stop : int
            Positions, counted from the start of the run over all epochs and ranks.

        Returns
        -------
        ndarray of int64
            Shape (stop - start, sequence + 1): a row without its last is tokens, without its
            first is targets.
        """
        picked = np.array([self._row(position) for position in range(start, stop)], np.int64)
        places = picked[:, None] * self._sequence + np.arange(self._sequence + 1)
        rows: NDArray[np.int64] = self._text[places].astype(np.int64)
        return rows

    def _row(self, position: int) -> int:
        epoch, index = divmod(position, self.n_rows)
        if epoch not in self._orders:
            rng = np.random.default_rng([self._seed, epoch])
            self._orders = {epoch: rng.permutation(self.n_rows)}
        return int(self._orders[epoch][index])
