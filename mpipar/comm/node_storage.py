"""Arrays in node memory: own ones, one result for all ranks of a node, and views of peers."""

from __future__ import annotations

import logging
import threading

import numpy as np
from numpy.typing import DTypeLike

from mpipar.comm.arena import private_empty
from mpipar.comm.base import Communicator
from mpipar.comm.call import Array, Call
from mpipar.comm.node_calls import NodeCalls
from mpipar.comm.node_host import Host, Queue
from mpipar.errors import CountOutOfRange

_log = logging.getLogger("mpipar")


class NodeStorage(Communicator):
    """The part of a `NodeCommunicator` that hands out arrays."""

    host: Host
    calls: Queue
    programs: NodeCalls
    busy: threading.Lock
    old_view: int

    def enter(self, call: Call) -> None:
        """Make this rank the one that is in a call; implemented by the communicator."""
        raise NotImplementedError

    @property
    def shares_memory(self) -> bool:
        """Whether all ranks of the group share the memory of a node: here they do."""
        return True

    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike = np.float32) -> Array:
        """An array that the ranks of this node read and write where it lies. Not collective.

        Parameters
        ----------
        shape : int or tuple of int
            Of the array.
        dtype : dtype
            Element type.

        Returns
        -------
        ndarray
            C-ordered, not initialised, to be given back by `free`. In private memory, with a
            warning to the logger, where the node has no more to share.
        """
        try:
            return self.host.arena.empty(shape, dtype)
        except CountOutOfRange as error:
            _log.warning("rank %d takes private memory instead: %s", self.rank, error)
            return private_empty(shape, dtype)

    def empty_shared(self, shape: int | tuple[int, ...], dtype: DTypeLike = np.float32) -> Array:
        """One array for all ranks of a node, for results. Collective.

        Parameters
        ----------
        shape : int or tuple of int
            The same on every rank.
        dtype : dtype
            Element type, the same on every rank.

        Returns
        -------
        ndarray
            Read-only; `out` of all_reduce, all_gather and broadcast.
        """
        memory, array, place = self.host.arena.memory, None, np.array(-1, np.int64)
        if self.rank == 0:
            array = self.empty(shape, dtype)
            place[...] = memory.locate(array)
        offset = int(self.broadcast(place))
        if offset < 0:
            return super().empty_shared(shape, dtype)
        like = np.broadcast_to(np.empty((), dtype), shape)
        self.programs.shared_places.add(offset)
        return self._read_only(memory.view(offset, like.size, like.dtype).reshape(like.shape))

    def free(self, array: Array) -> None:
        """Give memory of `empty` back, or of `empty_shared`, which is collective.

        Parameters
        ----------
        array : ndarray
            Not to be used any more; private arrays are left to Python.
        """
        offset = self.host.arena.memory.locate(array)
        if self._results.pop(id(array), None) is not None:
            self.barrier()  # peers may still read it
            self.programs.shared_places.discard(offset)
            if self.rank != 0:
                return
        if offset >= 0:
            self.host.arena.give(offset)

    def views(self, x: Array) -> list[Array]:
        """The arrays of all ranks, read where they lie. Collective; moves no bytes.

        Parameters
        ----------
        x : ndarray
            Same shape and dtype on every rank; copied once if it is not in node memory.

        Returns
        -------
        list of ndarray
            Read-only, in rank order. The arrays stay their owners': read them before the next
            collective call on this group, after which they may change.
        """
        arena, block, call = self.host.arena, -1, self._views_call(x)
        source = call.input
        if source is not None and arena.memory.locate(source) < 0 and source.size:
            try:
                block = arena.take(source.nbytes)
                copy = arena.memory.view(block, source.size, source.dtype)
                copy[...] = source
                call = call._replace(input=copy)
            except CountOutOfRange as error:
                _log.warning("rank %d: views are copies: %s", self.rank, error)
        found: list[list[Array] | None] = []
        self.enter(call)
        try:
            self.calls.run(call, self.programs.collected(call, found))
        finally:
            self.busy.release()
            if self.old_view >= 0:
                arena.give(self.old_view)
            self.old_view = block
        if found[0] is None:
            return super().views(x)
        shown = [view.reshape(call.shape or ()) for view in found[0]]
        for view in shown:
            view.flags.writeable = False
        return shown
