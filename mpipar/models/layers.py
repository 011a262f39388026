"""The layers that models share: attention, feed-forward, and a block of halves.

Widths come from the configuration in `_shards` and in the head counts of `Attention`, and from the
arrays elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Protocol

import numpy as np

from mpipar import nn
from mpipar.models.config import GPTConfig
from mpipar.models.parts import Gradients, Parameters, Residual, Saved
from mpipar.nn.array import Array, namespace
from mpipar.tensor_parallel.parameter import ShardedParameter, check_heads


class Attend(Protocol):
    """Attention over keys and values that lie elsewhere, one new token in each row."""

    positions: Array

    def __call__(self, layer: str, q: Array, k: Array, v: Array, out: Array) -> None:
        """Keep the new keys and values, and attend to all up to each token's position.

        Parameters
        ----------
        layer : str
            Prefix of the layer's names.
        q, k, v : Array
            Shape ``(tokens, heads, 1, head_width)``.
        out : Array
            Shape of `q`.
        """


class Attention(Residual):
    """Pre-norm causal self-attention with its residual connection."""

    norm = "ln1"
    closing = "proj"
    grad_inner = "grad_qkv"
    attend: Attend | None = None
    """Replaces attention within the row, in generation."""

    def _shards(self) -> dict[str, ShardedParameter]:
        c = self.config
        qkv = tuple(n * c.head_width for n in (c.n_heads, c.kv_heads, c.kv_heads))
        return {
            **self._norm_shards("ln1"),
            **self._linear_shards("qkv", sum(qkv), c.width, 0, qkv),
            **self._linear_shards("proj", c.width, qkv[0], 1),
        }

    @cached_property
    def _n_heads(self) -> tuple[int, int]:
        """This rank's query heads, and its key and value heads."""
        return check_heads(self.config.n_heads, self.config.kv_heads, self.tp.size)

    def _heads(self, x: Array) -> Array:
        """View (batch, sequence, heads * head_width) as (batch, heads, sequence, head_width)."""
        xp = namespace(x)
        split = xp.reshape(x, (*x.shape[:2], -1, self.config.head_width))
        return xp.permute_dims(split, (0, 2, 1, 3))

    def _split(self, qkv: Array) -> tuple[Array, Array, Array]:
        heads, (n_q, n_kv) = self._heads(qkv), self._n_heads
        n_kv += n_q
        return heads[:, :n_q, :, :], heads[:, n_q:n_kv, :, :], heads[:, n_kv:, :, :]

    def _inner(self, p: Parameters, h: Array, saved: Saved) -> Array:
        qkv = saved["qkv"] = self._linear("qkv", p, h)
        if (bias := self._bias("qkv", p)) is not None:
            namespace(h).add(qkv, bias, out=qkv)
        self._rotate(qkv, nn.rotary)
        attended = self._like(h, self._n_heads[0] * self.config.head_width)
        q, k, v = self._split(qkv)
        if self.attend is not None:
            self.attend(self.prefix, q, k, v, self._heads(attended))
            return attended
        _, saved["lse"] = nn.causal_attention(q, k, v, out=self._heads(attended))
        return attended

    def _inner_backward(self, p: Parameters, grad: Array, saved: Saved) -> Array:
        qkv = saved["qkv"]
        saved["grad_qkv"] = self._like(qkv)
        grad_q, grad_k, grad_v = self._split(saved["grad_qkv"])
        nn.causal_attention_backward(
            self._heads(grad),
            *self._split(qkv),
            self._heads(saved["inner"]),
            saved["lse"],
            grad_q=grad_q,
            grad_k=grad_k,
            grad_v=grad_v,
        )
        self.workspace.give(grad)
        self._rotate(saved["grad_qkv"], nn.rotary_backward)
        return self._linear_backward("qkv", p, saved["grad_qkv"])

    def _rotate(self, qkv: Array, rotate: Callable[..., Array]) -> None:
        """Turn queries and keys by their positions, in place; nothing where positions are added."""

    def _inner_weight(self, saved: Saved, gradients: Gradients) -> None:
        self._linear_weight("qkv", saved["normed"], saved["grad_qkv"], gradients)


class FeedForward(Residual):
    """Pre-norm two-layer GELU network with its residual connection."""

    norm = "ln2"
    closing = "down"
    config: GPTConfig
    grad_inner = "grad_up"

    def _shards(self) -> dict[str, ShardedParameter]:
        width, hidden = self.config.width, self.config.hidden
        return {
            **self._norm_shards("ln2"),
            **self._linear_shards("up", hidden, width, 0),
            **self._linear_shards("down", width, hidden, 1),
        }

    def _inner(self, p: Parameters, h: Array, saved: Saved) -> Array:
        # The slope takes the place of the pre-activation, which nothing reads again.
        u = saved["slope"] = self._linear("up", p, h)
        return nn.gelu(u, self._bias("up", p), out=self._like(u), slope=u)

    def _inner_backward(self, p: Parameters, grad: Array, saved: Saved) -> Array:
        u = saved["grad_up"] = nn.slope_backward(grad, saved["slope"], out=grad)
        return self._linear_backward("up", p, u)

    def _inner_weight(self, saved: Saved, gradients: Gradients) -> None:
        self._linear_weight("up", saved["normed"], saved["grad_up"], gradients)


class Block:
    """One transformer layer: its halves in forward order.

    Parameters
    ----------
    halves : sequence of Residual
        Such as attention and feed-forward.
    """

    def __init__(self, halves: Sequence[Residual]) -> None:
        self.halves = tuple(halves)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the parameter shapes by full name, in forward order.

        Returns
        -------
        dict of str to tuple of int
            Shapes.
        """
        return {name: shape for half in self.halves for name, shape in half.shapes().items()}

    def forward(
        self, p: Parameters, x: Array, generator: np.random.Generator | None = None
    ) -> tuple[Array, list[Saved]]:
        """Run the halves forward.

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
        tuple of Array and list of Saved
            `x`, and what backward needs.
        """
        saved = []
        for half in self.halves:
            x, kept = half.forward(p, x, generator)
            saved.append(kept)
        return x, saved

    def backward_input(self, p: Parameters, saved: list[Saved], grad: Array) -> Array:
        """Gradient of the stream before this layer; gradients that the weights need are saved.

        Parameters
        ----------
        p : mapping of str to Array
            Parameters by full name.
        saved : list of Saved
            As `forward` returned it.
        grad : Array
            Gradient of the stream after this layer; belongs to `saved` from now on.

        Returns
        -------
        Array
            A new array of the shape of `grad`.
        """
        for half, kept in zip(reversed(self.halves), reversed(saved), strict=True):
            grad = half.backward_input(p, kept, grad)
        return grad

    def backward_weight(self, saved: list[Saved], gradients: Gradients) -> None:
        """Write the weight gradients, last parameter first, and release what was saved.

        Parameters
        ----------
        saved : list of Saved
            As `backward_input` left it.
        gradients : Gradients
            Where they go.
        """
        for half, kept in zip(reversed(self.halves), reversed(saved), strict=True):
            half.backward_weight(kept, gradients)
