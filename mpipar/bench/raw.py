"""The column "raw": the same operations by mpi4py itself, as a careful user would write them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from mpipar.comm.call import Array
from mpipar.comm.mpi.library import MPI

Call = Callable[..., Any]


class Raw:
    """mpi4py on a duplicate of a communicator.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        Of all measured ranks. Collective.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm.Dup()
        self.rank, self.size = comm.rank, comm.size
        self.barrier = self.comm.Barrier

    def close(self) -> None:
        """Free the duplicate. Collective."""
        self.comm.Free()

    def slowest(self, seconds: list[float]) -> Array:
        """Of each measurement the time of the slowest rank. Collective.

        Parameters
        ----------
        seconds : list of float
            Of this rank.

        Returns
        -------
        ndarray
            Of all ranks.
        """
        times = np.array(seconds)
        self.comm.Allreduce(MPI.IN_PLACE, times, MPI.MAX)
        return times

    def total(self, count: int) -> int:
        """The sum of a count over the ranks. Collective."""
        return int(self.comm.allreduce(count))

    def call(self, op: str, x: Array, out: Array) -> Call:
        """One blocking operation from `x` into `out`.

        Parameters
        ----------
        op : str
            Name of the operation.
        x, out : ndarray
            Contiguous; a broadcast overwrites `x` itself.

        Returns
        -------
        callable
            The MPI's own method with its arguments.
        """
        comm = self.comm
        if op == "broadcast":
            return partial(comm.Bcast, x, 0)
        if op == "send_recv":
            return self._send_recv(x, out)
        verbs: dict[str, Call] = {
            "all_reduce": comm.Allreduce,
            "reduce_scatter": comm.Reduce_scatter_block,
            "all_gather": comm.Allgather,
            "all_to_all": comm.Alltoall,
        }
        verb = verbs[op]
        return lambda: verb(x, out)  # called as a user would, like ours

    def in_place(self, x: Array) -> Call:
        """An all-reduce over its own input, the faster form where memory is short."""
        return partial(self.comm.Allreduce, MPI.IN_PLACE, x)

    def _send_recv(self, x: Array, out: Array) -> Call:
        """From rank 0 to rank 1; the others do nothing."""
        if self.rank == 0:
            return partial(self.comm.Send, x, 1)
        return partial(self.comm.Recv, out, 0) if self.rank == 1 else partial(len, x)
