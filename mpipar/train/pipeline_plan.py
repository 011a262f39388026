"""What a recipe says about its pipeline: which schedule, and which layers on which stage."""

from __future__ import annotations

from itertools import accumulate, pairwise
from pathlib import Path

from mpipar.errors import ParallelismError, RecipeError
from mpipar.models import build_model
from mpipar.pipeline_parallel import (
    Schedule,
    StageAssignment,
    build_schedule,
    read_schedule,
    split_backward,
    validate,
)
from mpipar.pipeline_parallel.generate import SCHEDULE_NAMES
from mpipar.train.recipe import Recipe


def choose_schedule(recipe: Recipe, n_ranks: int) -> Schedule:
    """The schedule of ``train.schedule``: one of the names, or a file.

    Parameters
    ----------
    recipe : Recipe
        Gives name or file, and the number of microbatches.
    n_ranks : int
        The degree pp.

    Returns
    -------
    Schedule
        Valid. A file's is taken as it is; in a named one each backward whose gradient leaves the
        rank is cut in two, so that the gradient is sent before the weights' are computed.

    Raises
    ------
    ScheduleError
        If it cannot be read, is not defined at these sizes, or cannot run.
    RecipeError
        If a file is for other sizes.
    """
    name, n_microbatches = recipe.train.schedule, recipe.train.microbatches
    if not _is_file(name):
        return split_backward(build_schedule(name, n_ranks, n_microbatches))
    schedule = validate(read_schedule(name))
    if (schedule.n_ranks, schedule.n_microbatches) != (n_ranks, n_microbatches):
        raise RecipeError(
            f"schedule {name} is for {schedule.n_ranks} ranks and {schedule.n_microbatches} "
            f"microbatches; mesh.pp={n_ranks}, train.microbatches={n_microbatches}"
        )
    return schedule


def check_name(recipe: Recipe) -> None:
    """Refuse a schedule that is neither a name nor a file, where no pipeline will look at it.

    Parameters
    ----------
    recipe : Recipe
        Gives name or file.

    Raises
    ------
    ScheduleError
        Says the names.
    """
    if _is_file(recipe.train.schedule):
        read_schedule(recipe.train.schedule)
    else:
        build_schedule(recipe.train.schedule, 2, 4)


def _is_file(name: str) -> bool:
    if name.lower().replace("_", "-") in SCHEDULE_NAMES:
        return False
    return bool({".", "/"} & set(name)) or Path(name).is_file()


def stage_layers(recipe: Recipe, n_stages: int) -> list[range]:
    """The layers of each stage, as ``train.stages`` says.

    Parameters
    ----------
    recipe : Recipe
        "uniform" spreads the layers, the first stages take one more; "balanced" cuts them so that
        the slowest stage, with the head counted, is fastest; "2,3,0" gives numbers, 0 allowed.
    n_stages : int
        Stages of the schedule.

    Returns
    -------
    list of range
        One per stage.

    Raises
    ------
    RecipeError
        If the layers do not fill the stages, or the numbers do not fit.
    """
    how, n_layers = recipe.train.stages, recipe.model.n_layers
    try:
        if how == "uniform":
            sizes = StageAssignment.uniform(n_layers, n_stages).layers_per_stage()
        elif how == "balanced":
            block, head = _weights(recipe)
            cut = StageAssignment.optimal([block] * n_layers, n_stages, head=head)
            sizes = cut.layers_per_stage()
        else:
            sizes = tuple(int(part) for part in how.split(","))
    except ValueError as error:
        if isinstance(error, ParallelismError):
            raise RecipeError(
                f"model.n_layers={n_layers} cannot fill {n_stages} stages; n_layers={n_stages} "
                "would do, or numbers such as train.stages='1,0,...' that leave stages empty"
            ) from None
        raise RecipeError(
            f"train.stages={how!r}: write uniform, balanced, or the layers of each stage as in 2,1"
        ) from None
    if len(sizes) != n_stages or sum(sizes) != n_layers or min(sizes) < 0:
        raise RecipeError(
            f"train.stages={how!r} must give {n_stages} numbers whose sum is "
            f"model.n_layers={n_layers}"
        )
    return [range(low, high) for low, high in pairwise(accumulate(sizes, initial=0))]


def _weights(recipe: Recipe) -> tuple[int, int]:
    """Multiplications per token of a block and of the head."""
    c = recipe.model
    n_weights = sum(
        shape[0] * shape[1]
        for shape in build_model(c).blocks[0].shapes().values()
        if len(shape) == 2
    )
    return n_weights + c.width * c.sequence, c.vocabulary * c.width
