"""The column "raw": the same operations by mpi4py itself, as a careful user would write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from mpipar.comm.call import Array

Call = Callable[[], Any]


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
            Makes the call and returns where its result lies.
        """
        comm = self.comm
        if op == "all_reduce":
            return lambda: (comm.Allreduce(x, out), out)[1]
        if op == "reduce_scatter":
            return lambda: (comm.Reduce_scatter_block(x, out), out)[1]
        if op == "all_gather":
            return lambda: (comm.Allgather(x, out), out)[1]
        if op == "all_to_all":
            return lambda: (comm.Alltoall(x, out), out)[1]
        if op == "broadcast":
            return lambda: (comm.Bcast(x, 0), x)[1]
        return self._send_recv(x, out)

    def in_place(self, x: Array) -> Call:
        """An all-reduce over its own input, the faster form where memory is short."""
        return lambda: (self.comm.Allreduce(MPI.IN_PLACE, x), x)[1]

    def _send_recv(self, x: Array, out: Array) -> Call:
        """From rank 0 to rank 1; the others do nothing."""
        if self.rank == 0:
            return lambda: (self.comm.Send(x, 1), x)[1]
        if self.rank == 1:
            return lambda: (self.comm.Recv(out, 0), out)[1]
        return lambda: x
