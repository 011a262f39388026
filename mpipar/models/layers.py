"""The layers that models share: embedding, attention, feed-forward, head, and a block of halves.

Widths come from the configuration in `_shapes` and in the head counts of `Attention`, and from the
arrays elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from mpipar import nn
from mpipar.errors import OutOfRange
from mpipar.models.config import GPTConfig
from mpipar.models.parts import Gradients, Parameters, Part, Residual, Saved
from mpipar.nn.array import Array, namespace


class Embedding(Part):
    """Token embedding, and learned positions where the model has them: the first layer."""

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        c = self.config
        shapes: dict[str, tuple[int, ...]] = {"tok.weight": (c.vocabulary, c.width)}
        return {**shapes, "pos.weight": (c.sequence, c.width)} if c.learns_positions else shapes

    def forward(
        self, p: Parameters, tokens: Array, generator: np.random.Generator | None = None
    ) -> tuple[Array, Saved]:
        """Look tokens up and add learned positions.

        Parameters
        ----------
        p : mapping of str to Array
            Parameters by full name.
        tokens : Array
            Integers of shape ``(batch, sequence)``.
        generator : numpy.random.Generator, optional
            Draws dropout masks; none are drawn without it.

        Returns
        -------
        tuple of Array and Saved
            Residual stream of shape ``(batch, sequence, width)``, and what backward needs.

        Raises
        ------
        OutOfRange
            If rows are longer than the configuration's, or a token lies outside the vocabulary.
        """
        n = tokens.shape[1]
        if not 1 <= n <= self.config.sequence:
            raise OutOfRange("tokens in a row", f"1..{self.config.sequence}", n)
        weight = p["tok.weight"]
        x = self.workspace.take(weight, (*tokens.shape, self.config.width))
        nn.embedding(tokens, weight, out=x)
        xp = namespace(x)
        if self.config.learns_positions:
            positions = p["pos.weight"][:n, :]
            for row in range(x.shape[0]):
                xp.add(x[row, ...], positions, out=x[row, ...])
        saved: Saved = {"tokens": tokens}
        slope = self._dropout(x, saved, generator)
        if slope is not None:
            xp.multiply(x, slope, out=x)
        return x, saved

    def backward_input(self, saved: Saved, grad: Array) -> None:
        """Keep what the weights need: there is no input gradient.

        Parameters
        ----------
        saved : Saved
            As `forward` returned it.
        grad : Array
            Gradient of the stream; belongs to `saved` from now on.
        """
        saved["grad"] = grad
        saved["grad_rows"] = self._dropout_backward(grad, saved)

    def backward_weight(self, saved: Saved, gradients: Gradients) -> None:
        """Write the weight gradients, last parameter first, and release what was saved.

        Parameters
        ----------
        saved : Saved
            As `backward_input` left it.
        gradients : Gradients
            Where they go; a tied head has written there before.
        """
        rows, tied = saved["grad_rows"], self.config.tied
        if self.config.learns_positions:
            gradients.put("pos.weight", _position_backward, rows)
        gradients.put("tok.weight", nn.embedding_backward, saved["tokens"], rows, add=tied)
        self.release(saved)


def _position_backward(grad: Array, out: Array, accumulate: bool) -> Array:
    xp = namespace(grad)
    if not accumulate:
        out[...] = 0
    rows = out[: grad.shape[1], :]
    return xp.add(rows, xp.sum(grad, axis=0), out=rows)


class Attention(Residual):
    """Pre-norm causal self-attention with its residual connection."""

    norm = "ln1"
    closing = "proj"
    grad_inner = "grad_qkv"

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        c = self.config
        n_qkv = (c.n_heads + 2 * c.kv_heads) * c.head_width
        return {
            **self._with_bias("ln1", c.width),
            **self._with_bias("qkv", n_qkv, c.width),
            **self._with_bias("proj", c.width, c.n_heads * c.head_width),
        }

    def _heads(self, x: Array) -> Array:
        """View (batch, sequence, heads * head_width) as (batch, heads, sequence, head_width)."""
        xp = namespace(x)
        split = xp.reshape(x, (*x.shape[:2], -1, self.config.head_width))
        return xp.permute_dims(split, (0, 2, 1, 3))

    def _split(self, qkv: Array) -> tuple[Array, Array, Array]:
        heads, n_q = self._heads(qkv), self.config.n_heads
        n_kv = n_q + self.config.kv_heads
        return heads[:, :n_q, :, :], heads[:, n_q:n_kv, :, :], heads[:, n_kv:, :, :]

    def _inner(self, p: Parameters, h: Array, saved: Saved) -> Array:
        qkv = saved["qkv"] = self._linear("qkv", p, h)
        if (bias := self._bias("qkv", p)) is not None:
            namespace(h).add(qkv, bias, out=qkv)
        self._rotate(qkv, nn.rotary)
        attended = self._like(h, self.config.n_heads * self.config.head_width)
        q, k, v = self._split(qkv)
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

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        width, hidden = self.config.width, self.config.hidden
        return {
            **self._with_bias("ln2", width),
            **self._with_bias("up", hidden, width),
            **self._with_bias("down", width, hidden),
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


class Head(Part):
    """Final norm, projection to the vocabulary and loss: the last layer."""

    @property
    def _weight(self) -> str:
        return "tok.weight" if self.config.tied else "head.weight"

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        c = self.config
        shapes = self._with_bias("ln", c.width)
        return shapes if c.tied else {**shapes, "head.weight": (c.vocabulary, c.width)}

    def forward(
        self, p: Parameters, x: Array, targets: Array, loss_scale: float = 1.0
    ) -> tuple[float, Saved]:
        """Sum of the cross-entropies of the targets.

        Parameters
        ----------
        p : mapping of str to Array
            Parameters by full name.
        x : Array
            Residual stream, shape ``(batch, sequence, width)``; given back to the workspace.
        targets : Array
            Integers of shape ``(batch, sequence)``.
        loss_scale : float
            Factor on the loss.

        Returns
        -------
        tuple of float and Saved
            `loss_scale` times the sum, and what backward needs.
        """
        c = self.config
        saved: Saved = {"targets": targets, "scale": loss_scale}
        logits = saved["logits"] = self.logits(p, x, saved)
        loss, saved["lse"] = nn.cross_entropy(logits, targets, c.ignore_index, c.label_smoothing)
        return loss_scale * loss, saved

    def logits(self, p: Parameters, x: Array, saved: Saved) -> Array:
        """Scores of all tokens.

        Parameters
        ----------
        p : mapping of str to Array
            Parameters by full name.
        x : Array
            Residual stream, shape ``(batch, sequence, width)``; given back to the workspace.
        saved : Saved
            Receives what backward needs of the norm.

        Returns
        -------
        Array
            Shape ``(batch, sequence, vocabulary)``.
        """
        h = self._norm("ln", p, x, saved)
        self.workspace.give(x)
        weight = p[self._weight]
        return nn.linear(h, weight, out=self._like(h, weight.shape[0]))

    def backward_input(self, p: Parameters, saved: Saved) -> Array:
        """Gradient of the residual stream; gradients that the weights need are saved.

        Parameters
        ----------
        p : mapping of str to Array
            Parameters by full name.
        saved : Saved
            As `forward` returned it.

        Returns
        -------
        Array
            Shape ``(batch, sequence, width)``.
        """
        c, logits = self.config, saved["logits"]
        # In place of the logits, which nothing reads again.
        nn.cross_entropy_backward(
            logits,
            saved["targets"],
            saved["lse"],
            saved["scale"],
            c.ignore_index,
            c.label_smoothing,
            out=logits,
        )
        h = nn.linear_backward_input(logits, p[self._weight], out=self._like(logits, c.width))
        x = self._norm_backward("ln", p, h, saved)
        self.release(saved, ("normed", "logits", "norm_sums"))
        return x

    def backward_weight(self, saved: Saved, gradients: Gradients) -> None:
        """Write the weight gradients, last parameter first, and release what was saved.

        Parameters
        ----------
        saved : Saved
            As `backward_input` left it.
        gradients : Gradients
            Where they go; a tied embedding adds to it later.
        """
        arrays = (saved["normed"], saved["logits"])
        last = not self.config.tied
        gradients.put(self._weight, nn.linear_backward_weight, *arrays, last=last)
        self._norm_weight("ln", saved, gradients)
        self.release(saved)


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
