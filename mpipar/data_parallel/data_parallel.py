"""The acting half: parameters alike on every rank, gradients summed while they are produced."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpipar.comm import Communicator, Op, Request
from mpipar.comm.arrays import new_array
from mpipar.data_parallel.agreement import agree
from mpipar.data_parallel.buckets import plan_buckets
from mpipar.errors import CollectiveMismatch, EmptyInput, NonFiniteValue, OutOfRange

Array = NDArray[Any]
_CHUNK = 1 << 15


class DataParallel:
    """Replicas of a model whose gradients are summed over the ranks.

    **The scale contract.** Gradients are *sums*: over ranks, over microbatches, over items. A rank
    scales the summed loss of each microbatch by ``loss_scale(n_items)``, one over the number of
    items of all ranks and microbatches of the step, before the backward pass. Then the result is
    the gradient of the mean loss, for any number of ranks and microbatches and any uneven counts.

    Parameters
    ----------
    comm : Communicator
        The data-parallel group, such as ``mesh.comm("dp")``. Collective to make.
    parameters : mapping of str to array
        The user's own arrays (NumPy, or anything with DLPack on the CPU), same names, shapes and
        dtypes on every rank. Rank 0's values are copied into them on every rank.
    frozen : iterable of str
        Names that get no gradient, together with all names tied to them.
    tied : iterable of sequence of str
        Names that are copies of one parameter; names that share memory are found without this.
        The gradients of all copies are added, and the sum stands under every name.
    bucket_bytes : int
        Gradients travel in buckets of about this size.
    allow_empty : bool
        Take no parameters at all, as on a pipeline rank without any, which still takes part.

    Attributes
    ----------
    gradients : dict of str to ndarray
        Where the backward pass writes; views of the buckets, so nothing is packed. The buckets lie
        in the node's shared memory (``comm.empty``) and are summed where they are.
    trainable : tuple of str
        Names to update: each array once, so that copies in arrays of their own stay equal.
    communication_s : float
        Seconds spent in communication calls so far.

    Notes
    -----
    Cost of a step: 2 (n-1)/n bytes sent a rank for each byte of trainable parameters.
    """

    def __init__(
        self,
        comm: Communicator,
        parameters: Mapping[str, Any],
        *,
        frozen: Iterable[str] = (),
        tied: Iterable[Sequence[str]] = (),
        bucket_bytes: int = 4 << 20,
        allow_empty: bool = False,
    ) -> None:
        self.comm = comm
        self.communication_s = 0.0
        agreed = agree(comm, parameters, frozen, tied, bucket_bytes, allow_empty)
        views, self._canonical = agreed.views, agreed.canonical
        for name, first in self._canonical.items():
            if first == name:
                comm.broadcast(views[name], out=views[name])
            else:
                views[name][...] = views[first]
        self.parameters = views
        live = [n for n in views if self._canonical[n] not in agreed.frozen]
        self.trainable = tuple(n for n in live if agreed.arrays[n] == n)
        logical = [n for n in live if self._canonical[n] == n]
        described = [
            (n, views[n].shape, views[n].dtype.name, views[n].dtype.itemsize) for n in logical
        ]
        self.buckets = plan_buckets(described, bucket_bytes)
        self._buffers = [_buffer(comm, b.size, views[b.names[0]]) for b in self.buckets]
        for buffer in self._buffers:
            buffer[...] = 0
        self.gradients: dict[str, Array] = {}
        self._bucket_of: dict[str, int] = {}
        for i, bucket in enumerate(self.buckets):
            for name, offset in zip(bucket.names, bucket.offsets, strict=True):
                flat = self._buffers[i][offset : offset + views[name].size]
                self.gradients[name] = flat.reshape(views[name].shape)
                self._bucket_of[name] = i
        for name in live:
            if name not in self.gradients:
                self.gradients[name] = np.zeros_like(views[name])
        self._copies = {n: [c for c in live if c != n and self._canonical[c] == n] for n in logical}
        self._start_step()

    def _start_step(self) -> None:
        self._waiting = [{n for b in bucket.names for n in [b, *self._copies[b]]}
                         for bucket in self.buckets]  # fmt: skip
        self._requests: list[Request] = []

    def close(self) -> None:
        """Give the buckets back to the communicator. Local; ``gradients`` are not to be used after.

        Without it they are kept until the communicator is closed.
        """
        for buffer in self._buffers:
            if isinstance(buffer, np.ndarray):
                self.comm.free(buffer)
        self._buffers, self.gradients = [], {}

    def loss_scale(self, n_items: int) -> float:
        """One over the number of items of this step. Collective.

        Parameters
        ----------
        n_items : int
            Items (tokens, samples) of this rank, over all its microbatches.

        Returns
        -------
        float
            By which the *sum* of the losses of each microbatch is multiplied before the backward.
        """
        start = time.perf_counter()
        total = int(self.comm.all_reduce(np.array(n_items, np.int64)))
        self.communication_s += time.perf_counter() - start
        if total < 1:
            raise EmptyInput("loss_scale", f"{n_items} items here and {total} on all ranks")
        return 1.0 / total

    def zero_gradients(self) -> None:
        """Set every gradient to zero, for models that only add to them. Local."""
        for gradient in self.gradients.values():
            gradient[...] = 0

    def ready(self, name: str) -> None:
        """Say that a gradient is final on this rank; full buckets start to travel. Local.

        Buckets start in one agreed order whatever the order of the calls, so ranks may produce
        gradients in different orders. To be called in the last microbatch only.

        Parameters
        ----------
        name : str
            A trainable parameter or one of its copies; a frozen one is ignored.

        Raises
        ------
        CollectiveMismatch
            For an unknown name, or the second time in a step: its bucket may be under way.
        """
        if name not in self.gradients:
            if name not in self.parameters:
                raise CollectiveMismatch(f"ready: no parameter {name!r}; one of {self.trainable}")
            return
        waiting = self._waiting[self._bucket_of[self._canonical[name]]]
        if name not in waiting:
            raise CollectiveMismatch(
                f"ready({name!r}) for the second time in one step: call it in the last microbatch "
                "only, and finish() before the next step"
            )
        waiting.remove(name)
        while len(self._requests) < len(self.buckets) and not self._waiting[len(self._requests)]:
            self._launch()
        if self._requests:
            start = time.perf_counter()
            self.comm.progress()
            self.communication_s += time.perf_counter() - start

    def _launch(self) -> None:
        index = len(self._requests)
        for name in self.buckets[index].names:
            for copy in self._copies[name]:
                self.gradients[name] += self.gradients[copy]
        start = time.perf_counter()
        buffer = self._buffers[index]
        self._requests.append(self.comm.begin_all_reduce(buffer, out=buffer))
        self.communication_s += time.perf_counter() - start

    def finish(self) -> None:
        """Reduce what has not started yet and wait for all of it. Collective.

        After it ``gradients`` hold the sums over all ranks, equal on every rank. A parameter that
        was never `ready` takes part with what its buffer holds: where a backward pass may leave
        some out, `zero_gradients` comes before it. Once a step: it cannot tell sums from gradients
        written anew, so a second call would sum the sums.
        """
        while len(self._requests) < len(self.buckets):
            self._launch()
        start = time.perf_counter()
        for request in self._requests:
            request.wait()
        self.communication_s += time.perf_counter() - start
        for name, copies in self._copies.items():
            for copy in copies:
                self.gradients[copy][...] = self.gradients[name]
        self._start_step()

    def gradient_norm(self) -> float:
        """Global norm of the summed gradients, each logical parameter once. Local after `finish`.

        Returns
        -------
        float
            Root of the sum of squares, summed in float64; equal on every rank.

        Raises
        ------
        NonFiniteValue
            If a gradient is NaN or infinite.
        """
        total = 0.0
        for buffer in self._buffers:
            for start in range(0, buffer.size, _CHUNK):
                part = buffer[start : start + _CHUNK]
                part = part.view(part.real.dtype) if part.dtype.kind == "c" else part
                part = part.astype(np.float64, copy=False)
                total += float(np.dot(part, part))
        if not np.isfinite(total):
            names = [n for n in self.trainable if not np.isfinite(self.gradients[n]).all()]
            raise NonFiniteValue(f"gradient of {', '.join(names[:3])}", total)
        return float(np.sqrt(total))

    def clip(self, max_norm: float) -> float:
        """Scale all gradients so that their global norm is at most `max_norm`. Local.

        Parameters
        ----------
        max_norm : float
            Above 0.

        Returns
        -------
        float
            The norm before.
        """
        if not max_norm > 0:
            raise OutOfRange("max_norm", "above 0", max_norm)
        norm = self.gradient_norm()
        if norm > max_norm:
            for gradient in self.gradients.values():
                gradient *= max_norm / norm
        return norm

    @property
    def communicates(self) -> tuple[Op, int]:
        """The collective of a step and its bytes per rank."""
        return Op.ALL_REDUCE, sum(buffer.nbytes for buffer in self._buffers)


def _buffer(comm: Communicator, size: int, like: Any) -> Array:
    """Memory for a bucket: the node's, or that of the parameters' device."""
    if isinstance(like, np.ndarray):
        return comm.empty(size, like.dtype)
    buffer: Array = new_array(like, size, like.dtype)
    return buffer
