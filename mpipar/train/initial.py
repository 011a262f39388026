"""The weights that a run starts from."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from mpipar.checkpoint import Extent, open_pretrained
from mpipar.comm import Communicator
from mpipar.comm.device.arrays import write
from mpipar.errors import ParallelismError, RecipeError
from mpipar.models import Model, ModelConfig
from mpipar.train.recipe import Recipe

Array = NDArray[Any]
# These change no weight: how the model is trained, and how many of its positions are used.
_FREE = {"dropout", "sequence", "ignore_index", "label_smoothing"}


def take_weights(
    comm: Communicator, recipe: Recipe, parameters: Mapping[str, Array], model: Model
) -> None:
    """Read the weights of ``train.init`` into this rank's parameters; no others are read.

    Collective: an error of one rank is raised on all.

    Parameters
    ----------
    comm : Communicator
        All ranks; they see one file system.
    recipe : Recipe
        Its model must be that of the file; it may use fewer positions.
    parameters : mapping of str to ndarray
        Written in place.
    model : Model
        Says which part of each this rank holds.

    Raises
    ------
    CheckpointError
        If the file cannot be read.
    RecipeError
        If it holds another model.
    """
    problem: ParallelismError | None = None
    try:
        opened = open_pretrained(recipe.train.init)
        _check(recipe, opened.config)
        for name, target in parameters.items():
            extent = Extent.of(model.shards[name], model.tp.rank)
            found = opened.load([name], target.dtype, {name: extent} if extent else None)[name]
            if extent is None:
                write(found[: target.shape[0]] if name == "pos.weight" else found, target)
            else:
                target[...] = 0  # padding
                write(found, target[extent.at()])
    except ParallelismError as error:
        problem = error
    comm.all_gather_json(problem)


def _check(recipe: Recipe, found: ModelConfig) -> None:
    mine, its = (dataclasses.asdict(c) | {"n_kv_heads": c.kv_heads} for c in (recipe.model, found))
    for key in sorted((mine.keys() | its.keys()) - _FREE):
        if mine.get(key) != its.get(key):
            raise RecipeError(
                f"model.{key}={mine.get(key)}, but train.init {recipe.train.init} has "
                f"{key}={its.get(key)}"
            )
    if recipe.model.learns_positions and recipe.model.sequence > found.sequence:
        raise RecipeError(
            f"model.sequence={recipe.model.sequence}, but train.init {recipe.train.init} has "
            f"learned {found.sequence} positions; {found.sequence} or fewer would do"
        )
