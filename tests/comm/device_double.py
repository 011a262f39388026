"""A device without a device: arrays that refuse the host, a stream that is late, an NCCL of calls.

Work put on the stream happens when somebody waits for it and not before, so that whoever reads too
early finds what was there before.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from mpipar.comm import Communicator, ReduceOp
from mpipar.comm.device.arrays import register

_local = threading.local()


class Stream:
    """What one rank has asked for and what of it has happened."""

    def __init__(self) -> None:
        self.queue: list[Callable[[], Any]] = []
        self.n_run = 0
        self.log: list[str] = []

    def put(self, work: Callable[[], Any]) -> None:
        self.queue.append(work)

    def run_to(self, position: int) -> None:
        while self.n_run < position:
            self.n_run += 1
            self.queue[self.n_run - 1]()


def stream() -> Stream:
    """Of this rank."""
    if not hasattr(_local, "stream"):
        _local.stream = Stream()
    return _local.stream


class Event:
    """After what the stream holds now."""

    def __init__(self) -> None:
        self.stream = stream()
        self.position = len(self.stream.queue)

    @property
    def done(self) -> bool:
        self.synchronize()  # a device would get there by itself
        return True

    def synchronize(self) -> None:
        self.stream.run_to(self.position)


class DoubleArray:
    """Host memory that acts as if it were a device's."""

    __array_ufunc__ = None

    def __init__(self, data: np.ndarray) -> None:
        self._data = data
        for name in ("shape", "dtype", "size", "ndim", "nbytes", "itemsize", "flags"):
            setattr(self, name, getattr(data, name))

    def __array__(self, *_: object, **__: object) -> Any:
        raise AssertionError("the host has touched memory of the device")

    def __array_function__(self, function: Any, *_: object) -> Any:
        raise AssertionError(f"numpy.{function.__name__} was called on an array of the device")

    def __iter__(self) -> Any:
        raise AssertionError("the host has walked over memory of the device")

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        seen = self._data.__array_interface__
        return {"shape": self.shape, "typestr": seen["typestr"], "data": seen["data"],
                "strides": seen["strides"], "version": 3}  # fmt: skip

    def reshape(self, *shape: Any) -> DoubleArray:
        view = self._data.reshape(*shape)
        if view.size and not np.shares_memory(view, self._data):
            raise AssertionError("a hidden copy")
        return DoubleArray(view)

    def view(self, dtype: Any) -> DoubleArray:
        return DoubleArray(self._data.view(dtype))

    def __getitem__(self, index: Any) -> DoubleArray:
        return DoubleArray(np.asarray(self._data[index]))

    def __setitem__(self, index: Any, value: Any) -> None:
        assert isinstance(value, DoubleArray | int | float), "a value of the host"
        given = value._data if isinstance(value, DoubleArray) else value
        stream().put(lambda: self._data.__setitem__(index, given))

    def copy(self, order: str = "C") -> DoubleArray:
        new = DoubleArray(np.full(self.shape, 77, self.dtype))
        new[...] = self
        return new

    def __truediv__(self, by: int) -> DoubleArray:
        new = DoubleArray(np.full(self.shape, 77, self.dtype))
        stream().put(lambda: np.divide(self._data, by, out=new._data))
        return new


class Nccl:
    """NCCL's calls over a communicator of the host, when the stream comes to them."""

    NCCL_INT8, NCCL_UINT8, NCCL_INT32, NCCL_UINT32, NCCL_INT64, NCCL_UINT64 = 0, 1, 2, 3, 4, 5
    NCCL_FLOAT32, NCCL_FLOAT64 = 7, 8
    NCCL_SUM, NCCL_PROD, NCCL_MAX, NCCL_MIN = 0, 1, 2, 3

    @staticmethod
    def get_unique_id() -> bytes:
        return bytes(range(128))

    @staticmethod
    def groupStart() -> None:
        _local.group = []

    @staticmethod
    def groupEnd() -> None:
        calls, _local.group = _local.group, None

        def all_at_once() -> None:
            for request in [call() for call in calls]:
                if request is not None:
                    request.wait()

        stream().put(all_at_once)

    class NcclCommunicator:
        """One rank's handle."""

        def __init__(self, size: int, unique_id: bytes, rank: int) -> None:
            assert unique_id == Nccl.get_unique_id()
            self.wire: Communicator = _local.wire
            assert (self.wire.size, self.wire.rank) == (size, rank)
            self.open = True

        def destroy(self) -> None:
            assert self.open, "destroyed twice"
            self.open = False

        def allReduce(self, a: int, b: int, n: int, kind: int, op: int, s: int) -> None:
            self._put(lambda: _fill(b, n, kind, self.wire.all_reduce(_at(a, n, kind), _OPS[op])))

        def reduce(self, a: int, b: int, n: int, kind: int, op: int, root: int, s: int) -> None:
            def work() -> None:
                total = self.wire.reduce(_at(a, n, kind), _OPS[op], root=root)
                if self.wire.rank == root:
                    _fill(b, n, kind, total)

            self._put(work)

        def reduceScatter(self, a: int, b: int, n: int, kind: int, op: int, s: int) -> None:
            def work() -> None:
                x = _at(a, n * self.wire.size, kind)
                _fill(b, n, kind, self.wire.reduce_scatter(x, _OPS[op]))

            self._put(work)

        def allGather(self, a: int, b: int, n: int, kind: int, s: int) -> None:
            def work() -> None:
                _fill(b, n * self.wire.size, kind, self.wire.all_gather(_at(a, n, kind)))

            self._put(work)

        def broadcast(self, a: int, b: int, n: int, kind: int, root: int, s: int) -> None:
            self._put(lambda: _fill(b, n, kind, self.wire.broadcast(_at(a, n, kind).copy(), root)))

        def send(self, a: int, n: int, kind: int, peer: int, s: int) -> None:
            self._put(lambda: self.wire.begin_send(_at(a, n, kind).copy(), peer))

        def recv(self, a: int, n: int, kind: int, peer: int, s: int) -> None:
            self._put(lambda: self.wire.begin_recv(_at(a, n, kind), peer))

        def _put(self, work: Callable[[], Any]) -> None:
            group = getattr(_local, "group", None)
            if group is not None:
                group.append(work)
            else:
                stream().put(lambda: getattr(work(), "wait", int)())


_OPS = (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MAX, ReduceOp.MIN)
_KINDS = {0: "i1", 1: "u1", 2: "i4", 3: "u4", 4: "i8", 5: "u8", 7: "f4", 8: "f8"}


def _at(address: int, n: int, kind: int) -> np.ndarray:
    dtype = np.dtype(_KINDS[kind])
    if not n:
        return np.empty(0, dtype)
    return np.frombuffer((ctypes.c_char * (n * dtype.itemsize)).from_address(address), dtype)


def _fill(address: int, n: int, kind: int, values: np.ndarray) -> None:
    _at(address, n, kind)[...] = values


class DoubleDevice:
    """What the seam needs, over the double."""

    nccl: Any = Nccl

    def array(self, x: Any) -> Any:
        return x

    def empty(self, shape: Any, dtype: Any) -> DoubleArray:
        data = np.empty(shape, dtype)
        data.view(np.uint8).reshape(-1)[...] = 0xA5
        return DoubleArray(data)

    def pinned(self, n_bytes: int) -> np.ndarray:
        return np.full(n_bytes, 0x5A, np.uint8)

    def begin_read(self, x: DoubleArray, host: np.ndarray, after: Any = None) -> Event:
        stream().log.append("read")
        stream().put(lambda: np.copyto(host, x._data))
        return Event()

    def begin_write(self, host: np.ndarray, x: DoubleArray) -> Event:
        stream().log.append("write")
        stream().put(lambda: np.copyto(x._data, host))
        return Event()

    def fence(self) -> Event:
        return Event()

    def stream(self) -> int:
        return 1

    def names(self) -> tuple[str, str]:
        return "double", f"device of {id(stream())}"


def late(values: np.ndarray) -> DoubleArray:
    """An array in whose memory the values are only when the stream comes to it."""
    held = np.array(values, copy=True)
    data = values  # keeps the layout
    data[...] = np.zeros((), data.dtype)
    stream().put(lambda: np.copyto(data, held))
    return DoubleArray(data)


def landed(x: DoubleArray) -> np.ndarray:
    """What is there when the stream has run dry."""
    Event().synchronize()
    return x._data


class DoubleSide:
    """How the double takes arrays in and gives them out."""

    def __init__(self) -> None:
        self.device = DoubleDevice()

    def given(self, x: np.ndarray) -> DoubleArray:
        return late(x)

    def taker(self, x: np.ndarray) -> DoubleArray:
        return DoubleArray(x)

    def landed(self, x: DoubleArray) -> np.ndarray:
        return landed(x)


class OnDevice:
    """A communicator for the contract's test bodies: arrays go in and out by the device."""

    def __init__(self, comm: Communicator, way: str, side: Any = None) -> None:
        self.inner, self.rank, self.size = comm, comm.rank, comm.size
        self.side = side or DoubleSide()
        forget(comm)
        self.ways = comm.devices.agree(self.side.device, way)

    def __getattr__(self, verb: str) -> Any:
        found = getattr(self.inner, verb)

        def call(x: Any = None, /, *rest: Any, out: Any = None, **words: Any) -> Any:
            is_taker = verb in ("recv", "begin_recv")
            given = x if x is None else (self.side.taker if is_taker else self.side.given)(x)
            target = None if out is None else self.side.taker(out)
            words |= {} if target is None else {"out": target}
            result = found(given, *rest, **words)
            host = (x, given) if is_taker else (out, target)
            if verb.startswith("begin"):
                return _Ended(self, result, *host)
            return self.back(result, *host)

        return call

    def prepare(self, verb: Any, x: Any = None, /, **words: Any) -> Callable[[], Any]:
        return lambda: getattr(self, str(verb))(x, **words)

    def back(self, result: Any, out: Any, target: Any) -> Any:
        """The result on the host, in the host's `out` where that was given."""
        if result is None:
            Event().synchronize()
            return None
        values = self.side.landed(result)
        if target is None or result is not target:
            return values
        out[...] = values
        return out


class _Ended:
    def __init__(self, group: OnDevice, request: Any, out: Any, target: Any) -> None:
        self._group, self._given = group, (request, out, target)

    def wait(self) -> Any:
        request, out, target = self._given
        return self._group.back(request.wait(), out, target)


register("tests", DoubleDevice)


def forget(comm: Communicator) -> None:
    """Begin with an empty stream, and an NCCL over this communicator's ranks."""
    _local.stream = Stream()
    _local.wire = comm.split(0, purpose="wire of the double")
