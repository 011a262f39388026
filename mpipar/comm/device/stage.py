"""The way of device arrays through pinned host memory: it works on every transport."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from mpipar.comm.call import Array, Call, Op
from mpipar.comm.device.arrays import Device, Event
from mpipar.comm.node.paths import DEVICE_WAYS
from mpipar.comm.request import ENDED, Request

if TYPE_CHECKING:
    from mpipar.comm.base import Communicator

_CHUNK = 4 * 2**20
_PEERS = (Op.SEND, Op.RECV)
_PIECEWISE = (Op.ALL_REDUCE, Op.REDUCE, Op.BROADCAST, *_PEERS)
_EVEN = (Op.ALL_GATHER, Op.REDUCE_SCATTER, Op.ALL_TO_ALL)


@dataclass
class DeviceStats:
    """What calls on device arrays did: every copy through the host is in it.

    Parameters
    ----------
    calls : dict
        Number of calls by way.
    to_host_bytes, to_device_bytes : int
        Copied by the staged way.
    """

    calls: dict[str, int] = field(default_factory=lambda: dict.fromkeys(DEVICE_WAYS, 0))
    to_host_bytes: int = 0
    to_device_bytes: int = 0


class Stage:
    """Host copies of one communicator's device arrays.

    Parameters
    ----------
    comm : Communicator
        Whose calls these are.
    """

    def __init__(self, comm: Communicator) -> None:
        self.comm, self.stats = comm, DeviceStats()
        self.chunk = int(os.environ.get("MPIPAR_DEVICE_CHUNK_BYTES", _CHUNK))

    def submit(self, call: Call, device: Device) -> Request:
        """Start one call on device buffers.

        Parameters
        ----------
        call : Call
            As for `Communicator.submit`.
        device : Device
            The library of its buffers.

        Returns
        -------
        Request
            Ended if the call is blocking.
        """
        if call.n_bytes <= 2 * self.chunk or not self._is_even(call):
            return self._staged(call, device)
        if call.blocking:
            return self._pipelined(call, device)
        return self._in_pieces(call, device) if call.op in _PEERS else self._staged(call, device)

    def _staged(self, call: Call, device: Device) -> Request:
        """The whole call at once."""
        is_same = call.input is not None and call.input is call.output
        source = None if call.input is None else self._pinned(device, call.input)
        target = None if call.output is None else source
        if not is_same and call.output is not None:
            target = self._pinned(device, call.output)
        if source is not None:
            self._read(device, call.input, source).synchronize()
        request = self.comm.submit(call._replace(input=source, output=target))
        is_root = call.op is Op.BROADCAST and call.root == self.comm.rank

        def write() -> None:
            if target is not None and not (is_root and is_same):
                self._write(device, target, call.output).synchronize()

        if request is ENDED or call.blocking:
            request.wait()
            write()
            return ENDED
        return followed(self.comm, call, request, write)

    def _pipelined(self, call: Call, device: Device) -> Request:
        """Chunk k travels while chunk k+1 comes from the device and chunk k-1 goes to it."""
        takes = call.output is not None and call.output.size > 0
        chunks = list(self._chunks(call))
        sources: list[Array | None] = [None, None]
        targets: list[Array | None] = [None, None]
        pending: list[list[Event]] = [[], []]

        start = device.fence()  # not behind the chunks that go to the device meanwhile

        def fetch(k: int) -> list[Event]:
            parts = chunks[k].inputs
            if not parts:
                return []
            host = sources[k % 2] = self._pinned(device, parts, sources[k % 2])
            stops = np.cumsum([p.size for p in parts]).tolist()
            return [
                self._read(device, p, host[stop - p.size : stop], start)
                for p, stop in zip(parts, stops, strict=True)
            ]

        reads = fetch(0)
        for k, chunk in enumerate(chunks):
            for event in [*reads, *pending[k % 2]]:  # of this chunk, and of the one two before
                event.synchronize()
            host = sources[k % 2] if chunk.inputs else None
            out = None
            if call.output is not None:
                out = targets[k % 2] = self._pinned(device, chunk.outputs, targets[k % 2])
            reads = fetch(k + 1) if k + 1 < len(chunks) else []
            self.comm.submit(chunk.call._replace(input=host, output=out)).wait()
            if takes and out is not None:
                stops = np.cumsum([p.size for p in chunk.outputs]).tolist()
                pending[k % 2] = [
                    self._write(device, out[stop - p.size : stop], p)
                    for p, stop in zip(chunk.outputs, stops, strict=True)
                ]
        for event in [*pending[0], *pending[1]]:
            event.synchronize()
        return ENDED

    def _in_pieces(self, call: Call, device: Device) -> Request:
        """A begun message in the pieces of a blocking one: either may be at the other end."""
        requests = [
            self._staged(
                chunk.call._replace(
                    input=None if call.input is None else chunk.inputs[0],
                    output=None if call.output is None else chunk.outputs[0],
                ),
                device,
            )
            for chunk in self._chunks(call)
        ]

        def advance() -> bool:
            while requests and requests[0].test():
                requests.pop(0)
            return not requests

        return Request(call, advance, deadline_s=getattr(self.comm, "deadline_s", 600.0))

    def _is_even(self, call: Call) -> bool:
        """Whether every rank knows that the call can be cut into the same pieces."""
        if call.op in _PIECEWISE:
            return True
        counts = {*(call.counts or ()), *(call.recv_counts or ())}
        return call.op in _EVEN and call.uniform and len(counts) == 1

    def _chunks(self, call: Call) -> Iterator[_Chunk]:
        """The pieces of an even call: of each block the same range."""
        n = self.comm.size
        is_cut = call.op in (Op.REDUCE_SCATTER, Op.ALL_TO_ALL)
        is_joined = call.op in (Op.ALL_GATHER, Op.ALL_TO_ALL)
        whole = call.counts[0] if call.op in _EVEN and call.counts else _length(call)
        item = call.dtype.itemsize if call.dtype is not None else 1
        step = max(1, self.chunk // item // (n if call.op in _EVEN else 1))
        for start in range(0, whole, step):
            stop = min(start + step, whole)
            pieces = partial(_pieces, start=start, stop=stop, whole=whole)
            counts = None if call.counts is None else (stop - start,) * n
            recvs = None if call.recv_counts is None else (stop - start,) * n
            yield _Chunk(
                call._replace(counts=counts, recv_counts=recvs),
                pieces(call.input, n if is_cut else 1),
                pieces(call.output, n if is_joined else 1),
            )

    def _pinned(self, device: Device, like: Any, held: Array | None = None) -> Array:
        """A flat host array for a device array, or for several after each other."""
        parts = like if isinstance(like, list) else [like]
        size, dtype = sum(p.size for p in parts), parts[0].dtype
        if held is None or held.size < size:
            return device.pinned(size * dtype.itemsize).view(dtype)
        return held[:size]

    def _read(self, device: Device, x: Any, host: Array, after: Event | None = None) -> Event:
        self.stats.to_host_bytes += host.nbytes
        return device.begin_read(x, host, after) if host.nbytes else _PASSED

    def _write(self, device: Device, host: Array, x: Any) -> Event:
        self.stats.to_device_bytes += host.nbytes
        return device.begin_write(host, x) if host.nbytes else _PASSED


def followed(comm: Communicator, call: Call, request: Request, then: Callable[[], None]) -> Request:
    """A request that does something more when the first has ended."""

    def advance() -> bool:
        if not request.test():
            return False
        then()
        return True

    return Request(call, advance, deadline_s=getattr(comm, "deadline_s", 600.0))


@dataclass
class _Chunk:
    """A piece of a call: flat parts of its device buffers."""

    call: Call
    inputs: list[Any]
    outputs: list[Any]


class _Passed:
    """The event of nothing."""

    done = True

    def synchronize(self) -> None:
        """Return."""


_PASSED = _Passed()


def _pieces(buffer: Any, n_rows: int, start: int, stop: int, whole: int) -> list[Any]:
    if buffer is None:
        return []
    return [buffer[row * whole + start : row * whole + stop] for row in range(n_rows)]


def _length(call: Call) -> int:
    return max(0 if a is None else a.size for a in (call.input, call.output))
