"""What a pipeline's executor asks of a stage, and of the pool that lends its buffers."""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]
Spec: TypeAlias = tuple[tuple[int, ...], str]
"""Shape and dtype name."""


class Stage(Protocol):
    """What the executor asks of a stage; data, targets and loss are the stage's own business.

    Arrays handed to a stage belong to it; an array that it returns belongs to the executor, which
    gives it back to the pool once it was sent.

    A stage with a true attribute `computes_into` takes one more argument of `forward`, `backward`
    and `backward_input`: where to leave the result, or nothing. Its `x` may already stand there.
    """

    def input_spec(self, microbatch: int) -> Spec | None:
        """Shape and dtype name of the activation that it takes; None for the first stage.

        Parameters
        ----------
        microbatch : int
            Which one.

        Returns
        -------
        Spec or None
            Agreed with the stage before.
        """

    def output_spec(self, microbatch: int) -> Spec | None:
        """Shape and dtype name of the activation that it gives; None for the last stage.

        Parameters
        ----------
        microbatch : int
            Which one.

        Returns
        -------
        Spec or None
            Agreed with the stage after.
        """

    def forward(self, microbatch: int, x: Array | None) -> Array | None:
        """The activation for the next stage (F); the last stage keeps its loss.

        Parameters
        ----------
        microbatch : int
            Which one.
        x : Array or None
            From the stage before; None for the first.

        Returns
        -------
        Array or None
            None from the last stage.
        """

    def backward(self, microbatch: int, grad: Array | None) -> Array | None:
        """Gradient of the stage's input, and those of the weights (B).

        Parameters
        ----------
        microbatch : int
            Which one.
        grad : Array or None
            Of its output; None for the last stage.

        Returns
        -------
        Array or None
            None from the first stage.
        """

    def backward_input(self, microbatch: int, grad: Array | None) -> Array | None:
        """Gradient of the stage's input (I).

        Parameters
        ----------
        microbatch : int
            Which one.
        grad : Array or None
            Of its output; None for the last stage.

        Returns
        -------
        Array or None
            None from the first stage.
        """

    def backward_weight(self, microbatch: int) -> None:
        """Gradients of the weights (W), after `backward_input` of the same microbatch.

        Parameters
        ----------
        microbatch : int
            Which one.
        """


class Pool(Protocol):
    """Where buffers come from and go back to, such as a model's workspace."""

    def take(self, like: Any, shape: tuple[int, ...]) -> Array:
        """An array of the dtype of `like`."""

    def give(self, *arrays: Any) -> None:
        """Take arrays back; those that came from elsewhere are left alone."""


class Fresh:
    """A pool that keeps nothing."""

    def take(self, like: Array, shape: tuple[int, ...]) -> Array:
        """A new array."""
        return np.empty(shape, like.dtype)

    def give(self, *arrays: Any) -> None:
        """Leave them to Python."""
