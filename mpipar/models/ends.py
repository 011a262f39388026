"""The first and the last layer of a model: embedding, and head with the loss."""

from __future__ import annotations

import time
from functools import cached_property, partial

import numpy as np

from mpipar import nn
from mpipar.errors import OutOfRange
from mpipar.models.parts import Gradients, Parameters, Part, Saved
from mpipar.nn.array import Array, namespace
from mpipar.tensor_parallel.parameter import ShardedParameter
from mpipar.tensor_parallel.vocabulary import VocabParallelCrossEntropy, VocabParallelEmbedding


class Embedding(Part):
    """Token embedding, and learned positions where the model has them: the first layer."""

    @cached_property
    def _table(self) -> VocabParallelEmbedding:
        c, tp = self.config, self.tp
        return VocabParallelEmbedding(
            tp.comm, c.vocabulary, c.width, prefix="tok.", sequence_parallel=tp.sequence_parallel
        )

    def _shards(self) -> dict[str, ShardedParameter]:
        c, shards = self.config, dict(self._table.parameters)
        if c.learns_positions:
            shards["pos.weight"] = self.tp.shard((c.sequence, c.width))
        return shards

    def forward(
        self,
        p: Parameters,
        tokens: Array,
        generator: np.random.Generator | None = None,
        out: Array | None = None,
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
        out : Array, optional
            Where the stream goes.

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
        x, saved = self._look_up(p, tokens, out)
        xp = namespace(x)
        if self.config.learns_positions:
            first, n = self._tokens(n)
            positions = p["pos.weight"][first : first + n, :]
            for row in range(x.shape[0]):
                xp.add(x[row, ...], positions, out=x[row, ...])
        slope = self._dropout(x, saved, generator)
        if slope is not None:
            xp.multiply(x, slope, out=x)
        return x, saved

    def _look_up(self, p: Parameters, tokens: Array, out: Array | None) -> tuple[Array, Saved]:
        if self.tp.size > 1:
            start = time.perf_counter()
            x, saved = self._table.forward(p, tokens)
            self.tp.communication_s += time.perf_counter() - start
            if out is not None:
                out[...] = x
                x = out
            return x, {"table": saved, "n": tokens.shape[1]}
        weight = p["tok.weight"]
        if out is None:
            out = self.workspace.take(weight, (*tokens.shape, self.config.width))
        nn.embedding(tokens, weight, out=out)
        return out, {"tokens": tokens, "n": tokens.shape[1]}

    def _tokens(self, n: int) -> tuple[int, int]:
        """First of this rank's tokens of a row, and how many it has."""
        n_rows = self.tp.n_rows(n)
        return (self.tp.rank * n_rows if n_rows < n else 0), n_rows

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
        if self.tp.size > 1:
            self._table.backward_input(saved["table"], saved["grad_rows"])

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
            first, _ = self._tokens(saved["n"])
            gradients.put("pos.weight", partial(_position_backward, first), rows)
        if self.tp.size > 1:
            self._table.backward_weight(saved["table"], gradients, add=tied)
        else:
            gradients.put("tok.weight", nn.embedding_backward, saved["tokens"], rows, add=tied)
        self.release(saved)


def _position_backward(first: int, grad: Array, out: Array, accumulate: bool) -> Array:
    xp = namespace(grad)
    if not accumulate:
        out[...] = 0
    rows = out[first : first + grad.shape[1], :]
    return xp.add(rows, xp.sum(grad, axis=0), out=rows)


class Head(Part):
    """Final norm, projection to the vocabulary and loss: the last layer."""

    @property
    def _weight(self) -> str:
        return "tok.weight" if self.config.tied else "head.weight"

    def _shards(self) -> dict[str, ShardedParameter]:
        c, shards = self.config, self._norm_shards("ln")
        if not c.tied:
            shape = (c.vocabulary, c.width)
            shards["head.weight"] = ShardedParameter(shape, self.tp.size, 0, padded=True)
        return shards

    @cached_property
    def _loss(self) -> VocabParallelCrossEntropy:
        c = self.config
        return VocabParallelCrossEntropy(
            self.tp.comm,
            c.vocabulary,
            ignore_index=c.ignore_index,
            label_smoothing=c.label_smoothing,
        )

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
        if self.tp.size > 1:
            start = time.perf_counter()
            loss, saved["split"] = self._loss.forward(logits, targets)
            self.tp.communication_s += time.perf_counter() - start
            return loss_scale * loss, saved
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
            Shape ``(batch, sequence, vocabulary)``, or this rank's part of the vocabulary.
        """
        h = self._norm("ln", p, x, saved)
        self.workspace.give(x)
        weight = p[self._weight]
        return nn.linear(h, weight, out=self._like(h, weight.shape[0]))

    def joined(self, logits: Array) -> Array:
        """Scores over the whole vocabulary. Collective.

        Parameters
        ----------
        logits : Array
            As `logits` gave them.

        Returns
        -------
        Array
            Themselves on one rank.
        """
        if self.tp.size == 1:
            return logits
        whole: Array = self.tp.comm.all_gather(logits, dim=-1)
        return whole[..., : self.config.vocabulary]

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
        c, logits, scale = self.config, saved["logits"], saved["scale"]
        # In place of the logits, which nothing reads again.
        if self.tp.size > 1:
            self._loss.backward(saved["split"], scale, out=logits)
        else:
            targets, lse = saved["targets"], saved["lse"]
            nn.cross_entropy_backward(
                logits, targets, lse, scale, c.ignore_index, c.label_smoothing, out=logits
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
