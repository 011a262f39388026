"""The layers of a GPT: embedding, block (attention and feed-forward) and head.

The residual stream is updated in place: what a layer returns is the array that it was given.
"""

from __future__ import annotations

import numpy as np

from mpipar import nn
from mpipar.errors import OutOfRange
from mpipar.models.parts import Gradients, Parameters, Part, Saved
from mpipar.nn.array import Array, namespace


class Embedding(Part):
    """Token and learned position embeddings: the first layer."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        c = self.config
        return {"tok.weight": (c.vocabulary, c.width), "pos.weight": (c.sequence, c.width)}

    def forward(
        self, p: Parameters, tokens: Array, generator: np.random.Generator | None = None
    ) -> tuple[Array, Saved]:
        n = tokens.shape[1]
        if not 1 <= n <= self.config.sequence:
            raise OutOfRange("tokens in a row", f"1..{self.config.sequence}", n)
        weight = p["tok.weight"]
        x = self.workspace.take(weight, (*tokens.shape, self.config.width))
        nn.embedding(tokens, weight, out=x)
        positions = p["pos.weight"][:n, :]
        xp = namespace(x)
        for row in range(x.shape[0]):
            xp.add(x[row, ...], positions, out=x[row, ...])
        saved: Saved = {"tokens": tokens}
        slope = self._dropout(x, saved, generator)
        if slope is not None:
            xp.multiply(x, slope, out=x)
        return x, saved

    def backward_input(self, p: Parameters, saved: Saved, grad: Array) -> None:
        saved["grad_residual"] = self._branch_grad(grad, saved)

    def backward_weight(self, saved: Saved, gradients: Gradients) -> None:
        grad = saved["grad_residual"]
        gradients.put("pos.weight", _position_backward, grad)
        # A tied head wrote here before.
        add = gradients.accumulate or self.config.tied
        to = gradients.arrays["tok.weight"]
        nn.embedding_backward(saved["tokens"], grad, out=to, accumulate=add)
        gradients.ready("tok.weight")


def _position_backward(grad: Array, out: Array, accumulate: bool) -> Array:
    xp = namespace(grad)
    if not accumulate:
        out[...] = 0
    rows = out[: grad.shape[1], :]
    return xp.add(rows, xp.sum(grad, axis=0), out=rows)


class Attention(Part):
    """Pre-norm causal self-attention with its residual connection."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        c, n = self.config, self.prefix
        n_qkv = (c.n_heads + 2 * c.kv_heads) * c.head_width
        return {
            n + "ln1.weight": (c.width,),
            n + "ln1.bias": (c.width,),
            n + "qkv.weight": (n_qkv, c.width),
            n + "qkv.bias": (n_qkv,),
            n + "proj.weight": (c.width, c.width),
            n + "proj.bias": (c.width,),
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

    def forward(
        self, p: Parameters, x: Array, generator: np.random.Generator | None = None
    ) -> tuple[Array, Saved]:
        saved: Saved = {}
        qkv = saved["qkv"] = self._linear("qkv", p, self._norm("ln1", p, x, saved))
        namespace(x).add(qkv, p[self.prefix + "qkv.bias"], out=qkv)
        saved["attended"] = self._like(x, self.config.width)
        heads = self._heads(saved["attended"])
        _, saved["lse"] = nn.causal_attention(*self._split(qkv), out=heads)
        branch = self._linear("proj", p, saved["attended"])
        return self._add("proj", p, x, branch, saved, generator), saved

    def backward_input(self, p: Parameters, saved: Saved, grad: Array) -> Array:
        saved["grad_residual"] = grad
        saved["grad_proj"] = self._branch_grad(grad, saved)
        grad_attended = self._linear_backward("proj", p, saved["grad_proj"])
        qkv = saved["qkv"]
        saved["grad_qkv"] = self._like(grad, qkv.shape[-1])
        grad_q, grad_k, grad_v = self._split(saved["grad_qkv"])
        nn.causal_attention_backward(
            self._heads(grad_attended),
            *self._split(qkv),
            self._heads(saved["attended"]),
            saved["lse"],
            grad_q=grad_q,
            grad_k=grad_k,
            grad_v=grad_v,
        )
        self.workspace.give(grad_attended)
        h = self._linear_backward("qkv", p, saved["grad_qkv"])
        return self._norm_backward("ln1", p, h, saved, residual=grad)

    def backward_weight(self, saved: Saved, gradients: Gradients) -> None:
        self._linear_weight("proj", saved["attended"], saved["grad_proj"], gradients)
        self._linear_weight("qkv", saved["ln1"], saved["grad_qkv"], gradients)
        self._norm_weight("ln1", saved, gradients)


class FeedForward(Part):
    """Pre-norm two-layer GELU network with its residual connection."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        n, width, hidden = self.prefix, self.config.width, self.config.hidden
        return {
            n + "ln2.weight": (width,),
            n + "ln2.bias": (width,),
            n + "up.weight": (hidden, width),
            n + "up.bias": (hidden,),
            n + "down.weight": (width, hidden),
            n + "down.bias": (width,),
        }

    def forward(
        self, p: Parameters, x: Array, generator: np.random.Generator | None = None
    ) -> tuple[Array, Saved]:
        saved: Saved = {}
        u = self._linear("up", p, self._norm("ln2", p, x, saved))
        saved["active"] = self._like(x, u.shape[-1])
        # The slope takes the place of the pre-activation, which nothing reads again.
        nn.gelu(u, p[self.prefix + "up.bias"], out=saved["active"], slope=u)
        saved["slope"] = u
        branch = self._linear("down", p, saved["active"])
        return self._add("down", p, x, branch, saved, generator), saved

    def backward_input(self, p: Parameters, saved: Saved, grad: Array) -> Array:
        saved["grad_residual"] = grad
        saved["grad_down"] = self._branch_grad(grad, saved)
        u = self._linear_backward("down", p, saved["grad_down"])
        saved["grad_up"] = nn.slope_backward(u, saved["slope"], out=u)
        h = self._linear_backward("up", p, u)
        return self._norm_backward("ln2", p, h, saved, residual=grad)

    def backward_weight(self, saved: Saved, gradients: Gradients) -> None:
        self._linear_weight("down", saved["active"], saved["grad_down"], gradients)
        self._linear_weight("up", saved["ln2"], saved["grad_up"], gradients)
        self._norm_weight("ln2", saved, gradients)


class Head(Part):
    """Final norm, projection to the vocabulary and loss: the last layer."""

    @property
    def _weight(self) -> str:
        return "tok.weight" if self.config.tied else "head.weight"

    def shapes(self) -> dict[str, tuple[int, ...]]:
        c = self.config
        shapes: dict[str, tuple[int, ...]] = {"ln.weight": (c.width,), "ln.bias": (c.width,)}
        return shapes if c.tied else {**shapes, "head.weight": (c.vocabulary, c.width)}

    def logits(self, p: Parameters, x: Array, saved: Saved) -> Array:
        """Project the stream to the vocabulary.

        Parameters
        ----------
        p : mapping of str to Array
            Parameters by full name.
        x : Array
            Residual stream, shape ``(batch, sequence, width)``.
        saved : Saved
            Receives what backward needs.

        Returns
        -------
        Array
            Shape ``(batch, sequence, vocabulary)``.
        """
        weight = p[self._weight]
        h = self._norm("ln", p, x, saved)
        saved["logits"] = nn.linear(h, weight, out=self._like(x, weight.shape[0]))
        return saved["logits"]

    def forward(
        self, p: Parameters, x: Array, targets: Array, loss_scale: float = 1.0
    ) -> tuple[float, Saved]:
        saved: Saved = {"targets": targets, "scale": loss_scale}
        c = self.config
        loss, saved["lse"] = nn.cross_entropy(
            self.logits(p, x, saved), targets, c.ignore_index, c.label_smoothing
        )
        self.workspace.give(x)
        return loss_scale * loss, saved

    def backward_input(self, p: Parameters, saved: Saved) -> Array:
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
        return self._norm_backward("ln", p, h, saved, residual=None)

    def backward_weight(self, saved: Saved, gradients: Gradients) -> None:
        arrays = (saved["ln"], saved["logits"])
        gradients.put(self._weight, nn.linear_backward_weight, *arrays, last=not self.config.tied)
        self._norm_weight("ln", saved, gradients)


class Block:
    """One transformer layer: attention, then feed-forward.

    Parameters
    ----------
    attention, feed_forward : Part
        The two halves.
    """

    def __init__(self, attention: Attention, feed_forward: FeedForward) -> None:
        self.halves = (attention, feed_forward)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {n: s for half in self.halves for n, s in half.shapes().items()}

    def forward(
        self, p: Parameters, x: Array, generator: np.random.Generator | None = None
    ) -> tuple[Array, tuple[Saved, ...]]:
        saved = []
        for half in self.halves:
            x, kept = half.forward(p, x, generator)
            saved.append(kept)
        return x, tuple(saved)

    def backward_input(self, p: Parameters, saved: tuple[Saved, ...], grad: Array) -> Array:
        for half, kept in zip(reversed(self.halves), reversed(saved), strict=True):
            grad = half.backward_input(p, kept, grad)
        return grad

    def backward_weight(self, saved: tuple[Saved, ...], gradients: Gradients) -> None:
        for half, kept in zip(reversed(self.halves), reversed(saved), strict=True):
            half.backward_weight(kept, gradients)
            half.release(kept)
