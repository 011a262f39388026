"""One mapping of memory for all ranks of a node, sparse and as large as it may ever grow.

Pages exist only where a rank has backed them, so growth needs neither a collective nor a further
mapping, and any rank finds any array of its peers by one offset. Plain shared memory is used rather
than an MPI window: there are no epochs, both MPI libraries work alike, copies run at the same
speed, and nothing is left behind when a job is killed.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np

from mpipar.comm.call import Array
from mpipar.comm.node.huge_pages import PAGE, collapse, huge_page, map_file, populate


class Memory:
    """The mapping of one node.

    Parameters
    ----------
    buffer : buffer
        All regions, one after the other.
    n_regions : int
        Number of ranks that share it.
    file : int
        Descriptor behind the mapping, or -1.
    owner : object
        Keeps the mapping.
    """

    def __init__(self, buffer: Any, n_regions: int, file: int = -1, owner: object = None) -> None:
        self._owner = owner
        self._file = file
        self._huge = huge_page()
        self.bytes = np.frombuffer(buffer, np.uint8)
        self.address = self.bytes.__array_interface__["data"][0]
        self.n_bytes = self.bytes.size
        self.region_bytes = self.n_bytes // n_regions

    @classmethod
    def private(cls, n_regions: int, region_bytes: int = 2**30) -> Memory:
        """Memory of this process alone, for ranks that are threads.

        Parameters
        ----------
        n_regions : int
            Number of ranks.
        region_bytes : int
            Largest size of a rank's region.

        Returns
        -------
        Memory
            Backed when written.
        """
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        return cls(mmap.mmap(-1, n_regions * region_bytes, flags=flags), n_regions)

    @classmethod
    def of_node(
        cls,
        index: int,
        n_regions: int,
        share: Callable[[str], str],
        least: Callable[[int], int],
        region_bytes: int,
    ) -> Memory | None:
        """Map one memory in all processes of a node. Collective over them.

        Parameters
        ----------
        index : int
            Which of them is this process.
        n_regions : int
            How many they are.
        share : callable
            Gives every process the text of the first one.
        least : callable
            Gives every process the smallest number of all.
        region_bytes : int
            Largest size of a rank's region.

        Returns
        -------
        Memory or None
            None on every process where one of them cannot map it.
        """
        for make in (_anonymous_file, _named_file):
            path, file = "", -1
            unit = PAGE if region_bytes < huge_page() else max(PAGE, huge_page())
            total = region_bytes // unit * unit * n_regions
            if index == 0:
                with contextlib.suppress(OSError):
                    path, file = make(total)
            path = share(path)
            mapped = None
            if path:
                with contextlib.suppress(OSError, ValueError):
                    file = os.open(path, os.O_RDWR) if index else file
                    mapped = map_file(file, total)
            agreed = least(int(mapped is not None))
            if index == 0 and make is _named_file and path:
                os.unlink(path)
            if agreed and mapped is not None:
                return cls(mapped[1], n_regions, file, mapped[0])
            if file >= 0:
                os.close(file)
        return None

    def back(self, start: int, n_bytes: int) -> None:
        """Give a part real memory, and touch it once.

        Parameters
        ----------
        start, n_bytes : int
            Of the part, whole pages.

        Raises
        ------
        OSError
            If there is no room.
        """
        if self._file >= 0:
            stop, low = start + n_bytes, start
            if self._huge:
                low = min(stop, start + -start % self._huge)
                high = max(low, stop // self._huge * self._huge)
                if self._on_huge_pages(low, high):
                    self._fallocate(start, low)
                    low = high
                else:
                    low = start
            self._fallocate(low, stop)
            self.touch(start, n_bytes)

    def _on_huge_pages(self, low: int, high: int) -> bool:
        """Back whole huge pages from one page each; false where the system does not give them."""
        for start in range(low, high, self._huge):
            self._fallocate(start, start + PAGE)
        self.bytes[low : high : self._huge] = 0
        return high > low and collapse(self.address + low, high - low)

    def _fallocate(self, start: int, stop: int) -> None:
        if stop > start:
            os.posix_fallocate(self._file, start, stop - start)

    def touch(self, start: int, n_bytes: int) -> None:
        """Enter pages that somebody has backed into this process's table, all at once."""
        if self._file >= 0 and not populate(self.address + start, n_bytes):
            self.bytes[start : start + n_bytes : PAGE].sum()

    def locate(self, array: Array) -> int:
        """Where a contiguous array lies.

        Parameters
        ----------
        array : ndarray
            Any.

        Returns
        -------
        int
            Offset in the mapping, the same for every rank; -1 outside.
        """
        offset = array.__array_interface__["data"][0] - self.address
        return offset if 0 <= offset < self.n_bytes else -1

    def words(self, offset: int, n_bytes: int) -> memoryview:
        """Aligned 8-byte words somewhere in the mapping.

        Parameters
        ----------
        offset, n_bytes : int
            Multiples of 8.

        Returns
        -------
        memoryview
            Of format ``q``: read and written in one piece.
        """
        return memoryview(self.bytes)[offset : offset + n_bytes].cast("q")  # type: ignore[arg-type]

    def view(self, offset: int, n_elements: int, dtype: np.dtype[Any]) -> Array:
        """A flat array somewhere in the mapping.

        Parameters
        ----------
        offset, n_elements : int
            From `locate`, and its size.
        dtype : dtype
            Element type.

        Returns
        -------
        ndarray
            Flat and writable.
        """
        return self.bytes[offset : offset + n_elements * dtype.itemsize].view(dtype)


def _anonymous_file(n_bytes: int) -> tuple[str, int]:
    """A file without a name, reached by peers through /proc: no limit of /dev/shm applies."""
    file = os.memfd_create("mpipar-arena")
    os.truncate(file, n_bytes)
    return f"/proc/{os.getpid()}/fd/{file}", file


def _named_file(n_bytes: int) -> tuple[str, int]:
    """A file in /dev/shm, unlinked as soon as all have mapped it."""
    file, path = tempfile.mkstemp(prefix="mpipar-arena-", dir="/dev/shm")
    os.truncate(file, n_bytes)
    return path, file
