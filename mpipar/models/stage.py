"""A run of a model's layers as a pipeline stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from mpipar.errors import CountOutOfRange
from mpipar.models.model import Model
from mpipar.models.parts import Gradients, Parameters, Part, Residual, Saved, Streams
from mpipar.nn.array import Array

Rows = np.ndarray[Any, np.dtype[np.int64]]
Spec = tuple[tuple[int, ...], str]


class ModelStage:
    """Layers ``start`` to ``stop`` of a model; the embedding before the first, the head last.

    Parameters
    ----------
    model : Model
        Owns the layers and the activation buffers.
    layers : range
        Its blocks; may be empty.
    is_first, is_last : bool
        Whether it embeds the tokens, and whether it computes the loss.
    dtype : dtype
        Of the activations.
    recompute : bool
        Keep only the stage's input, and run forward a second time before the backward.
    """

    computes_into = True
    """It takes `out`: the executor then hands it the slot that the neighbour reads."""

    def __init__(
        self,
        model: Model,
        layers: range,
        is_first: bool,
        is_last: bool,
        dtype: DTypeLike = np.float32,
        recompute: bool = False,
    ) -> None:
        if not 0 <= layers.start <= layers.stop <= model.config.n_layers:
            raise CountOutOfRange("layers of a stage", f"0..{model.config.n_layers}", layers.stop)
        self.model = model
        self.layers = layers
        self.is_first = is_first
        self.is_last = is_last
        self.recompute = recompute
        self.loss = 0.0
        self._halves: list[Residual] = [h for i in layers for h in model.blocks[i].halves]
        self._dtype = np.dtype(dtype).name
        self._saved: dict[int, list[Saved]] = {}
        self._inputs: dict[int, Array | None] = {}
        self._rows: Sequence[Rows] = ()
        self._n_weights = 0

    def names(self) -> list[str]:
        """Names of its parameters, in forward order.

        Returns
        -------
        list of str
            A tied embedding stands in the first and in the last stage.
        """
        parts = [half.shapes() for half in self._halves]
        if self.is_first:
            parts.insert(0, self.model.embedding.shapes())
        if self.is_last:
            tied = {"tok.weight": ()} if self.model.config.tied else {}
            parts.append({**tied, **self.model.head.shapes()})
        return list(dict.fromkeys(name for part in parts for name in part))

    def begin(
        self,
        parameters: Parameters,
        gradients: Parameters,
        rows: Sequence[Rows],
        scale: float,
        streams: Sequence[Streams],
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
        streams : sequence of Streams
            Dropout of each microbatch, equal on every stage.
        """
        self._parameters, self._gradients = parameters, gradients
        self._rows, self._scale, self._streams = rows, scale, streams
        self.loss = 0.0
        self._n_weights = 0
        self._drop()
        if self.model.config.tied and (self.is_first or self.is_last):
            gradients["tok.weight"][...] = 0

    def _drop(self) -> None:
        """Forget what a step that failed has left."""
        self.model.workspace.give(*self._inputs.values())
        for saved in self._saved.values():
            self.model.workspace.give(*(array for part in saved for array in part.values()))
        self._saved.clear()
        self._inputs.clear()

    def input_spec(self, microbatch: int) -> Spec | None:
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

    def output_spec(self, microbatch: int) -> Spec | None:
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

    def _spec(self, microbatch: int) -> Spec:
        n, columns = self._rows[microbatch].shape
        return self.model.stream_shape(n, columns - 1), self._dtype

    # -- one microbatch ---------------------------------------------------------------------

    def forward(self, microbatch: int, x: Array | None, out: Array | None = None) -> Array | None:
        """Run the layers; the last stage adds to `loss`.

        Parameters
        ----------
        microbatch : int
            Which one.
        x : Array or None
            Residual stream from the stage before, changed in place; None for the first stage.
        out : Array, optional
            Where the result goes; `x` may stand there already.

        Returns
        -------
        Array or None
            Residual stream for the next stage; None from the last.
        """
        if x is not None and out is not None and x is not out:
            out[...] = x
            self.model.workspace.give(x)
            x = out
        if self.recompute:
            kept = None
            if x is not None:
                kept = self.model.workspace.take(x, tuple(x.shape))
                kept[...] = x
            self._inputs[microbatch] = kept
            y, loss = self._run(microbatch, x, None, out)
        else:
            saved = self._saved[microbatch] = []
            y, loss = self._run(microbatch, x, saved, out)
        self.loss += loss
        return y

    def _run(
        self,
        microbatch: int,
        x: Array | None,
        saved: list[Saved] | None,
        out: Array | None = None,
    ) -> tuple[Array | None, float]:
        rows, streams = self._rows[microbatch], self._streams[microbatch]
        return self._layers(self._parameters, rows, x, streams, self._scale, saved, out)

    def _layers(
        self,
        p: Parameters,
        rows: Rows,
        x: Array | None,
        streams: Streams,
        scale: float,
        saved: list[Saved] | None,
        out: Array | None = None,
    ) -> tuple[Array | None, float]:
        """Output and loss; what backward needs goes into `saved`, or is given back at once."""

        def keep(part: Part, what: Saved) -> None:
            if saved is None:
                part.release(what)
            else:
                saved.append(what)

        model = self.model
        if x is None:
            x, what = model.embedding.forward(p, rows[:, :-1], streams.layer(0), out)
            keep(model.embedding, what)
        for number in self.layers:
            stream = streams.layer(number + 1)
            for half in model.blocks[number].halves:
                x, what = half.forward(p, x, stream)
                keep(half, what)
        if not self.is_last:
            return x, 0.0
        loss, what = model.head.forward(p, x, rows[:, 1:], scale)
        keep(model.head, what)
        return None, loss

    def backward_input(
        self, microbatch: int, grad: Array | None, out: Array | None = None
    ) -> Array | None:
        """Gradient of the stage's input (I).

        Parameters
        ----------
        microbatch : int
            Which one.
        grad : Array or None
            Gradient of its output; None for the last stage.
        out : Array, optional
            Where the result goes.

        Returns
        -------
        Array or None
            None from the first stage.
        """
        return self._backward(microbatch, grad, out, lambda part, saved: None)

    def backward_weight(self, microbatch: int) -> None:
        """Weight gradients (W); the first of a step writes, later ones add.

        Parameters
        ----------
        microbatch : int
            Which one; its activations are freed.
        """
        saved, to = self._saved.pop(microbatch), self._targets()
        if self.is_last:
            self.model.head.backward_weight(saved.pop(), to)
        for half in reversed(self._halves):
            half.backward_weight(saved.pop(), to)
        if self.is_first:
            self.model.embedding.backward_weight(saved.pop(), to)

    def backward(
        self, microbatch: int, grad: Array | None, out: Array | None = None
    ) -> Array | None:
        """Both in one (B), layer by layer, while what they share is in the caches.

        Parameters
        ----------
        microbatch : int
            Which one; its activations are freed.
        grad : Array or None
            Gradient of its output; None for the last stage.
        out : Array, optional
            Where the result goes.

        Returns
        -------
        Array or None
            Gradient of its input; None from the first stage.
        """
        to = self._targets()
        grad = self._backward(
            microbatch, grad, out, lambda part, what: part.backward_weight(what, to)
        )
        self._saved.pop(microbatch)
        return grad

    def _backward(
        self,
        microbatch: int,
        grad: Array | None,
        out: Array | None,
        then: Callable[[Any, Saved], None],
    ) -> Array | None:
        if self.recompute:
            saved = self._saved[microbatch] = []
            y, _ = self._run(microbatch, self._inputs.pop(microbatch), saved)
            self.model.workspace.give(y)
        saved, p, model = list(self._saved[microbatch]), self._parameters, self.model
        if self.is_last:
            what = saved.pop()
            grad = model.head.backward_input(p, what)
            then(model.head, what)
        for number, half in reversed([*enumerate(self._halves)]):
            what = saved.pop()
            grad = half.backward_input(p, what, grad, None if number else out)
            then(half, what)
        if not self.is_first:
            return grad
        what = saved.pop()
        model.embedding.backward_input(what, grad)
        then(model.embedding, what)
        return None

    def _targets(self) -> Gradients:
        self._n_weights += 1
        return _StageGradients(self._gradients, self._n_weights > 1)

    def evaluate(
        self, parameters: Parameters, rows: Rows, x: Array | None
    ) -> tuple[Array | None, float]:
        """Run the layers without dropout and without keeping anything.

        Parameters
        ----------
        parameters : mapping of str to Array
            Those of this stage at least.
        rows : ndarray
            Tokens and one more, shape ``(batch, sequence + 1)``.
        x : Array or None
            From the stage before; None for the first stage.

        Returns
        -------
        tuple of Array and float
            For the next stage (None from the last), and the summed loss (0 but from the last).
        """
        return self._layers(parameters, rows, x, Streams(), 1.0, None)


class _StageGradients(Gradients):
    """Gradients of a stage; a tied embedding, written by two stages, is always added to."""

    def put(
        self, name: str, compute: Any, *args: Array, add: bool = False, last: bool = True
    ) -> None:
        tied = name == "tok.weight" and not last
        super().put(name, compute, *args, add=add or tied, last=last)
