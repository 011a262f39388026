"""Shards in memory that the ranks of a node share, so that a move is one copy by its receiver."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np

from mpipar.comm import Communicator
from mpipar.comm.node import NodeCommunicator
from mpipar.sharding.sharding import ArraySpec
from mpipar.sharding.transfer import Array, Transfer

__all__ = ["NodeCommunicator", "local_empty", "pull"]


class Lease:
    """A block of node memory that goes back when the last array on it is gone.

    Parameters
    ----------
    comm : NodeCommunicator
        Whose memory.
    n_elements : int
        Its size.
    dtype : dtype
        Of its elements.
    """

    def __init__(self, comm: NodeCommunicator, n_elements: int, dtype: np.dtype[Any]) -> None:
        self.flat = comm.empty(n_elements, dtype)
        # Bytes, since the interface cannot name the types of ml_dtypes.
        self.__array_interface__ = self.flat.view(np.uint8).__array_interface__
        weakref.finalize(self, comm.free, self.flat).atexit = False

    def array(self, shape: tuple[int, ...]) -> Array:
        """The first elements; every view of them keeps the lease."""
        n = int(np.prod(shape, dtype=np.int64))
        whole: Array = np.asarray(self).view(self.flat.dtype)
        return whole[:n].reshape(shape)

    def holds(self, x: Array, capacity: int) -> bool:
        """Whether `x` is the beginning of this block, and the block has that size."""
        flat = self.flat
        return (
            flat.size == capacity
            and flat.dtype == x.dtype
            and x.flags.c_contiguous
            and flat.__array_interface__["data"] == x.__array_interface__["data"]
        )


def local_empty(comm: Communicator, spec: ArraySpec, rank: int) -> Array:
    """An array for a rank's shard, in node memory where there is such. Not collective.

    Parameters
    ----------
    comm : Communicator
        Of all ranks.
    spec : ArraySpec
        What it is a shard of.
    rank : int
        Whose shard.

    Returns
    -------
    ndarray
        C-ordered, not initialised.
    """
    shape = spec.local_shape(rank)
    if not isinstance(comm, NodeCommunicator) or not spec.shape or not spec.volumes.max():
        return np.empty(shape, spec.dtype)
    return Lease(comm, int(spec.volumes.max()), spec.dtype).array(shape)


def _lease_of(x: Array) -> Lease | None:
    base: Any = x
    while isinstance(base, np.ndarray):
        base = base.base
    return base if isinstance(base, Lease) else None


def pull(comm: NodeCommunicator, x: Array, transfer: Transfer, out: Array) -> None:
    """Read what this rank wants out of its peers' arrays. Collective.

    Parameters
    ----------
    comm : NodeCommunicator
        The ranks of the group.
    x : ndarray
        What this rank has; copied once where peers cannot read it.
    transfer : Transfer
        Who sends what to whom.
    out : ndarray
        Where the result goes, apart from `x`.
    """
    lease, staged = _lease_of(x), None
    if lease is not None and lease.holds(x, transfer.capacity):
        flat = lease.flat
    else:
        flat = staged = comm.empty(transfer.capacity, x.dtype)
        flat[: x.size].reshape(x.shape)[...] = x
    rows = comm.views(flat)
    for peer, n, shape, source, spot in transfer.takes:
        out[spot] = rows[peer][:n].reshape(shape)[source]
    comm.barrier()  # then the owners may change their arrays
    if staged is not None:
        comm.free(staged)
