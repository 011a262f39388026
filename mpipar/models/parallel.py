"""How the residual stream enters and leaves layers whose weights are split over ranks.

A part works on the whole sequence with its share of the heads or of the hidden width. What it is
given is made `whole` before, what it gives is `summed` after, and each is the adjoint of the other.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from mpipar.comm import Communicator, IdentityCommunicator
from mpipar.nn.array import Array
from mpipar.tensor_parallel.parameter import ShardedParameter
from mpipar.tensor_parallel.sequence import sum_replicated
from mpipar.units.remainder import exact_size


class TensorParallel:
    """The tensor-parallel group of a model, and what travels between its layers.

    Parameters
    ----------
    comm : Communicator, optional
        The group of n ranks; without it one rank holds everything.
    sequence_parallel : bool
        The residual stream is split along the sequence (Korthikanti et al. 2022): an all-gather
        and a reduce-scatter take the place of each all-reduce.

    Attributes
    ----------
    communication_s : float
        Seconds spent in its collectives so far.
    """

    def __init__(self, comm: Communicator | None = None, sequence_parallel: bool = False) -> None:
        self.comm = IdentityCommunicator() if comm is None else comm
        self.size, self.rank = self.comm.size, self.comm.rank
        self.sequence_parallel = sequence_parallel and self.size > 1
        self.communication_s = 0.0

    def shard(
        self, shape: tuple[int, ...], dim: int | None = None, segments: tuple[int, ...] = ()
    ) -> ShardedParameter:
        """Describe a parameter.

        Parameters
        ----------
        shape : tuple of int
            Of the whole.
        dim : int, optional
            Which dim is split; none for a parameter that every rank holds.
        segments : tuple of int
            As in `ShardedParameter`.

        Returns
        -------
        ShardedParameter
            Over this group.
        """
        return ShardedParameter(shape, self.size, dim, segments)

    def n_rows(self, sequence: int) -> int:
        """Rows of the residual stream that a rank holds of a sequence.

        Parameters
        ----------
        sequence : int
            Its length.

        Returns
        -------
        int
            All of them without sequence parallelism.

        Raises
        ------
        UnevenSplit
            If they do not divide by n.
        """
        if not self.sequence_parallel:
            return sequence
        return exact_size(sequence, self.size, "sequence", "tp")

    def whole(self, x: Array) -> Array:
        """Make a part's input, or the gradient of its output, whole. Collective.

        Parameters
        ----------
        x : Array
            Shape ``(batch, sequence, width)``, or this rank's part of the sequence.

        Returns
        -------
        Array
            `x` itself without sequence parallelism.
        """
        if not self.sequence_parallel:
            return x
        start = time.perf_counter()
        joined: Array = self.comm.all_gather(x, dim=-2)
        self.communication_s += time.perf_counter() - start
        return joined

    def summed(self, terms: Array) -> Array:
        """Sum a part's output, or the gradient of its input, over the ranks. Collective.

        Parameters
        ----------
        terms : Array
            This rank's terms, shape ``(batch, sequence, width)``; may be overwritten.

        Returns
        -------
        Array
            The sum in place of the terms, or this rank's part of it along the sequence.
        """
        if self.size == 1:
            return terms
        start = time.perf_counter()
        if self.sequence_parallel:
            total: Array = self.comm.reduce_scatter(terms, dim=-2)
        else:
            total = terms
            self.comm.all_reduce(terms, out=terms)
        self.communication_s += time.perf_counter() - start
        return total

    def finish(self, gradients: Mapping[str, Array], names: Iterable[str]) -> None:
        """Sum gradients of which every rank has the terms of its own tokens. Collective.

        Parameters
        ----------
        gradients : mapping of str to Array
            Complete over all microbatches; summed in place.
        names : iterable of str
            Parameters that act on the split stream; nothing is done without sequence parallelism.
        """
        chosen = [name for name in names if name in gradients]
        if self.sequence_parallel and chosen:
            start = time.perf_counter()
            sum_replicated(self.comm, gradients, chosen)
            self.communication_s += time.perf_counter() - start
