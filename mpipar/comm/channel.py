"""Channels: a queue of equal arrays between two ranks, filled and read where it lies.

The producer takes a slot, computes into it and commits it; the reader gets a read-only view until
it releases the slot. On one node the slots are the producer's node memory, and nothing is copied;
elsewhere they are private and travel as messages, in their order. A producer that is `n_slots`
ahead waits for the reader.
"""

from __future__ import annotations

import math
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import DTypeLike

from mpipar.comm.arrays import raw_bytes
from mpipar.comm.call import Array, Call, Op
from mpipar.comm.node.arena import private_empty
from mpipar.comm.request import Request
from mpipar.comm.targets import check_rank
from mpipar.errors import CollectiveMismatch, CountOutOfRange, LayoutError

if TYPE_CHECKING:
    from mpipar.comm.storage import Storage

Meanwhile: TypeAlias = Callable[[], object] | None
_TAG = 2**15 + 1
_MAX_KEYS = 4096
_SMALLEST, _LARGEST = 16 * 1024, 256 * 1024  # chunk of a copy
_CLOSED = 8  # word of the reader's line that the producer writes


class _End:
    """What both ends of a channel have."""

    def __init__(
        self,
        comm: Storage,
        peer: int,
        shape: int | tuple[int, ...],
        dtype: DTypeLike,
        n_slots: int,
        key: int,
    ) -> None:
        if n_slots < 1:
            raise CountOutOfRange("number of slots", "1 or more", n_slots)
        if not 0 <= key < _MAX_KEYS:
            raise CountOutOfRange("key of a channel", f"0..{_MAX_KEYS - 1}", key)
        self.comm, self.peer = comm, check_rank("peer", peer, comm.size)
        self.shape = (shape,) if isinstance(shape, int) else tuple(shape)
        self.dtype, self.n_slots, self.key = np.dtype(dtype), n_slots, key
        self.n_bytes = math.prod(self.shape) * self.dtype.itemsize
        self.stride = max(64, -(-self.n_bytes // 64) * 64)
        self.n_done = 0
        self.port = comm.port()
        self._spec = f"{self.shape} of {self.dtype.name} in {n_slots} slots"
        self._chunk = max(_SMALLEST, min(_LARGEST, self.n_bytes // 4 // 64 * 64))
        self._flat: Any = None  # the slots, for copies

    def _said(self, place: int) -> Array:
        return np.array([place, zlib.crc32(self._spec.encode())], np.int64)

    def _tell(self, words: Array) -> None:
        """Send the peer where this end lies; the request owns the words."""
        self.told = self._message(Op.SEND, words)

    def _heard(self) -> int:
        words = np.zeros(2, np.int64)
        self._message(Op.RECV, words).wait()
        if words[1] != self._said(0)[1]:
            raise CollectiveMismatch(
                f"channel {self.key} between ranks {self.comm.rank} and {self.peer}: here it "
                f"carries {self._spec}, the peer's differs"
            )
        return int(words[0])

    def _message(self, op: Op, array: Array) -> Request:
        flat = array.reshape(-1)
        sends = op is Op.SEND
        call = Call(op, flat if sends else None, None if sends else flat, peer=self.peer,
                    tag=_TAG + self.key, shape=array.shape, agreed=array.shape,
                    blocking=False)  # fmt: skip
        return self.comm.begin_message(call)

    def _slot(self, start: Array, index: int) -> Array:
        offset = index % self.n_slots * self.stride
        return start[offset : offset + self.n_bytes].view(self.dtype).reshape(self.shape)

    def _wait(self, op: Op, ready: Callable[[], bool], meanwhile: Meanwhile = None) -> None:
        if ready():
            return

        def looked() -> bool:
            if meanwhile is not None:
                meanwhile()
            return ready()

        call = Call(op, peer=self.peer, tag=self.key, agreed=self._spec)
        self.port.wait(call, ready if meanwhile is None else looked)

    def _copies(self, x: Array, name: str) -> bool:
        """Whether a whole array can be copied as bytes; an error if it does not fit the channel."""
        if x.shape != self.shape or x.dtype != self.dtype:
            raise LayoutError(
                f"{name} has shape {x.shape} of {x.dtype}; the channel has {self._spec}"
            )
        return x.flags.c_contiguous and self.n_bytes > 0

    def _chunks(self) -> Iterator[tuple[int, int]]:
        """Parts of an array, one after the other."""
        n, step = self.n_bytes, self._chunk
        return zip(range(0, n, step), [*range(step, n, step), n], strict=True)


class Sender(_End):
    """The producer's end; made by `Communicator.channel_to`."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._requests: deque[Request] = deque()
        self._theirs: Any = None
        self._header, self._block = self.port.header(), -1
        if self._header >= 0:
            self._block = self.port.take(self.n_slots * self.stride)
        if self._block >= 0:
            self._words = self.port.words(self._header)
            self._words[1] = self._block
            self._slots = self.port.bytes(self._block, self.n_slots * self.stride)
        else:
            self._slots = private_empty(self.n_slots * self.stride, np.uint8)
        self._flat = memoryview(self._slots)  # type: ignore[arg-type]
        self._tell(self._said(self._header if self._block >= 0 else -1))

    @property
    def ready(self) -> bool:
        """Whether `acquire` would return at once."""
        if self.n_done < self.n_slots:
            return True
        if self._block < 0:
            return len(self._requests) < self.n_slots or self._requests[0].test()
        return self._theirs is not None and self._free()

    def _free(self) -> bool:
        return int(self._theirs[0]) > self.n_done - self.n_slots

    def acquire(self, meanwhile: Meanwhile = None) -> Array:
        """The next slot, to be computed into; waits while the reader holds all of them.

        Parameters
        ----------
        meanwhile : callable, optional
            Called again and again during such a wait.

        Returns
        -------
        ndarray
            Of the shape and dtype of the channel, valid until `commit`.
        """
        self._reserve(meanwhile)
        return self._slot(self._slots, self.n_done)

    def _reserve(self, meanwhile: Meanwhile = None) -> None:
        """Wait until the next slot is free."""
        if self.n_done >= self.n_slots:
            if self._block < 0:
                if len(self._requests) >= self.n_slots:
                    self._requests.popleft().wait()
            else:
                self._know()
                self._wait(Op.SEND, self._free, meanwhile)
                self.port.fence()

    def _know(self) -> None:
        """Learn where the reader counts what it has released."""
        if self._theirs is None:
            self._theirs = self.port.words(self._heard())

    def meet(self) -> bool:
        """Wait until the reader's end is there.

        Returns
        -------
        bool
            Whether the slots are in memory that both share.
        """
        if self._block >= 0:
            self._know()
        return self._block >= 0

    def commit(self) -> None:
        """Give the acquired slot to the reader."""
        self.n_done += 1
        if self._block < 0:
            slot = self._slot(self._slots, self.n_done - 1)
            self._requests.append(self._message(Op.SEND, slot))
            return
        self.port.fence()
        self._words[0] = self.n_done * self.stride

    def send(self, x: Array) -> None:
        """Copy an array into the next slot and commit it, a chunk at a time.

        Parameters
        ----------
        x : ndarray
            Of the shape and dtype of the channel.
        """
        if not self._copies(x, "x") or self._block < 0:
            self.acquire()[...] = x
            self.commit()
            return
        self._reserve()
        source, flat, words, fence = raw_bytes(x), self._flat, self._words, self.port.fence
        start, first = self.n_done % self.n_slots * self.stride, self.n_done * self.stride
        for low, high in self._chunks():
            flat[start + low : start + high] = source[low:high]
            if high < self.n_bytes:
                fence()
                words[0] = first + high
        self.commit()

    def close(self) -> None:
        """Wait until the reader has released everything, and give the slots back."""
        while self._requests:
            self._requests.popleft().wait()
        if self._block >= 0:
            self._know()
            self._wait(Op.SEND, lambda: int(self._theirs[0]) >= self.n_done)
            self.port.give(self._block)
            self.port.drop(self._header)
            self._block = -1
            self._theirs[_CLOSED] = 1  # from here on nothing of the reader's is looked at
        self.told.wait()


class Receiver(_End):
    """The reader's end; made by `Communicator.channel_from`."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._theirs: Any = None
        self._slots: Array | None = None
        self._header = self.port.header()
        self._tell(self._said(self._header))

    @property
    def ready(self) -> bool:
        """Whether `get` would return at once; asks the peer's memory only once it is known."""
        return self._theirs is not None and self._has(self.stride)

    def meet(self) -> bool:
        """Wait until the producer's end is there.

        Returns
        -------
        bool
            Whether the slots are in memory that both share.
        """
        self._know()
        return self._theirs is not None

    def _has(self, n_bytes: int) -> bool:
        return int(self._theirs[0]) >= self.n_done * self.stride + n_bytes

    def _know(self) -> Array:
        """Learn where the sender's slots lie; private ones where they are out of reach."""
        if self._slots is not None:
            return self._slots
        place = self._heard()
        if place < 0 or self._header < 0:
            self._slots = private_empty(self.n_slots * self.stride, np.uint8)
            return self._slots
        self._theirs, self._mine = self.port.words(place), self.port.words(self._header)
        self._slots = self.port.bytes(int(self._theirs[1]), self.n_slots * self.stride)
        self._flat = memoryview(self._slots)  # type: ignore[arg-type]
        return self._slots

    def get(self, meanwhile: Meanwhile = None) -> Array:
        """The next array, where it lies; waits until it is committed.

        Parameters
        ----------
        meanwhile : callable, optional
            Called again and again during such a wait.

        Returns
        -------
        ndarray
            Read-only, valid until `release`.
        """
        slots = self._know()
        if self._theirs is not None:
            self._wait(Op.RECV, lambda: self._has(self.stride), meanwhile)
            self.port.fence()
        view = self._slot(slots, self.n_done)
        if self._theirs is None:
            self._message(Op.RECV, view).wait()
        view.flags.writeable = False
        return view

    def release(self) -> None:
        """Give the slot of `get` back to the producer."""
        self.n_done += 1
        if self._theirs is not None:
            self.port.fence()
            self._mine[0] = self.n_done

    def recv(self, out: Array) -> Array:
        """Copy the next array into `out` as it comes, and release it.

        Parameters
        ----------
        out : ndarray
            Of the shape and dtype of the channel.

        Returns
        -------
        ndarray
            `out`.
        """
        copies = self._copies(out, "out")
        self._know()
        if self._theirs is None or not copies:
            out[...] = self.get()
            self.release()
            return out
        target, flat, theirs, fence = raw_bytes(out), self._flat, self._theirs, self.port.fence
        start, first = self.n_done % self.n_slots * self.stride, self.n_done * self.stride
        for low, high in self._chunks():
            needed = self.stride if high == self.n_bytes else high
            if theirs[0] < first + needed:
                self._wait(Op.RECV, partial(self._has, needed))
            fence()
            target[low:high] = flat[start + low : start + high]
        self.release()
        return out

    def close(self) -> None:
        """Wait until the producer has closed its end; all that was got must be released."""
        self._know()
        if self._theirs is not None:
            self._wait(Op.RECV, lambda: int(self._mine[_CLOSED]) == 1)
            self.port.drop(self._header)
        self.told.wait()
