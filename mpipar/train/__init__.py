"""The training job with its recipes and run folders."""

from typing import TYPE_CHECKING, Any

from mpipar.train.recipe import Recipe, dump_recipe, load_recipe

if TYPE_CHECKING:
    from mpipar.train.trainer import StepResult, Trainer

__all__ = ["Recipe", "StepResult", "Trainer", "dump_recipe", "load_recipe"]


def __getattr__(name: str) -> Any:
    if name in ("StepResult", "Trainer"):
        from mpipar.train import trainer

        return getattr(trainer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
