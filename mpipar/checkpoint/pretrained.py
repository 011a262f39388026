"""Models of other tools: their shape at once, their weights on demand."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from mpipar.checkpoint.extent import Extent
from mpipar.checkpoint.names import Names, Piece, part_of, pieces
from mpipar.errors import CheckpointError, UnsupportedArray
from mpipar.models import ModelConfig

Array = NDArray[Any]
Index = tuple[slice, ...]


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
        Reads one of them, or the part at an index.

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
        fetch: Callable[[str, Index | None], Array],
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
        self,
        names: Iterable[str] | None = None,
        dtype: DTypeLike = np.float32,
        extents: Mapping[str, Extent] | None = None,
    ) -> dict[str, Array]:
        """Read parameters, one tensor at a time; others are not touched. Local.

        Parameters
        ----------
        names : iterable of str, optional
            Which parameters, such as those of a stage; all by default.
        dtype : dtype
            To which they are converted.
        extents : mapping of str to Extent, optional
            Parts that are read instead of whole parameters, such as those of a tensor-parallel
            rank.

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
        parts = extents or {}
        return {n: self._read(n, dtype, parts.get(n)) for n in self._pieces if n in chosen}

    def _read(self, name: str, dtype: DTypeLike, extent: Extent | None) -> Array:
        run = self._pieces[name]
        shape = (run[-1].rows.stop, *run[0].shape[1:])
        if extent is not None and extent.shape != shape:
            raise CheckpointError(f"{self.path}: {name} has shape {shape}, not {extent.shape}")
        try:
            if extent is not None:
                return self._part(run, extent, np.empty(extent.local_shape, dtype))
            target = np.empty(shape, dtype)
            for piece in run:
                target[piece.rows] = piece.to_rows(self._fetch(piece.name, None))
        except UnsupportedArray as error:
            raise CheckpointError(f"{self.path}: {error}") from None
        return target

    def _part(self, run: Iterable[Piece], extent: Extent, target: Array) -> Array:
        """Fill a part from the pieces that it meets."""
        width = extent.shape[-1]
        for piece in run:
            rows, low = piece.rows, 0
            if extent.dim == 0:
                held = Extent(extent.shape, 0, ((rows.start, rows.stop),))
                for mine, theirs in extent.overlaps(held):
                    target[mine] = self._rows(piece, theirs, slice(0, width))
                continue
            for start, stop in extent.runs:
                place = slice(low, low := low + stop - start)
                all_rows = slice(0, rows.stop - rows.start)
                target[rows, place] = self._rows(piece, all_rows, slice(start, stop))
        return target

    def _rows(self, piece: Piece, rows: slice, columns: slice) -> Array:
        at = (rows, columns)[: len(piece.shape)]
        tensor = self._fetch(piece.name, at[::-1] if piece.is_transposed else at)
        return part_of(piece, rows, columns).to_rows(tensor)


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
