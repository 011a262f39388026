"""Vocabulary-parallel embedding and cross-entropy: a rank holds a run of the token values.

The vocabulary is padded with zero rows to equal shares; the padding is never looked up and takes no
part in the softmax. Logits are never gathered: three numbers a token are reduced instead.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpipar import nn
from mpipar.comm import Communicator, ReduceOp
from mpipar.errors import OutOfRange
from mpipar.nn.array import as_rows, filled, row_chunks
from mpipar.nn.checks import check_floating, check_indices, check_shape
from mpipar.tensor_parallel.layer import ParallelLayer, Parameters, Saved
from mpipar.tensor_parallel.operators import Array
from mpipar.tensor_parallel.overlap import product_reduce, product_scatter
from mpipar.tensor_parallel.parameter import ShardedParameter


class VocabParallelEmbedding(ParallelLayer):
    """A table of which each rank holds a run of rows.

    Parameters
    ----------
    comm : Communicator
        The tensor-parallel group of n ranks.
    vocabulary, width : int
        Shape of the whole table.
    prefix : str
        Start of the name ``weight``.
    sequence_parallel : bool
        The output is split along dim -2, which must divide by n.

    Notes
    -----
    Cost: an all-reduce of the output; with `sequence_parallel` a reduce-scatter of it and an
    all-gather of its gradient.
    """

    def __init__(
        self,
        comm: Communicator,
        vocabulary: int,
        width: int,
        *,
        prefix: str = "",
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__(comm, prefix)
        self.vocabulary = vocabulary
        self.sequence_parallel = sequence_parallel
        table = ShardedParameter((vocabulary, width), comm.size, 0, padded=True)
        self.parameters[prefix + "weight"] = table
        self.start, self.stop = table.ranges(comm.rank)[0]

    def forward(self, p: Parameters, tokens: Array) -> tuple[Array, Saved]:
        """Look tokens up; each row comes from the one rank that holds it.

        Parameters
        ----------
        p : mapping of str to ndarray
            This rank's parameters.
        tokens : ndarray
            Integers of shape ``(..., sequence)``, the same on every rank.

        Returns
        -------
        tuple of ndarray and Saved
            Shape ``(..., sequence, width)``, or this rank's part of the sequence.

        Raises
        ------
        OutOfRange
            If a token lies outside the vocabulary.
        """
        check_indices("embedding index", tokens, self.vocabulary)
        table = p[self.prefix + "weight"]
        local = tokens - self.start
        outside = (local < 0) | (local >= self.stop - self.start)
        local[outside] = 0

        def look_up(index: Array) -> Array:
            rows: Array = nn.embedding(index[..., 0], table)
            rows[index[..., 1] != 0] = 0
            return rows

        index = np.stack([local, outside], axis=-1)
        run = product_scatter if self.sequence_parallel else product_reduce
        return run(self.comm, index, look_up, 1), Saved(index=local, inside=~outside)

    def backward_input(self, saved: Saved, grad: Array) -> None:
        """Keep what the table needs: there is no input gradient.

        Parameters
        ----------
        saved : Saved
            As `forward` returned it.
        grad : ndarray
            Gradient of the output.
        """
        if self.sequence_parallel and self.comm.size > 1:
            grad = self.comm.all_gather(grad, dim=-2)
        saved["grad"] = grad

    def backward_weight(self, saved: Saved, gradients: Any, add: bool = False) -> None:
        """Write the gradient of this rank's rows and release what was saved.

        Parameters
        ----------
        saved : Saved
            As `backward_input` left it.
        gradients : mapping of str to ndarray, or a model's ``Gradients``
            Where it goes; a mapping must hold an array for it.
        add : bool
            A tied head wrote to it before.
        """
        inside = saved["inside"]
        arrays = (saved["index"][inside], saved["grad"][inside])
        self._put(gradients, "weight", self._table_gradient, *arrays, add=add)
        saved.clear()

    def _table_gradient(
        self, index: Array, rows: Array, out: Array | None = None, accumulate: bool = False
    ) -> Array:
        n_rows = self.parameters[self.prefix + "weight"].local_shape[0]
        found: Array = nn.embedding_backward(index, rows, n_rows, out=out, accumulate=accumulate)
        return found


class VocabParallelCrossEntropy:
    """Softmax cross-entropy of logits that are split along the vocabulary.

    The loss of a row is ``(1 - e) (lse - z_t) + e (lse - mean z) + z_loss lse**2`` with the
    log-sum-exp and the mean over the whole vocabulary of V values.

    Parameters
    ----------
    comm : Communicator
        The tensor-parallel group of n ranks.
    vocabulary : int
        V, without padding.
    ignore_index : int
        Target value of rows that do not count.
    label_smoothing : float
        e, the share of the target spread over all V values, in [0, 1).
    z_loss : float
        Weight of the squared log-sum-exp (Chowdhery et al. 2022), 0 or more.

    Notes
    -----
    Cost: 4 numbers a row in two all-reduces, forward; nothing backward.
    """

    def __init__(
        self,
        comm: Communicator,
        vocabulary: int,
        *,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
    ) -> None:
        if not 0.0 <= label_smoothing < 1.0:
            raise OutOfRange("label_smoothing", "[0, 1)", label_smoothing)
        if not 0.0 <= z_loss < np.inf:
            raise OutOfRange("z_loss", "[0, inf)", z_loss)
        self.comm, self.vocabulary = comm, vocabulary
        self.ignore_index, self.label_smoothing, self.z_loss = ignore_index, label_smoothing, z_loss
        self._shard = ShardedParameter((vocabulary,), comm.size, 0, padded=True)
        self._start, self._stop = self._shard.ranges(comm.rank)[0]

    def forward(self, logits: Array, targets: Array) -> tuple[float, Saved]:
        """Sum of the losses of all rows that count. Collective.

        Parameters
        ----------
        logits : ndarray
            This rank's part, shape ``(..., padded vocabulary / n)``.
        targets : ndarray
            Global token values of shape ``logits.shape[:-1]``, the same on every rank.

        Returns
        -------
        tuple of float and Saved
            The sum in nats, the same on every rank, and what backward needs.

        Raises
        ------
        UnsupportedArray
            If shapes or dtypes do not fit, such as for logits that were gathered before.
        OutOfRange
            If a target lies outside the vocabulary.
        """
        rows, flat, counted = self._checked(logits, targets)
        top = self.comm.all_reduce(self._top(rows), ReduceOp.MAX)
        local, inside = self._own(flat)
        sums = filled(rows, (3, len(rows)), 0.0)  # of exp(z - top), of z at the target, of z
        for c in row_chunks(rows) if rows.shape[1] else ():
            z = rows[c]
            sums[0, c] = np.exp(z - top[c, None]).sum(axis=1)
            sums[1, c] = np.where(inside[c], np.take_along_axis(z, local[c, None], 1)[:, 0], 0)
            if self.label_smoothing:
                sums[2, c] = z.sum(axis=1)
        total, target, whole = self.comm.all_reduce(sums)
        lse = np.log(total) + top
        e = self.label_smoothing
        losses = lse - (1.0 - e) * target - (e / self.vocabulary) * whole + self.z_loss * lse**2
        loss = float(np.sum(losses * counted, dtype=np.float64))
        return loss, Saved(logits=logits, local=local, inside=inside, counted=counted, lse=lse)

    def backward(self, saved: Saved, scale: float = 1.0, out: Array | None = None) -> Array:
        """Gradient of ``scale * loss`` with respect to this rank's logits.

        Parameters
        ----------
        saved : Saved
            As `forward` returned it.
        scale : float
            Gradient of the loss sum.
        out : ndarray, optional
            Where it goes; may be the logits.

        Returns
        -------
        ndarray
            Shape of the logits; zero in the padding.
        """
        logits = saved["logits"]
        out = np.empty_like(logits) if out is None else out
        check_shape("cross-entropy backward", "out", out, tuple(logits.shape))
        n, whole = self._stop - self._start, as_rows(out, "out")
        rows, outs = as_rows(logits)[:, :n], whole[:, :n]
        lse, e = saved["lse"], self.label_smoothing
        # Of the loss of each row with respect to its log-sum-exp, and to its target's logit.
        weight = (saved["counted"] * scale).astype(rows.dtype)
        gain, pull = weight * (1.0 + 2.0 * self.z_loss * lse), weight * (1.0 - e)
        for c in row_chunks(rows):
            p = np.subtract(rows[c], lse[c, None], out=outs[c])
            np.exp(p, out=p)
            np.multiply(p, gain[c, None], out=p)
            if e:
                np.subtract(p, (weight[c] * (e / self.vocabulary))[:, None], out=p)
        hit = np.flatnonzero(saved["inside"])
        outs[hit, saved["local"][hit]] -= pull[hit]
        whole[:, n:] = 0
        return out

    def _checked(self, logits: Array, targets: Array) -> tuple[Array, Array, Array]:
        check_floating("cross_entropy", logits=logits)
        width = self._shard.local_shape[0]
        check_shape("vocab-parallel cross_entropy", "logits", logits, (*targets.shape, width))
        flat = np.reshape(targets, -1)
        counted = flat != self.ignore_index
        flat = np.where(counted, flat, 0)
        check_indices("cross_entropy target", flat, self.vocabulary)
        return as_rows(logits)[:, : self._stop - self._start], flat, counted

    def _top(self, rows: Array) -> Array:
        least = float(np.finfo(rows.dtype).min)
        top: Array = rows.max(axis=1) if rows.shape[1] else filled(rows, (len(rows),), least)
        return top

    def _own(self, flat: Array) -> tuple[Array, Array]:
        """Targets in this rank's columns, and which rows have theirs here."""
        inside = (flat >= self._start) & (flat < self._stop)
        return np.where(inside, flat - self._start, 0), inside
