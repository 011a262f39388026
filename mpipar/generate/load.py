"""A model for generation: opened once, and each rank's share of it read where it belongs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpipar import checkpoint
from mpipar.comm import IdentityCommunicator
from mpipar.errors import CheckpointError
from mpipar.generate.decoder import Decoder
from mpipar.generate.tokenizer import TOKENIZER, Bytes, Tokenizer, open_tokenizer
from mpipar.mesh import Mesh
from mpipar.models import ModelConfig, build_model
from mpipar.models.stage import ModelStage
from mpipar.train.recipe import load_recipe
from mpipar.train.run_folder import RECIPE
from mpipar.units.remainder import spread_range

Array = NDArray[Any]


@dataclass(frozen=True)
class Source:
    """A model on disk.

    Parameters
    ----------
    path : Path
        Where.
    config : ModelConfig
        Its shape.
    tokenizer : Tokenizer
        Its own.
    """

    path: Path
    config: ModelConfig
    tokenizer: Tokenizer

    def read(
        self, names: Iterable[str], extents: Mapping[str, checkpoint.Extent]
    ) -> dict[str, Array]:
        """Read some parameters, or parts of them, as float32. Local.

        Parameters
        ----------
        names : iterable of str
            Which.
        extents : mapping of str to Extent
            Which parts of some of them.

        Returns
        -------
        dict of str to ndarray
            By name.
        """
        if not (self.path / RECIPE).is_file():
            return checkpoint.open_pretrained(self.path).load(names, np.float32, extents)
        place = checkpoint.newest(IdentityCommunicator(), self.path / "checkpoints")
        if place is None:
            raise CheckpointError(f"no complete checkpoint in {self.path}")
        found, _ = checkpoint.load(place, names, extents)
        return {name: array.astype(np.float32, copy=False) for name, array in found.items()}


def open_source(path: Path) -> Source:
    """Look at a run folder of `mpipar train`, a Hugging Face folder, or a GGUF file. Local.

    Parameters
    ----------
    path : Path
        Which.

    Returns
    -------
    Source
        Nothing large is read yet.

    Raises
    ------
    CheckpointError
        If it is none of them, or its tokenizer cannot be read.
    """
    if not path.exists():
        raise CheckpointError(f"{path} does not exist")
    if (path / RECIPE).is_file():
        recipe = load_recipe(path / RECIPE)
        if recipe.model.vocabulary < 256:
            raise CheckpointError(f"{path} was trained on tokens of its own: no tokenizer is known")
        return Source(path, recipe.model, Bytes())
    config = checkpoint.open_pretrained(path).config
    if config.vocabulary == 256 and path.is_dir() and not (path / TOKENIZER).is_file():
        return Source(path, config, Bytes())  # as `mpipar export` writes a model of bytes
    return Source(path, config, open_tokenizer(path))


class _AsStored(Mapping[str, Array]):
    """Parameters of which the layers' matrices stay as the file holds them.

    A quantised matrix is made float32 each time that it is used; nothing of it is kept.
    """

    def __init__(
        self,
        kept: Mapping[str, Array],
        stored: Iterable[str],
        make: Callable[[str], Array],
    ) -> None:
        self._kept, self._stored, self._make = dict(kept), frozenset(stored), make

    @property
    def n_bytes(self) -> int:
        """Bytes of the arrays that are kept."""
        return sum(array.nbytes for array in self._kept.values())

    def __getitem__(self, name: str) -> Array:
        return self._make(name) if name in self._stored else self._kept[name]

    def __iter__(self) -> Iterator[str]:
        return iter([*self._kept, *self._stored])

    def __len__(self) -> int:
        return len(self._kept) + len(self._stored)


def build_decoder(
    mesh: Mesh,
    source: Source,
    n_blocks: int,
    block_size: int = 16,
    as_stored: bool = False,
) -> Decoder:
    """This rank's layers and heads of a model, with an empty cache. Collective over the mesh.

    Parameters
    ----------
    mesh : Mesh
        Degrees tp and pp; replicas along dp are independent.
    source : Source
        The model.
    n_blocks, block_size : int
        Of the cache.
    as_stored : bool
        Leave the layers' matrices as a GGUF file holds them, and make each float32 when it is
        used: less memory, more time.

    Returns
    -------
    Decoder
        Holds the parameters of its own stage and shards only.

    Raises
    ------
    CheckpointError
        If the model cannot be read, or `as_stored` is asked of another kind of file.
    """
    if as_stored and not source.path.is_file():
        raise CheckpointError(f"{source.path} is no GGUF file: its weights can be float32 only")
    tp, pp = mesh.comm("tp"), mesh.comm("pp")
    model = build_model(source.config, tp)
    layers = range(*spread_range(source.config.n_layers, pp.size, pp.rank))
    stage = ModelStage(model, layers, pp.rank == 0, pp.rank == pp.size - 1)
    names = stage.names()
    held = {name: checkpoint.Extent.of(model.shards[name], tp.rank) for name in names}
    extents = {name: extent for name, extent in held.items() if extent is not None}

    def placed(found: Mapping[str, Array]) -> dict[str, Array]:
        """In arrays of this rank's shape: padding of a split vocabulary stays zero."""
        arrays = {}
        for name, part in found.items():
            whole = arrays[name] = np.zeros(model.shards[name].local_shape, np.float32)
            (whole if name not in extents else whole[extents[name].at()])[...] = part
        return arrays

    parameters: Mapping[str, Array]
    if as_stored:
        opened = checkpoint.open_pretrained(source.path)
        stored = [n for n in names if n.startswith("blocks.") and len(model.shards[n].shape) > 1]
        rest = placed(opened.load(set(names) - set(stored), np.float32, extents))

        def make(name: str) -> Array:
            return placed(opened.load([name], np.float32, extents))[name]

        parameters = _AsStored(rest, stored, make)
    else:
        parameters = placed(source.read(names, extents))
    return Decoder(model, parameters, n_blocks, block_size, pp if pp.size > 1 else None)
