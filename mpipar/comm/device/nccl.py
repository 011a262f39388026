"""Calls on device arrays carried out by NCCL, on the current stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpipar.comm.call import Call, Op, ReduceOp
from mpipar.comm.device.arrays import Device, address

_NAMES = {
    "int8": "NCCL_INT8",
    "uint8": "NCCL_UINT8",
    "int32": "NCCL_INT32",
    "uint32": "NCCL_UINT32",
    "int64": "NCCL_INT64",
    "uint64": "NCCL_UINT64",
    "float32": "NCCL_FLOAT32",
    "float64": "NCCL_FLOAT64",
}
_OPS = {
    ReduceOp.SUM: "NCCL_SUM",
    ReduceOp.PRODUCT: "NCCL_PROD",
    ReduceOp.MIN: "NCCL_MIN",
    ReduceOp.MAX: "NCCL_MAX",
}
Block = tuple[int, int]
"""Start and length, in elements."""


def can_carry(call: Call) -> bool:
    """Whether NCCL gives NumPy's result: no sums in rank order, no order of NaN, known types.

    Parameters
    ----------
    call : Call
        On device buffers.

    Returns
    -------
    bool
        Alike on every rank.
    """
    if call.reduce_op is None:
        return True
    is_whole = call.dtype is not None and call.dtype.kind in "iu"
    return (
        not call.deterministic
        and call.dtype is not None
        and call.dtype.name in _NAMES
        and call.reduce_op in _OPS
        and (is_whole or call.reduce_op in (ReduceOp.SUM, ReduceOp.PRODUCT))
    )


def told_id(device: Device) -> tuple[bool, list[int]]:
    """A new id of NCCL as values that JSON carries; it is of bytes from CuPy 14 on.

    Parameters
    ----------
    device : Device
        With ``nccl``.

    Returns
    -------
    tuple
        Whether it is of bytes, and its numbers.
    """
    found = device.nccl.get_unique_id()
    return isinstance(found, bytes), list(found)


class NcclGroup:
    """One NCCL communicator for the ranks of a group. Collective to make.

    Parameters
    ----------
    device : Device
        With ``nccl``.
    rank, size : int
        Of the group.
    unique_id : tuple
        From `told_id` of rank 0, sent by MPI.
    """

    def __init__(
        self, device: Device, rank: int, size: int, unique_id: tuple[bool, Sequence[int]]
    ) -> None:
        self._device, self._nccl = device, device.nccl
        self._rank, self._size = rank, size
        is_bytes, values = unique_id
        made = bytes(values) if is_bytes else tuple(values)
        self.comm = self._nccl.NcclCommunicator(size, made, rank)
        self._programs: dict[Op, Callable[[Call, int], None]] = {
            Op.ALL_REDUCE: self._all_reduce,
            Op.REDUCE: self._reduce,
            Op.REDUCE_SCATTER: self._reduce_scatter,
            Op.ALL_GATHER: self._all_gather,
            Op.GATHER: self._gather,
            Op.SCATTER: self._scatter,
            Op.ALL_TO_ALL: self._all_to_all,
            Op.BROADCAST: self._broadcast,
            Op.SEND: self._message,
            Op.RECV: self._message,
        }

    def carry(self, call: Call) -> None:
        """Put a call on the current stream; later work of the stream sees the result.

        Parameters
        ----------
        call : Call
            One that `can_carry`.
        """
        self._programs[call.op](call, self._device.stream())

    def _terms(self, call: Call) -> tuple[int, int]:
        """NCCL's numbers of dtype and reduction."""
        name = "" if call.dtype is None else call.dtype.name
        return getattr(self._nccl, _NAMES[name]), getattr(
            self._nccl, _OPS[call.reduce_op or ReduceOp.SUM]
        )

    def _all_reduce(self, call: Call, stream: int) -> None:
        kind, op = self._terms(call)
        n = 0 if call.input is None else call.input.size
        self.comm.allReduce(_at(call.input), _at(call.output), n, kind, op, stream)

    def _reduce(self, call: Call, stream: int) -> None:
        kind, op = self._terms(call)
        n, root = 0 if call.input is None else call.input.size, call.root or 0
        self.comm.reduce(_at(call.input), _at(call.output), n, kind, op, root, stream)

    def _reduce_scatter(self, call: Call, stream: int) -> None:
        kind, op = self._terms(call)
        counts = call.counts or ()
        if len(set(counts)) == 1:
            to = _at(call.output)
            self.comm.reduceScatter(_at(call.input), to, counts[0], kind, op, stream)
            return
        self._nccl.groupStart()
        for rank, (start, n) in enumerate(_blocks(counts)):
            item = call.input.itemsize if call.input is not None else 0
            source = _at(call.input, start * item)
            self.comm.reduce(source, _at(call.output), n, kind, op, rank, stream)
        self._nccl.groupEnd()

    def _all_gather(self, call: Call, stream: int) -> None:
        counts = call.counts or ()
        item = call.output.itemsize if call.output is not None else 0
        if len(set(counts)) == 1:
            n = counts[0] * item
            self.comm.allGather(_at(call.input), _at(call.output), n, self._bytes, stream)
            return
        self._nccl.groupStart()
        for rank, (start, n) in enumerate(_blocks(counts)):
            to = _at(call.output, start * item)
            source = _at(call.input) if rank == self._rank else to
            self.comm.broadcast(source, to, n * item, self._bytes, rank, stream)
        self._nccl.groupEnd()

    def _broadcast(self, call: Call, stream: int) -> None:
        to = _at(call.output)
        source = to if call.input is None else _at(call.input)
        n = 0 if call.output is None else call.output.nbytes
        self.comm.broadcast(source, to, n, self._bytes, call.root or 0, stream)

    def _all_to_all(self, call: Call, stream: int) -> None:
        sends, takes = _blocks(call.counts or ()), _blocks(call.recv_counts or ())
        self._exchange(call, dict(enumerate(sends)), dict(enumerate(takes)), stream)

    def _gather(self, call: Call, stream: int) -> None:
        n = 0 if call.input is None else call.input.size
        is_root = self._rank == call.root
        takes = dict(enumerate(_blocks(call.counts or ()))) if is_root else {}
        self._exchange(call, {call.root or 0: (0, n)}, takes, stream)

    def _scatter(self, call: Call, stream: int) -> None:
        n = 0 if call.output is None else call.output.size
        sends = dict(enumerate(_blocks(call.counts or ()))) if self._rank == call.root else {}
        self._exchange(call, sends, {call.root or 0: (0, n)}, stream)

    def _exchange(
        self, call: Call, sends: dict[int, Block], takes: dict[int, Block], stream: int
    ) -> None:
        """All messages in one group, so that their order does not matter; empty ones stay away."""
        item = call.dtype.itemsize if call.dtype is not None else 1
        self._nccl.groupStart()
        for peer, (start, n) in sends.items():
            if n:
                self.comm.send(_at(call.input, start * item), n * item, self._bytes, peer, stream)
        for peer, (start, n) in takes.items():
            if n:
                self.comm.recv(_at(call.output, start * item), n * item, self._bytes, peer, stream)
        self._nccl.groupEnd()

    def _message(self, call: Call, stream: int) -> None:
        if call.input is not None:
            self.comm.send(_at(call.input), call.input.nbytes, self._bytes, call.peer, stream)
        elif call.output is not None:
            self.comm.recv(_at(call.output), call.output.nbytes, self._bytes, call.peer, stream)

    @property
    def _bytes(self) -> int:
        return int(self._nccl.NCCL_UINT8)


def _at(x: Any, offset: int = 0) -> int:
    """Address of a flat array, `offset` bytes from its start."""
    return 0 if x is None else address(x) + offset


def _blocks(counts: Sequence[int]) -> list[Block]:
    stops = np.cumsum(counts).tolist()
    return [(stop - n, n) for stop, n in zip(stops, counts, strict=True)]
