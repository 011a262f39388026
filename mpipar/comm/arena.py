"""Node-shared memory: one mapping for all ranks of a node, of which each rank owns a region.

The mapping is made once, sparse and as large as it may ever grow: pages exist only where a rank
has backed them. So growth is local, any rank finds any array of its peers by one offset, and
neither a collective nor a further mapping is ever needed. Plain shared memory is used rather than
an MPI window: there are no epochs, both MPI libraries work alike, copies run at the same speed,
and nothing is left behind when a job is killed.
"""

from __future__ import annotations

import contextlib
import logging
import math
import mmap
import os
import tempfile
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from mpipar.comm.call import Array
from mpipar.errors import CountOutOfRange

_log = logging.getLogger("mpipar")
_SEGMENT = 8 * 2**20
_LARGEST_SEGMENT = 256 * 2**20
_PAGE = 4096
_POPULATE_WRITE = 23  # Linux 5.14
_LINE = 64


class Memory:
    """The mapping of one node.

    Parameters
    ----------
    map_ : mmap.mmap
        All regions, one after the other.
    n_regions : int
        Number of ranks that share it.
    file : int
        Descriptor behind the mapping, or -1.
    """

    def __init__(self, map_: mmap.mmap, n_regions: int, file: int = -1) -> None:
        self._map = map_
        self._file = file
        self.bytes = np.frombuffer(map_, np.uint8)
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
            path, file, total = "", -1, region_bytes // _PAGE * _PAGE * n_regions
            if index == 0:
                with contextlib.suppress(OSError):
                    path, file = make(total)
            path = share(path)
            mapped = None
            if path:
                with contextlib.suppress(OSError, ValueError):
                    file = os.open(path, os.O_RDWR) if index else file
                    mapped = mmap.mmap(file, total)
            agreed = least(int(mapped is not None))
            if index == 0 and make is _named_file and path:
                os.unlink(path)
            if agreed and mapped is not None:
                return cls(mapped, n_regions, file)
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
            os.posix_fallocate(self._file, start, n_bytes)
        self.touch(start, n_bytes)

    def touch(self, start: int, n_bytes: int) -> None:
        """Enter pages that somebody has backed into this process's table, all at once."""
        if self._file < 0:
            return
        try:
            self._map.madvise(_POPULATE_WRITE, start, n_bytes)
        except OSError:
            self.bytes[start : start + n_bytes : _PAGE].sum()

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
        return memoryview(self._map)[offset : offset + n_bytes].cast("q")

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


class Arena:
    """The region of one rank: blocks are taken and given back locally, without any communication.

    Blocks are aligned to 64 bytes, touched once when their segment is made, and pooled by size.

    Parameters
    ----------
    memory : Memory
        Mapped by all ranks of the node.
    index : int
        Which region is this rank's.
    """

    def __init__(self, memory: Memory, index: int) -> None:
        self.memory = memory
        self._low = index * memory.region_bytes
        self._top = self._low
        self._backed = self._low
        self._high = self._low + memory.region_bytes
        self._live: dict[int, int] = {}
        self._free: defaultdict[int, list[int]] = defaultdict(list)
        self.n_segments = 0

    @property
    def n_blocks(self) -> int:
        """Blocks in use."""
        return len(self._live)

    @property
    def n_bytes(self) -> int:
        """Bytes of the blocks in use."""
        return sum(self._live.values())

    @property
    def backed(self) -> int:
        """Up to where the region has real memory."""
        return self._backed

    def take(self, n_bytes: int) -> int:
        """A block.

        Parameters
        ----------
        n_bytes : int
            At least so many bytes.

        Returns
        -------
        int
            Its offset in the mapping.

        Raises
        ------
        CountOutOfRange
            If the node has no more shared memory; names the size and the setting.
        """
        size = _rounded(n_bytes)
        offset = self._pooled(size)
        if offset < 0:
            if self._top + size > self._backed:
                self._grow(size)
            offset = self._top
            self._top += size
            self._live[offset] = size
        return offset

    def give(self, offset: int) -> None:
        """Give a block back.

        Parameters
        ----------
        offset : int
            From `take`.

        Raises
        ------
        CountOutOfRange
            If no such block is in use.
        """
        size = self._live.pop(offset, None)
        if size is None:
            raise CountOutOfRange("block to be freed", f"one of {self.n_blocks} in use", offset)
        self._free[size].append(offset)

    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> Array:
        """An array in this rank's region.

        Parameters
        ----------
        shape : int or tuple of int
            Of the array.
        dtype : dtype
            Element type.

        Returns
        -------
        ndarray
            C-ordered, not initialised.
        """
        kind, dims = np.dtype(dtype), (shape,) if isinstance(shape, int) else tuple(shape)
        n = math.prod(dims)
        return self.memory.view(self.take(n * kind.itemsize), n, kind).reshape(dims)

    def _pooled(self, size: int) -> int:
        """A free block of this size, or of up to twice this size."""
        if self._free[size]:
            chosen = size
        else:
            sizes = sorted(s for s, blocks in self._free.items() if blocks)
            place = bisect_left(sizes, size)
            if place == len(sizes) or sizes[place] > 2 * size:
                return -1
            chosen = sizes[place]
        offset = self._free[chosen].pop()
        self._live[offset] = chosen
        return offset

    def _grow(self, size: int) -> None:
        """Back one more segment."""
        wanted = min(_LARGEST_SEGMENT, max(_SEGMENT, self._backed - self._low))
        needed = self._top + size - self._backed
        for n_bytes in (
            max(wanted, -(-needed // _SEGMENT) * _SEGMENT),
            -(-needed // _PAGE) * _PAGE,
        ):
            if self._backed + n_bytes > self._high:
                reason = "the limit MPIPAR_ARENA_BYTES"
                continue
            try:
                self.memory.back(self._backed, n_bytes)
            except OSError as error:
                reason = f"{error.strerror}; a container's /dev/shm is often 64 MiB"
                continue
            self._backed += n_bytes
            self.n_segments += 1
            return
        have = self._backed - self._low
        raise CountOutOfRange(
            f"bytes of node-shared memory of this rank ({reason}: raise MPIPAR_ARENA_BYTES, or "
            "give the container a larger /dev/shm)",
            f"0..{min(have + size - 1, self._high - self._low)}",
            have + size,
        )


def region_limit(n_regions: int) -> int:
    """How large the region of one rank may grow: ``MPIPAR_ARENA_BYTES``, or its share of memory.

    Parameters
    ----------
    n_regions : int
        Ranks on the node.

    Returns
    -------
    int
        Bytes; 0 switches node-shared memory off.
    """
    text = os.environ.get("MPIPAR_ARENA_BYTES")
    if text is not None:
        return int(text)
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return physical // n_regions // _PAGE * _PAGE


def private_empty(shape: int | tuple[int, ...], dtype: DTypeLike) -> Array:
    """An aligned array in private memory.

    Parameters
    ----------
    shape : int or tuple of int
        Of the array.
    dtype : dtype
        Element type.

    Returns
    -------
    ndarray
        C-ordered, not initialised, aligned to 64 bytes.
    """
    kind, dims = np.dtype(dtype), (shape,) if isinstance(shape, int) else tuple(shape)
    n_bytes = math.prod(dims) * kind.itemsize
    raw = np.empty(n_bytes + _LINE, np.uint8)
    start = -raw.__array_interface__["data"][0] % _LINE
    return raw[start : start + n_bytes].view(kind).reshape(dims)


def _rounded(n_bytes: int) -> int:
    """Pool size: a multiple of 64 bytes, and of an eighth of its power of two."""
    step = max(_LINE, 1 << max(0, n_bytes.bit_length() - 4))
    if step > _LINE and n_bytes > _PAGE:
        step = max(step, _PAGE)
    return max(_LINE, -(-n_bytes // step) * step)


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
