"""Where channels lie and how their ends wait: node memory, or nothing but messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpipar.comm.call import Array, Call
from mpipar.errors import CountOutOfRange

HEADER_BYTES = 128


class Port:
    """The port of a group without shared memory: everything travels as messages."""

    def header(self) -> int:
        """A line for counters of one end, kept until the group is closed; -1 for none."""
        return -1

    def drop(self, offset: int) -> None:
        """Give a line back."""

    def take(self, n_bytes: int) -> int:
        """A block of shared memory; -1 for none."""
        del n_bytes
        return -1

    def give(self, offset: int) -> None:
        """Give a block back."""

    def words(self, offset: int) -> Any:
        """The counters of a line."""
        raise NotImplementedError

    def bytes(self, offset: int, n_bytes: int) -> Array:
        """The bytes of a block."""
        raise NotImplementedError

    def fence(self) -> None:
        """Stand between data and counters, where the processor needs it."""

    def wait(self, call: Call, ready: Callable[[], bool]) -> None:
        """Wait until `ready()`."""
        raise NotImplementedError


class NodePort(Port):
    """The port of a group in node memory.

    Parameters
    ----------
    group : NodeCommunicator
        Whose.
    """

    def __init__(self, group: Any) -> None:
        self._group, self._host = group, group.host
        self._headers: list[int] = []

    def header(self) -> int:
        """A line for counters of one end, kept until the group is closed; -1 for none."""
        offset = self.take(HEADER_BYTES)
        if offset >= 0:
            self._host.arena.memory.bytes[offset : offset + HEADER_BYTES] = 0
            self._headers.append(offset)
        return offset

    def take(self, n_bytes: int) -> int:
        """A block of shared memory; -1 for none."""
        try:
            return int(self._host.arena.take(n_bytes))
        except CountOutOfRange:
            return -1

    def give(self, offset: int) -> None:
        """Give a block back."""
        self._host.arena.give(offset)

    def words(self, offset: int) -> memoryview:
        """The counters of a line."""
        words: memoryview = self._host.arena.memory.words(offset, HEADER_BYTES)
        return words

    def bytes(self, offset: int, n_bytes: int) -> Array:
        """The bytes of a block."""
        found: Array = self._host.arena.memory.bytes[offset : offset + n_bytes]
        return found

    def fence(self) -> None:
        """Stand between data and counters, where the processor needs it."""
        if self._host.fence is not None:
            self._host.fence()

    def wait(self, call: Call, ready: Callable[[], bool]) -> None:
        """Spin a little, then wait as for any flag."""
        for _ in range(self._host.n_spins):
            if ready():
                return
        self._host.block(self._group, call, ready)

    def drop(self, offset: int) -> None:
        """Give a line back."""
        self._headers.remove(offset)
        self._host.arena.give(offset)

    def close(self) -> None:
        """Give the lines back; no peer looks at them any more."""
        while self._headers:
            self._host.arena.give(self._headers.pop())
