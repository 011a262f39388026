"""Models of other tools: their shape at once, their weights on demand."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from mpipar.checkpoint.names import Names, pieces
from mpipar.errors import CheckpointError, UnsupportedArray
from mpipar.models import ModelConfig

Array = NDArray[Any]


class Pretrained:
    """A model in a file of another tool, opened but not read. Local.

    Parameters
    ----------
    path : Path
        Named in messages.
    config : ModelConfig
        Its shape.
    names : Names
        Of its tensors.
    held : collection of str
        Tensors that are there, without those that mean nothing.
    fetch : callable
        Reads one of them.

    Attributes
    ----------
    path, config
        As given.

    Raises
    ------
    CheckpointError
        If a tensor is missing, or one is there that the model does not have.
    """

    def __init__(
        self,
        path: Path,
        config: ModelConfig,
        names: Names,
        held: Collection[str],
        fetch: Callable[[str], Array],
    ) -> None:
        self.path = path
        self.config = config
        self._pieces = pieces(config, names)
        self._fetch = fetch
        known = {piece.name for run in self._pieces.values() for piece in run}
        kind = type(config).__name__.removesuffix("Config")
        if missing := sorted(known - set(held)):
            raise CheckpointError(f"{path} lacks {_some(missing)}, which this {kind} needs")
        if unknown := sorted(set(held) - known):
            raise CheckpointError(
                f"{path} holds {_some(unknown)}, which this {kind} has no use for"
            )

    def load(
        self, names: Iterable[str] | None = None, dtype: DTypeLike = np.float32
    ) -> dict[str, Array]:
        """Read parameters, one tensor at a time; others are not touched. Local.

        Parameters
        ----------
        names : iterable of str, optional
            Which parameters, such as those of a stage; all by default.
        dtype : dtype
            To which they are converted.

        Returns
        -------
        dict of str to ndarray
            By the model's names, in forward order.

        Raises
        ------
        CheckpointError
            If the model has no such parameter, or the file is cut short or holds another shape.
        """
        wanted = list(self._pieces) if names is None else list(names)
        if strange := [name for name in wanted if name not in self._pieces]:
            raise CheckpointError(f"{self.path}: its model has no parameter {_some(strange)}")
        chosen = set(wanted)
        return {n: self._read(n, dtype) for n in self._pieces if n in chosen}

    def _read(self, name: str, dtype: DTypeLike) -> Array:
        run = self._pieces[name]
        shape = (run[-1].rows.stop, *run[0].shape[1:])
        target = np.empty(shape, dtype)
        for piece in run:
            try:
                target[piece.rows] = piece.to_rows(self._fetch(piece.name))
            except UnsupportedArray as error:
                raise CheckpointError(f"{self.path}: {error}") from None
        return target


def _some(names: list[str]) -> str:
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + rest


def open_pretrained(path: str | Path) -> Pretrained:
    """Open a Hugging Face folder (GPT-2, Llama; safetensors) or a GGUF file. Local.

    Parameters
    ----------
    path : str or Path
        A folder with ``config.json``, or a ``.gguf`` file.

    Returns
    -------
    Pretrained
        Its shape as ``config``; weights are read by ``load``.

    Raises
    ------
    CheckpointError
        If it is neither, is damaged, or holds a model that would not be computed as it was trained.
    """
    from mpipar.checkpoint.gguf_file import open_gguf
    from mpipar.checkpoint.hf import open_hf

    place = Path(path)
    if place.is_dir():
        return open_hf(place)
    if place.is_file() and place.suffix == ".gguf":
        return open_gguf(place)
    raise CheckpointError(f"{place} is neither a folder with config.json nor a .gguf file")
