"""What the layers of a transformer share: names, buffers, and where gradients go.

Every part has the same three methods: `forward`, `backward_input` and `backward_weight`. They
communicate through a `Saved`: activations that forward leaves and gradients that `backward_input`
adds. So a pipeline can run the weight part later, and a stage is a run of parts.

The residual stream is updated in place: what a part returns is the array that it was given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any

import numpy as np

from mpipar import nn
from mpipar.models.config import ModelConfig
from mpipar.models.parallel import TensorParallel
from mpipar.models.workspace import Workspace
from mpipar.nn.array import Array, store
from mpipar.tensor_parallel.parameter import ShardedParameter
from mpipar.tensor_parallel.random import dropout_slope_shard

Saved = dict[str, Any]
"""What a part keeps between forward and the end of its backward, mostly arrays."""
Parameters = Mapping[str, Array]
"""Arrays by full name."""
OnReady = Callable[[str], None]
"""Called with a parameter's name when its gradient is final."""


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
        self,
        name: str,
        compute: Callable[..., Array],
        *args: Array,
        add: bool = False,
        last: bool = True,
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
        add : bool
            True if another part wrote to this gradient before.
        last : bool
            False if another part adds to this gradient later.
        """
        compute(*args, out=self.arrays[name], accumulate=self.accumulate or add)
        if last and self._on_ready is not None:
            self._on_ready(name)


class Streams:
    """Dropout of one microbatch: each layer draws from a stream of its own.

    So masks do not depend on which rank computes a layer, nor on how often.

    Parameters
    ----------
    generator : numpy.random.Generator, optional
        Gives one number; without it there is no dropout.
    """

    def __init__(self, generator: np.random.Generator | None = None) -> None:
        self._seed = None if generator is None else int(generator.integers(1 << 62))

    def layer(self, index: int) -> np.random.Generator | None:
        """The stream of a layer, from its beginning.

        Parameters
        ----------
        index : int
            0 for the embedding, then the blocks from 1 on.

        Returns
        -------
        numpy.random.Generator or None
            None without dropout.
        """
        if self._seed is None:
            return None
        return np.random.Generator(np.random.Philox([self._seed, index]))


class Part:
    """A layer or half a layer: configuration, name prefix and buffers.

    Parameters
    ----------
    config : ModelConfig
        The model's configuration.
    workspace : Workspace
        Lends activation buffers.
    prefix : str
        Start of the parameter names, such as ``"blocks.0."``.
    tp : TensorParallel, optional
        Who shares the weights; by default this rank alone has them.
    """

    def __init__(
        self,
        config: ModelConfig,
        workspace: Workspace,
        prefix: str = "",
        tp: TensorParallel | None = None,
    ) -> None:
        self.config = config
        self.workspace = workspace
        self.prefix = prefix
        self.tp = TensorParallel() if tp is None else tp

    @cached_property
    def shards(self) -> dict[str, ShardedParameter]:
        """Which part of each parameter a rank holds, by full name, in forward order."""
        return {self.prefix + name: shard for name, shard in self._shards().items()}

    def _shards(self) -> dict[str, ShardedParameter]:
        raise NotImplementedError

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of this rank's parameters by full name, in forward order.

        Returns
        -------
        dict of str to tuple of int
            Shapes.
        """
        return {name: shard.local_shape for name, shard in self.shards.items()}

    def release(self, saved: Saved, but: Iterable[str] = ()) -> None:
        """Give saved arrays back to the workspace.

        Parameters
        ----------
        saved : Saved
            Emptied, but for the arrays named here.
        but : iterable of str
            What stays.
        """
        kept = {name: saved[name] for name in but}
        needed = {id(value) for value in kept.values()}
        self.workspace.give(*(v for v in saved.values() if id(v) not in needed))
        saved.clear()
        saved.update(kept)

    def _like(self, x: Array, width: int | None = None) -> Array:
        return self.workspace.take(x, (*x.shape[:-1], x.shape[-1] if width is None else width))

    def _norm(self, name: str, p: Parameters, x: Array, saved: Saved) -> Array:
        n = self.prefix + name
        h, xhat = saved["normed"], saved["normalized"] = self._like(x), self._like(x)
        weight, bias, eps = p[n + ".weight"], self._bias(name, p), self.config.eps
        if self.config.uses_rms_norm:
            saved["rstd"] = nn.rms_norm(x, weight, eps, h, xhat)[2]
        else:
            saved["rstd"] = nn.layer_norm(x, weight, bias, eps, h, xhat)[2]
        if (whole := self.tp.whole(h)) is not h:
            self.workspace.give(h)
            saved["normed"] = whole
        return whole

    def _bias(self, name: str, p: Parameters) -> Array | None:
        return p[f"{self.prefix}{name}.bias"] if self.config.has_bias else None

    def _norm_shards(self, name: str) -> dict[str, ShardedParameter]:
        kinds = ("weight", "bias") if self.config.has_bias else ("weight",)
        return {f"{name}.{kind}": self.tp.shard((self.config.width,)) for kind in kinds}

    def _linear_shards(
        self, name: str, n_out: int, n_in: int, dim: int, segments: tuple[int, ...] = ()
    ) -> dict[str, ShardedParameter]:
        """A map whose outputs (`dim` 0, with the bias) or inputs (1) are split."""
        found = {f"{name}.weight": self.tp.shard((n_out, n_in), dim, segments)}
        if self.config.has_bias:
            found[f"{name}.bias"] = self.tp.shard((n_out,), None if dim else 0, segments)
        return found

    def _norm_backward(
        self,
        name: str,
        p: Parameters,
        grad: Array,
        saved: Saved,
        residual: Array | None = None,
        out: Array | None = None,
    ) -> Array:
        """The gradients of weight and bias cost nothing extra here, and `grad` is freed."""
        terms, grad = grad, self.tp.summed(grad)
        if terms is not grad:
            self.workspace.give(terms)
        weight, xhat = p[f"{self.prefix}{name}.weight"], saved["normalized"]
        sums = saved["norm_sums"] = self.workspace.take(grad, (2, grad.shape[-1]))
        to = self._like(grad) if out is None else out
        rms = self.config.uses_rms_norm
        backward = nn.rms_norm_backward_input if rms else nn.layer_norm_backward_input
        backward(grad, weight, xhat, saved["rstd"], residual, to, sums)
        self.workspace.give(grad)
        return to

    def _norm_weight(self, name: str, saved: Saved, gradients: Gradients) -> None:
        n, sums = self.prefix + name, saved["norm_sums"]
        if self.config.has_bias:
            gradients.put(n + ".bias", store, sums[1, :])
        gradients.put(n + ".weight", store, sums[0, :])

    def _linear(self, name: str, p: Parameters, x: Array) -> Array:
        """Product with a weight; the bias is added later, where it costs no sweep of its own."""
        weight = p[f"{self.prefix}{name}.weight"]
        return nn.linear(x, weight, out=self._like(x, weight.shape[0]))

    def _linear_backward(self, name: str, p: Parameters, grad: Array) -> Array:
        weight = p[f"{self.prefix}{name}.weight"]
        return nn.linear_backward_input(grad, weight, out=self._like(grad, weight.shape[1]))

    def _linear_weight(self, name: str, x: Array, grad: Array, gradients: Gradients) -> None:
        n = self.prefix + name
        if self.config.has_bias:
            gradients.put(n + ".bias", nn.bias_backward, grad)
        gradients.put(n + ".weight", nn.linear_backward_weight, x, grad)

    def _dropout(
        self, x: Array, saved: Saved, generator: np.random.Generator | None
    ) -> Array | None:
        if not self.config.dropout or generator is None:
            return None
        if self.tp.sequence_parallel:
            batch, n, width = x.shape
            first = self.tp.rank * n
            part = (slice(None), slice(first, first + n), slice(None))
            whole = (batch, n * self.tp.size, width)
            saved["dropped"] = dropout_slope_shard(x, self.config.dropout, generator, whole, part)
            return saved["dropped"]
        saved["dropped"] = self._like(x)
        return nn.dropout_slope(x, self.config.dropout, generator, out=saved["dropped"])

    def _dropout_backward(self, grad: Array, saved: Saved) -> Array:
        if "dropped" not in saved:
            return grad
        return nn.slope_backward(grad, saved["dropped"], out=self._like(grad))


class Residual(Part):
    """A branch ``x + dropout(closing(inner(norm(x))))`` of the residual stream.

    A subclass names its norm, its closing linear map and the gradient that the weights inside
    need, and gives the inner function.
    """

    norm: str
    closing: str
    grad_inner: str

    def _inner(self, p: Parameters, h: Array, saved: Saved) -> Array:
        raise NotImplementedError

    def _inner_backward(self, p: Parameters, grad: Array, saved: Saved) -> Array:
        raise NotImplementedError

    def _inner_weight(self, saved: Saved, gradients: Gradients) -> None:
        raise NotImplementedError

    def forward(
        self, p: Parameters, x: Array, generator: np.random.Generator | None = None
    ) -> tuple[Array, Saved]:
        """Add the branch to the residual stream.

        Parameters
        ----------
        p : mapping of str to Array
            Parameters by full name.
        x : Array
            Residual stream, shape ``(batch, sequence, width)``; changed in place.
        generator : numpy.random.Generator, optional
            Draws dropout masks; none are drawn without it.

        Returns
        -------
        tuple of Array and Saved
            `x`, and what backward needs.
        """
        saved: Saved = {}
        saved["inner"] = self._inner(p, self._norm(self.norm, p, x, saved), saved)
        terms = self._linear(self.closing, p, saved["inner"])
        branch = self.tp.summed(terms)
        slope = self._dropout(x, saved, generator)
        nn.add_residual(x, branch, self._bias(self.closing, p), slope)
        self.workspace.give(terms)
        return x, saved

    def backward_input(
        self, p: Parameters, saved: Saved, grad: Array, out: Array | None = None
    ) -> Array:
        """Gradient of the stream before this part; gradients that the weights need are saved.

        Parameters
        ----------
        p : mapping of str to Array
            Parameters by full name.
        saved : Saved
            As `forward` returned it.
        grad : Array
            Gradient of the stream after this part; belongs to `saved` from now on.
        out : Array, optional
            Where the result goes.

        Returns
        -------
        Array
            `out`, or a new array of the shape of `grad`.
        """
        saved["grad"] = grad
        saved["grad_dropped"] = self._dropout_backward(grad, saved)
        saved["grad_closing"] = self.tp.whole(saved["grad_dropped"])
        inner = self._linear_backward(self.closing, p, saved["grad_closing"])
        h = self._inner_backward(p, inner, saved)
        x = self._norm_backward(self.norm, p, h, saved, residual=grad, out=out)
        self.release(saved, ("inner", "grad_closing", "normed", "norm_sums", self.grad_inner))
        return x

    def backward_weight(self, saved: Saved, gradients: Gradients) -> None:
        """Write the weight gradients, last parameter first, and release what was saved.

        Parameters
        ----------
        saved : Saved
            As `backward_input` left it.
        gradients : Gradients
            Where they go.
        """
        self._linear_weight(self.closing, saved["inner"], saved["grad_closing"], gradients)
        self._inner_weight(saved, gradients)
        self._norm_weight(self.norm, saved, gradients)
        self.release(saved)
