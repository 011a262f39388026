"""Shards in memory that the ranks of a node share, so that a move is one copy by its receiver."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpipar.comm import Communicator
from mpipar.comm.node.communicator import NodeCommunicator
from mpipar.comm.node.plans import unowned
from mpipar.sharding.sharding import ArraySpec
from mpipar.sharding.transfer import Array, Transfer

_MAX_MOVES = 64
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
        self.moves: dict[tuple[int, int, int], _Moves] = {}
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
    lease, key = _lease_of(x), (id(x), id(transfer), id(out))
    moves = None if lease is None else lease.moves.get(key)
    is_known = moves is not None and moves.fits(x, transfer, out)
    if lease is None or not (is_known or lease.holds(x, transfer.capacity)):
        staged = comm.empty(transfer.capacity, x.dtype)
        staged[: x.size].reshape(x.shape)[...] = x
        _Moves(comm.views(staged), x, transfer, out).make()
        comm.barrier()  # then the owners may change their arrays
        comm.free(staged)
        return
    rows = comm.shown(lease.flat)
    if rows is None:
        rows = tuple(comm.views(lease.flat))
    if moves is None or not is_known or moves.rows is not rows:
        if len(lease.moves) >= _MAX_MOVES:
            lease.moves.clear()
        moves = lease.moves[key] = _Moves(rows, x, transfer, out)
    moves.make()
    comm.barrier()


class _Moves:
    """The copies of one transfer: where to, and from where in peers' arrays.

    It knows `out` by its address, so that it keeps no result alive.
    """

    def __init__(self, rows: Sequence[Array], x: Array, transfer: Transfer, out: Array) -> None:
        self.rows, self.transfer = rows, transfer
        self.x, self.out = weakref.ref(x), weakref.ref(out)
        flat = unowned(out).reshape(out.shape) if out.size else out
        self.pairs = [
            (flat[spot], rows[peer][:n].reshape(shape)[source])
            for peer, n, shape, source, spot in transfer.takes
        ]

    def fits(self, x: Array, transfer: Transfer, out: Array) -> bool:
        """Whether the arrays of this rank are those of before."""
        return x is self.x() and out is self.out() and transfer is self.transfer

    def make(self) -> None:
        """Copy."""
        for target, source in self.pairs:
            target[...] = source
