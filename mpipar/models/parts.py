"""What the parts of a transformer share: names, buffers, and where gradients go.

Every part has the same three methods: `forward`, `backward_input` and `backward_weight`. They
communicate through a `Saved`: activations that forward leaves and gradients that `backward_input`
adds. So a pipeline can run the weight part later, and a stage is a run of parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from mpipar import nn
from mpipar.models.workspace import Workspace
from mpipar.nn.array import Array, namespace

if TYPE_CHECKING:
    from mpipar.models.gpt import GPTConfig

Saved = dict[str, Array]
"""Arrays that a part keeps between forward and the end of its backward."""
Parameters = Mapping[str, Array]
OnReady = Callable[[str], None]


class Gradients:
    """Where weight gradients go: write or add, then say that a name is final.

    Parameters
    ----------
    arrays : mapping of str to Array
        One array for each parameter, of its shape.
    accumulate : bool
        Add instead of writing.
    on_ready : callable, optional
        Called with a name when its gradient is final.
    """

    def __init__(
        self, arrays: Parameters, accumulate: bool = False, on_ready: OnReady | None = None
    ) -> None:
        self.arrays = arrays
        self.accumulate = accumulate
        self._on_ready = on_ready

    def put(
        self, name: str, compute: Callable[..., Array], *args: Array, last: bool = True
    ) -> None:
        """Run a weight-gradient function into the array of a name.

        Parameters
        ----------
        name : str
            The parameter.
        compute : callable
            A function with ``out`` and ``accumulate``.
        *args : Array
            Its arrays.
        last : bool
            False if another part adds to this gradient later.
        """
        compute(*args, out=self.arrays[name], accumulate=self.accumulate)
        if last:
            self.ready(name)

    def ready(self, name: str) -> None:
        """Report a gradient as final.

        Parameters
        ----------
        name : str
            The parameter.
        """
        if self._on_ready is not None:
            self._on_ready(name)


class Part:
    """What all parts share: configuration, name prefix and buffers.

    Parameters
    ----------
    config : GPTConfig
        The model's configuration.
    prefix : str
        Start of the parameter names, such as ``"blocks.0."``.
    workspace : Workspace
        Lends activation buffers.
    """

    def __init__(self, config: GPTConfig, prefix: str, workspace: Workspace) -> None:
        self.config = config
        self.prefix = prefix
        self.workspace = workspace

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the parameter shapes by full name, in forward order.

        Returns
        -------
        dict of str to tuple of int
            Shapes.
        """
        raise NotImplementedError

    def release(self, saved: Saved) -> None:
        """Give the saved arrays back to the workspace.

        Parameters
        ----------
        saved : Saved
            Emptied.
        """
        self.workspace.give(*saved.values())
        saved.clear()

    def _like(self, x: Array, width: int) -> Array:
        return self.workspace.take(x, (*x.shape[:-1], width))

    def _norm(self, name: str, p: Parameters, x: Array, saved: Saved) -> Array:
        n = self.prefix + name
        saved[name] = self._like(x, x.shape[-1])
        saved["normalized"] = self._like(x, x.shape[-1])
        _, _, saved["rstd"] = nn.layer_norm(
            x,
            p[n + ".weight"],
            p[n + ".bias"],
            self.config.eps,
            out=saved[name],
            normalized=saved["normalized"],
        )
        return saved[name]

    def _norm_backward(
        self, name: str, p: Parameters, grad: Array, saved: Saved, residual: Array | None
    ) -> Array:
        saved["grad_" + name] = grad
        return nn.layer_norm_backward_input(
            grad,
            p[f"{self.prefix}{name}.weight"],
            saved["normalized"],
            saved["rstd"],
            residual=residual,
            out=self._like(grad, grad.shape[-1]),
        )

    def _norm_weight(self, name: str, saved: Saved, gradients: Gradients) -> None:
        n, grad = self.prefix + name, saved["grad_" + name]
        gradients.put(n + ".bias", nn.bias_backward, grad)
        gradients.put(n + ".weight", nn.norm_backward_weight, grad, saved["normalized"])

    def _linear(self, name: str, p: Parameters, x: Array) -> Array:
        """Product with a weight into a lent buffer; the bias is added where it costs no sweep."""
        weight = p[f"{self.prefix}{name}.weight"]
        return nn.linear(x, weight, out=self._like(x, weight.shape[0]))

    def _linear_backward(self, name: str, p: Parameters, grad: Array) -> Array:
        weight = p[f"{self.prefix}{name}.weight"]
        return nn.linear_backward_input(grad, weight, out=self._like(grad, weight.shape[1]))

    def _linear_weight(self, name: str, x: Array, grad: Array, gradients: Gradients) -> None:
        n = self.prefix + name
        gradients.put(n + ".bias", nn.bias_backward, grad)
        gradients.put(n + ".weight", nn.linear_backward_weight, x, grad)

    def _dropout(
        self, x: Array, saved: Saved, generator: np.random.Generator | None
    ) -> Array | None:
        if not self.config.dropout or generator is None:
            return None
        saved["dropped"] = self._like(x, x.shape[-1])
        return nn.dropout_slope(x, self.config.dropout, generator, out=saved["dropped"])

    def _add(
        self,
        name: str,
        p: Parameters,
        x: Array,
        branch: Array,
        saved: Saved,
        generator: np.random.Generator | None,
    ) -> Array:
        """Close the residual branch: ``x += dropout(branch + bias)``; its buffer is freed."""
        slope = self._dropout(x, saved, generator)
        nn.add_residual(x, branch, p[f"{self.prefix}{name}.bias"], slope)
        self.workspace.give(branch)
        return x

    def _branch_grad(self, grad: Array, saved: Saved) -> Array:
        """Gradient before dropout."""
        if "dropped" not in saved:
            return grad
        return nn.slope_backward(grad, saved["dropped"], out=self._like(grad, grad.shape[-1]))
