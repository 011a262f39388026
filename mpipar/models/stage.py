"""A run of a GPT's layers as a pipeline stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpipar.errors import CountOutOfRange
from mpipar.models.gpt import GPT
from mpipar.models.parts import Gradients, Parameters, Saved
from mpipar.nn.array import Array

Rows = np.ndarray[Any, np.dtype[np.int64]]


class GPTStage:
    """Layers ``start`` to ``stop`` of a GPT, with the embedding before the first and the head last.

    Parameters
    ----------
    model : GPT
        Owns the layers and the activation buffers.
    layers : range
        Its blocks; may be empty.
    is_first, is_last : bool
        Whether it embeds the tokens, and whether it computes the loss.
    """

    def __init__(self, model: GPT, layers: range, is_first: bool, is_last: bool) -> None:
        if not 0 <= layers.start <= layers.stop <= model.config.n_layers:
            raise CountOutOfRange("layers of a stage", f"0..{model.config.n_layers}", layers.stop)
        self.model = model
        self.is_first = is_first
        self.is_last = is_last
        self.blocks = [model.blocks[i] for i in layers]
        self.loss = 0.0
        self.peak_in_flight = 0
        self._saved: dict[int, tuple[Saved, list[list[Saved]], Saved]] = {}
        self._rows: Sequence[Rows] = ()
        self._n_weights = 0

    def names(self) -> list[str]:
        """Names of its parameters, in forward order.

        Returns
        -------
        list of str
            A tied embedding stands in the first and in the last stage.
        """
        parts = [block.shapes() for block in self.blocks]
        if self.is_first:
            parts.insert(0, self.model.embedding.shapes())
        if self.is_last:
            tied = {"tok.weight": ()} if self.model.config.tied else {}
            parts.append({**tied, **self.model.head.shapes()})
        return list(dict.fromkeys(name for part in parts for name in part))

    def bind(self, parameters: Parameters) -> None:
        """Take the parameters, for `evaluate`.

        Parameters
        ----------
        parameters : mapping of str to Array
            Those of this stage at least.
        """
        self._parameters = parameters

    def begin(
        self,
        parameters: Parameters,
        gradients: Parameters,
        rows: Sequence[Rows],
        scale: float,
        generators: Sequence[np.random.Generator | None],
    ) -> None:
        """Take the microbatches of a step.

        Parameters
        ----------
        parameters, gradients : mapping of str to Array
            Those of this stage at least.
        rows : sequence of ndarray
            Tokens and one more, shape ``(batch, sequence + 1)``, one array a microbatch.
        scale : float
            Factor on the summed loss.
        generators : sequence of numpy.random.Generator or None
            Dropout of each microbatch.
        """
        self.bind(parameters)
        self._gradients = gradients
        self._rows, self._scale, self._generators = rows, scale, generators
        self.loss = 0.0
        self._n_weights = 0
        if self.model.config.tied and (self.is_first or self.is_last):
            gradients["tok.weight"][...] = 0

    def input_spec(self, microbatch: int) -> tuple[tuple[int, ...], str] | None:
        """Shape and dtype name of the activation that it takes.

        Parameters
        ----------
        microbatch : int
            Which one.

        Returns
        -------
        tuple or None
            None for the first stage.
        """
        return None if self.is_first else self._spec(microbatch)

    def output_spec(self, microbatch: int) -> tuple[tuple[int, ...], str] | None:
        """Shape and dtype name of the activation that it gives.

        Parameters
        ----------
        microbatch : int
            Which one.

        Returns
        -------
        tuple or None
            None for the last stage.
        """
        return None if self.is_last else self._spec(microbatch)

    def _spec(self, microbatch: int) -> tuple[tuple[int, ...], str]:
        n, columns = self._rows[microbatch].shape
        dtype = next(iter(self._parameters.values())).dtype
        return (n, columns - 1, self.model.config.width), dtype.name

    def forward(self, microbatch: int, x: Array | None) -> Array | None:
        """Run the layers; the last stage adds to `loss`.

        Parameters
        ----------
        microbatch : int
            Which one.
        x : Array or None
            Residual stream from the stage before, changed in place; None for the first stage.

        Returns
        -------
        Array or None
            Residual stream for the next stage; None from the last.
        """
        p, noise = self._parameters, self._generators[microbatch]
        rows = self._rows[microbatch]
        first: Saved = {}
        if x is None:
            x, first = self.model.embedding.forward(p, rows[:, :-1], noise)
        kept = []
        for block in self.blocks:
            x, saved = block.forward(p, x, noise)
            kept.append(saved)
        last: Saved = {}
        if self.is_last:
            loss, last = self.model.head.forward(p, x, rows[:, 1:], self._scale)
            self.loss += loss
        self._saved[microbatch] = (first, kept, last)
        self.peak_in_flight = max(self.peak_in_flight, len(self._saved))
        return None if self.is_last else x

    def backward_input(self, microbatch: int, grad: Array | None) -> Array | None:
        """Gradient of the stage's input (I).

        Parameters
        ----------
        microbatch : int
            Which one.
        grad : Array or None
            Gradient of its output; None for the last stage.

        Returns
        -------
        Array or None
            None from the first stage.
        """
        first, kept, last = self._saved[microbatch]
        p = self._parameters
        if grad is None:
            grad = self.model.head.backward_input(p, last)
        for block, saved in zip(reversed(self.blocks), reversed(kept), strict=True):
            grad = block.backward_input(p, saved, grad)
        if self.is_first:
            self.model.embedding.backward_input(first, grad)
            return None
        return grad

    def backward_weight(self, microbatch: int) -> None:
        """Weight gradients (W); the first of a step writes, later ones add.

        Parameters
        ----------
        microbatch : int
            Which one; its activations are freed.
        """
        first, kept, last = self._saved.pop(microbatch)
        to = _StageGradients(self._gradients, self._n_weights > 0)
        self._n_weights += 1
        if self.is_last:
            self.model.head.backward_weight(last, to)
        for block, saved in zip(reversed(self.blocks), reversed(kept), strict=True):
            block.backward_weight(saved, to)
        if self.is_first:
            self.model.embedding.backward_weight(first, to)

    def evaluate(self, rows: Rows, x: Array | None) -> Array | float:
        """Run the layers without keeping anything.

        Parameters
        ----------
        rows : ndarray
            Tokens and one more, shape ``(batch, sequence + 1)``.
        x : Array or None
            From the stage before; None for the first stage.

        Returns
        -------
        Array or float
            For the next stage; from the last the summed loss.
        """
        p, model = self._parameters, self.model
        if x is None:
            x, saved = model.embedding.forward(p, rows[:, :-1])
            model.embedding.release(saved)
        for half in (half for block in self.blocks for half in block.halves):
            x, saved = half.forward(p, x)
            half.release(saved)
        if not self.is_last:
            return x
        loss, saved = model.head.forward(p, x, rows[:, 1:])
        model.head.release(saved)
        return loss


class _StageGradients(Gradients):
    """Gradients of a stage; a tied embedding, written by two stages, is always added to."""

    def put(
        self, name: str, compute: Any, *args: Array, add: bool = False, last: bool = True
    ) -> None:
        tied = name == "tok.weight" and not last
        super().put(name, compute, *args, add=add or tied, last=last)
