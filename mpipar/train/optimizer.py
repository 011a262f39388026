"""AdamW over named parameters, with warm-up and cosine."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpipar.nn.optim import adamw_update
from mpipar.train.recipe import TrainRecipe

Array = NDArray[Any]


def learning_rate(recipe: TrainRecipe, step: int) -> float:
    """Learning rate of a step: linear warm-up, then half a cosine (Loshchilov and Hutter 2017).

    Parameters
    ----------
    recipe : TrainRecipe
        Peak, end, warm-up and number of steps.
    step : int
        From 1 to ``recipe.steps``.

    Returns
    -------
    float
        The peak at the end of the warm-up, `final_learning_rate` at the last step.
    """
    peak, final = recipe.learning_rate, recipe.final_learning_rate
    warmup = min(recipe.warmup_steps, recipe.steps)
    if step <= warmup:
        return peak * step / warmup
    done = (step - warmup) / max(1, recipe.steps - warmup)
    return final + (peak - final) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


class AdamW:
    """Decoupled AdamW state for the trainable parameters.

    Parameters
    ----------
    parameters : mapping of str to ndarray
        Updated in place.
    names : iterable of str
        The ones to update, each logical parameter once.
    recipe : TrainRecipe
        Its constants.
    """

    def __init__(
        self, parameters: Mapping[str, Array], names: Iterable[str], recipe: TrainRecipe
    ) -> None:
        self.parameters = {name: parameters[name] for name in names}
        self.recipe = recipe
        self.m = {n: _state(p) for n, p in self.parameters.items()}
        self.v = {n: _state(p) for n, p in self.parameters.items()}

    def step(self, gradients: Mapping[str, Array], step: int, gradient_scale: float = 1.0) -> float:
        """Update every parameter. Local.

        Parameters
        ----------
        gradients : mapping of str to ndarray
            Equal on all replicas.
        step : int
            From 1.
        gradient_scale : float
            Multiplies every gradient, such as the factor of clipping.

        Returns
        -------
        float
            The learning rate that was used.
        """
        r = self.recipe
        rate = learning_rate(r, step)
        for name, parameter in self.parameters.items():
            decay = r.weight_decay if parameter.ndim > 1 else 0.0
            adamw_update(
                parameter, gradients[name], self.m[name], self.v[name], step, rate,
                r.beta1, r.beta2, r.eps, decay, gradient_scale,
            )  # fmt: skip
        return rate

    def state(self) -> dict[str, Array]:
        """Moments by name, for a checkpoint.

        Returns
        -------
        dict of str to ndarray
            ``adam.m.NAME`` and ``adam.v.NAME``.
        """
        pairs = (("m", self.m), ("v", self.v))
        return {f"adam.{k}.{n}": a for k, arrays in pairs for n, a in arrays.items()}


def _state(parameter: Array) -> Array:
    """Zeros of at least float32, wider where the parameter is."""
    dtype = np.result_type(parameter.dtype, np.float32)
    return np.zeros_like(parameter, dtype=dtype, order="C")
