"""Memory that a communicator hands out: near its peers where the transport has such memory."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from mpipar.comm.arrays import as_array, flat
from mpipar.comm.call import Array, Call, CommInfo, Op
from mpipar.comm.channel import Receiver, Sender
from mpipar.comm.node.arena import private_empty
from mpipar.comm.port import Port
from mpipar.comm.request import Request
from mpipar.comm.verbs import Verbs


class Storage(Verbs):
    """The part of a communicator that hands out arrays; here in private memory."""

    def __init__(self, info: CommInfo) -> None:
        super().__init__(info)
        self._results: dict[int, tuple[Array, Array]] = {}

    @property
    def shares_memory(self) -> bool:
        """Whether all ranks of the group share the memory of a node: the same on every rank."""
        return False

    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike = np.float32) -> Array:
        """An array that peers on the node can read and write where it lies. Not collective.

        Calls on such arrays are the fastest: nothing is staged.

        Parameters
        ----------
        shape : int or tuple of int
            Of the array.
        dtype : dtype
            Element type.

        Returns
        -------
        ndarray
            C-ordered, aligned to 64 bytes, not initialised; give it back by `free`.
        """
        return private_empty(shape, dtype)

    def empty_shared(self, shape: int | tuple[int, ...], dtype: DTypeLike = np.float32) -> Array:
        """One array for all ranks of a node, to be the `out` of a call. Collective.

        The result of ``all_reduce``, ``all_gather`` or ``broadcast`` with this `out` exists once a
        node instead of once a rank. It stays valid until a rank passes the same `out` again, which
        takes effect when all ranks have come to that call.

        Parameters
        ----------
        shape : int or tuple of int
            The same on every rank.
        dtype : dtype
            Element type, the same on every rank.

        Returns
        -------
        ndarray
            Read-only; give it back by `free`.
        """
        return self._read_only(private_empty(shape, dtype))

    def free(self, array: Array) -> None:
        """Give back an array of `empty`, or (collective) of `empty_shared`.

        Parameters
        ----------
        array : ndarray
            Not to be used any more.
        """
        self._results.pop(id(array), None)

    def views(self, x: Array) -> list[Array]:
        """The arrays of all ranks, read where they lie if they share memory. Collective.

        Parameters
        ----------
        x : ndarray
            Same shape and dtype on every rank.

        Returns
        -------
        list of ndarray
            Read-only, in rank order, to be read before the next collective call on this group.
        """
        array = as_array(x, "x")
        rows = list(self.all_gather(array[None]))
        for row in rows:
            row.flags.writeable = False
        return rows

    def channel_to(
        self,
        dest: int,
        shape: int | tuple[int, ...],
        dtype: DTypeLike = np.float32,
        n_slots: int = 2,
        key: int = 0,
    ) -> Sender:
        """The producer's end of a channel; the other end is the peer's `channel_from`.

        Parameters
        ----------
        dest : int
            The reader; not collective.
        shape, dtype
            Of every array, the same at both ends.
        n_slots : int
            How many arrays may be under way.
        key : int
            Tells channels between the same ranks apart; ends of one key meet in their order.

        Returns
        -------
        Sender
            Does not wait for the peer.
        """
        return Sender(self, dest, shape, dtype, n_slots, key)

    def channel_from(
        self,
        source: int,
        shape: int | tuple[int, ...],
        dtype: DTypeLike = np.float32,
        n_slots: int = 2,
        key: int = 0,
    ) -> Receiver:
        """The reader's end of a channel.

        Parameters
        ----------
        source : int
            The producer; not collective.
        shape, dtype, n_slots, key
            As in `channel_to`.

        Returns
        -------
        Receiver
            Does not wait for the peer.
        """
        return Receiver(self, source, shape, dtype, n_slots, key)

    def port(self) -> Port:
        """Where channels of this group lie."""
        return Port()

    def begin_message(self, call: Call) -> Request:
        """Start a message of the library's own tags."""
        return self.submit(call)

    def submit(self, call: Call) -> Request:
        """Start one call; implemented by the transport."""
        raise NotImplementedError

    def _read_only(self, whole: Array) -> Array:
        """A read-only view which the verbs know as a result."""
        view = whole.view()
        view.flags.writeable = False
        self._results[id(view)] = (view, whole)
        return view

    def _views_call(self, x: Any) -> Call:
        array = as_array(x, "x")
        return Call(Op.ALL_GATHER, flat(array), shape=array.shape, agreed=f"views {array.shape}")
