"""Arrays in node memory: own ones, one result for all ranks of a node, and views of peers."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from mpipar.comm.base import Communicator
from mpipar.comm.call import Array, Call
from mpipar.comm.node.arena import checked_spec, private_empty
from mpipar.comm.node.calls import NodeCalls
from mpipar.comm.node.host import Door, Host, Queue
from mpipar.comm.node.plans import Plan, Plans, address, unowned
from mpipar.comm.node.replay import views_again
from mpipar.errors import CountOutOfRange

_log = logging.getLogger("mpipar")


class NodeStorage(Communicator):
    """The part of a `NodeCommunicator` that hands out arrays."""

    host: Host
    calls: Queue
    programs: NodeCalls
    door: Door
    old_view: int
    _plans: Plans

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
        checked_spec(shape, dtype)  # the same refusal on every rank
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
        shown = self.shown(x)
        return super().views(x) if shown is None else list(shown)

    def shown(self, x: Array) -> tuple[Array, ...] | None:
        """As `views`: the very same arrays as before where all ranks give the arrays of before.

        Parameters
        ----------
        x : ndarray
            As in `views`.

        Returns
        -------
        tuple of ndarray or None
            None where a rank's array is out of reach.
        """
        key: tuple[Any, ...] = ("views", id(x))
        if type(x) is np.ndarray and x.flags.c_contiguous:
            key = ("views", id(x.dtype), x.shape, address(x))
            plan = self._plans.known.get(key)
            if plan is not None:
                return views_again(self, plan)  # type: ignore[arg-type]
        memory, call, block = self.host.arena.memory, self._views_call(x), -1
        place = -1 if call.input is None else memory.locate(call.input)
        if place >= 0 and call.input is not None and x.flags.c_contiguous:
            code = self.programs.code(call, "views")
            shown = call._replace(input=unowned(call.input))
            plan = Plan(shown, "views", (code, place, -1), x, None)
            self._plans.keep(key, plan)
            return views_again(self, plan)  # type: ignore[arg-type]
        if call.input is not None and call.input.size:
            call, block = self._copied(call, call.input)
        found: list[list[Array] | None] = []
        self.enter(call)
        try:
            self.calls.run(call, self.programs.collected(call, found))
        finally:
            self.door.leave()
            self.drop_old_view()
            self.old_view = block
        return self.as_shown(found[0], call)

    def _copied(self, call: Call, source: Array) -> tuple[Call, int]:
        """The call on a copy in node memory, and its block; unchanged where there is no room."""
        arena = self.host.arena
        try:
            block = arena.take(source.nbytes)
        except CountOutOfRange as error:
            _log.warning("rank %d: views are copies: %s", self.rank, error)
            return call, -1
        copy = arena.memory.view(block, source.size, source.dtype)
        copy[...] = source
        return call._replace(input=copy), block

    def drop_old_view(self) -> None:
        """Give back the copy that the views before this call were of."""
        if self.old_view >= 0:
            self.host.arena.give(self.old_view)
            self.old_view = -1

    def as_shown(self, found: list[Array] | None, call: Call) -> tuple[Array, ...] | None:
        """Read-only arrays in the shape of the call."""
        if found is None:
            return None
        views = tuple(view.reshape(call.shape or ()) for view in found)
        for view in views:
            view.flags.writeable = False
        return views
