"""Reads arrays, or parts of them, out of the files of one checkpoint."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpipar.checkpoint.extent import Extent
from mpipar.errors import CheckpointError

Array = NDArray[Any]
Held = tuple[Path, Extent | None]
"""A file, and which part of an array it holds; None for the whole."""


class Reader:
    """Opens each file once; of a part no more is read than the slices that it needs.

    Parameters
    ----------
    place : Path
        Folder of the checkpoint, named in messages.
    stack : ExitStack
        Closes the files.
    """

    def __init__(self, place: Path, stack: ExitStack) -> None:
        self._place, self._stack = place, stack
        self._opened: dict[Path, Any] = {}

    def read(self, name: str, held: list[Held], wanted: Extent | None = None) -> Array:
        """Read an array, from a whole copy where there is one.

        Parameters
        ----------
        name : str
            Of the array.
        held : list of Held
            Who has it.
        wanted : Extent, optional
            The part to read; all by default.

        Returns
        -------
        ndarray
            The whole, or of the part's local shape.

        Raises
        ------
        CheckpointError
            If a part is missing, the shape is another, or a file cannot be read.
        """
        from safetensors import SafetensorError

        file, part = min(held, key=lambda pair: pair[1] is not None)
        try:
            if part is None and wanted is None:
                return self._open(file).get_tensor(name)  # type: ignore[no-any-return]
            if part is None:
                part = self._whole(file, name, wanted)
                return self._joined(name, [(file, part)], wanted or part)
            parts = [(f, p or self._whole(f, name, part)) for f, p in held]
            return self._joined(name, parts, wanted or Extent.whole(part.shape, part.dim))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from None

    def _whole(self, file: Path, name: str, wanted: Extent | None) -> Extent:
        shape = tuple(self._open(file).get_slice(name).get_shape())
        dim = wanted.dim if wanted is not None else 0
        if wanted is not None and shape != wanted.shape:
            raise self._misfit(name, shape, wanted)
        return Extent.whole(shape, dim)

    def _joined(self, name: str, held: list[tuple[Path, Extent]], wanted: Extent) -> Array:
        target: Array | None = None
        is_there = np.zeros(wanted.local_shape[wanted.dim], bool)
        for file, part in held:
            if (part.shape, part.dim) != (wanted.shape, wanted.dim):
                raise self._misfit(name, part.shape, wanted)
            data = self._open(file).get_slice(name)
            if target is None:  # an empty slice tells the dtype
                target = np.empty(wanted.local_shape, data[wanted.at(slice(0, 0))].dtype)
            for mine, theirs in wanted.overlaps(part):
                if not is_there[mine].all():
                    target[wanted.at(mine)] = data[wanted.at(theirs)]
                    is_there[mine] = True
        if target is None or not is_there.all():
            raise CheckpointError(f"{self._place} lacks a part of {name}")
        return target

    def _misfit(self, name: str, shape: tuple[int, ...], wanted: Extent) -> CheckpointError:
        return CheckpointError(
            f"{self._place}: {name} is of shape {shape}, the model needs {wanted.shape} split "
            f"along dim {wanted.dim}"
        )

    def _open(self, file: Path) -> Any:
        from safetensors import safe_open

        if file not in self._opened:
            self._opened[file] = self._stack.enter_context(safe_open(file, "numpy"))
        return self._opened[file]
