"""One collective call of the ranks of a node, once all have arrived at it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from operator import setitem
from typing import Any

import numpy as np

from mpipar.comm.arrays import raw_bytes
from mpipar.comm.call import Array, Call
from mpipar.comm.node.flags import Flags
from mpipar.comm.node.memory import Memory
from mpipar.comm.node.process_memory import Far
from mpipar.comm.request import Request

Wait = tuple[int, int]
"""A flag word and the value that all peers must reach."""
Waits = Generator[Wait | Request, None, None]
"""A program: it yields what must come about before it goes on."""
Script = list[tuple[Callable[..., Any], tuple[Any, ...]] | None]
"""An algorithm for one rank: functions and arguments; None where all must have come as far."""
Reach = Array | Far
"""Another rank's flat array: mapped here, or read and written through the kernel."""


def _silently(function: Callable[..., Any], *arguments: Any) -> None:
    with np.errstate(all="ignore"):
        function(*arguments)


class Stages:
    """The stages of a group: two turns of one slot for each peer and one for results, a rank.

    Parameters
    ----------
    memory : Memory
        In which they lie.
    offsets : sequence of int
        Of the ranks' stages.
    chunk_bytes : int
        Of one slot.
    """

    def __init__(self, memory: Memory, offsets: Sequence[int], chunk_bytes: int) -> None:
        self.memory, self.offsets, self.chunk_bytes = memory, offsets, chunk_bytes

    @staticmethod
    def n_bytes(n: int, chunk_bytes: int) -> int:
        """Bytes of one rank's stage in a group of n."""
        return 2 * (n + 1) * chunk_bytes


class Scratch:
    """What one rank keeps from call to call: buffers that stay in the cache, and silence.

    Overflow is silent, as in the MPI: a warning made an error would leave peers waiting. A context
    that is entered costs a tenth of `numpy.errstate`, and belongs to one thread at a time.
    """

    def __init__(self) -> None:
        self._buffers: dict[int, Array] = {}
        self.silent: Callable[..., Any] = _silently
        if np.lib.NumpyVersion(np.__version__) >= "2.0.0":  # before, silence was a thread's
            context = copy_context()
            context.run(np.seterr, all="ignore")
            self.silent = context.run

    def quietly(self, script: Script) -> Script:
        """The same steps without warnings; none of them waits."""
        return [(self.silent, (item[0], *item[1])) for item in script if item is not None]

    def take(self, n: int, dtype: np.dtype[Any], key: int) -> Array:
        """The buffer of a key, as n elements."""
        n_bytes = n * dtype.itemsize
        buffer = self._buffers.get(key)
        if buffer is None or buffer.size < n_bytes:
            buffer = self._buffers[key] = np.empty(n_bytes, np.uint8)
        return buffer[:n_bytes].view(dtype)


@dataclass(slots=True)
class Meeting:
    """What an algorithm needs to know of a call.

    Parameters
    ----------
    call : Call
        Of this rank.
    flags : Flags
        Of the group.
    inputs, outputs : sequence
        How each rank's arrays are reached, None where only through its stage.
    places : sequence of int
        Where each rank's output lies; equal where ranks share one.
    stages : Stages or None
        Needed where something is None.
    buffers : Scratch
        Of this rank.
    chunk_bytes : int
        What is worked on at a time.
    sends : sequence of sequence of int or None
        For an uneven all_to_all: what each rank sends to each.
    """

    call: Call
    flags: Flags
    inputs: Sequence[Reach | None]
    outputs: Sequence[Reach | None]
    places: Sequence[int]
    stages: Stages | None
    buffers: Scratch
    chunk_bytes: int
    sends: Sequence[Sequence[int]] | None = None

    @property
    def rank(self) -> int:
        """Of this process in the group."""
        return self.flags.rank

    @property
    def n(self) -> int:
        """Number of ranks."""
        return self.flags.n

    @property
    def is_shared_result(self) -> bool:
        """Whether all ranks gave the same memory for the result."""
        first = self.places[0]
        return first >= 0 and all(place == first for place in self.places)

    def slot(self, rank: int, turn: int, which: int, n: int, dtype: np.dtype[Any]) -> Array:
        """One slot of a rank's stage: for a peer, or (number n of the group) its results."""
        stages = self.stages
        if stages is None:
            return self.buffers.take(n, dtype, -3)
        index = (turn & 1) * (self.n + 1) + which
        return stages.memory.view(stages.offsets[rank] + index * stages.chunk_bytes, n, dtype)

    def scratch(self, n: int, dtype: np.dtype[Any], key: int) -> Array:
        """A private buffer of this rank."""
        return self.buffers.take(n, dtype, key)


def copy_little(
    target: Array, source: Array
) -> tuple[Callable[..., Any], tuple[memoryview, slice, memoryview]]:
    """The step that copies between flat arrays, at a quarter of the start-up of `numpy.copyto`."""
    return setitem, (raw_bytes(target), slice(None), raw_bytes(source))


def store(there: Reach, part: slice, data: Array) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The step that writes a part of another rank's array."""
    if isinstance(there, np.ndarray):
        return np.copyto, (there[part], data)
    return there.write, (part, data)
