"""The arena: this rank's part of the memory of its node, handed out in pooled blocks."""

from __future__ import annotations

import logging
import math
import os
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable
from operator import index
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from mpipar.comm.call import Array
from mpipar.comm.node.huge_pages import PAGE
from mpipar.comm.node.memory import Memory
from mpipar.errors import CountOutOfRange, UnsupportedArray

_log = logging.getLogger("mpipar")
_SEGMENT = 8 * 2**20
_LARGEST_SEGMENT = 256 * 2**20
_LINE = 64


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
        dims, kind = checked_spec(shape, dtype)
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
            -(-needed // PAGE) * PAGE,
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
    return physical // n_regions // PAGE * PAGE


def checked_spec(
    shape: int | tuple[int, ...], dtype: DTypeLike
) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Extents and type of a new array, or what is wrong with them.

    Parameters
    ----------
    shape : int or tuple of int
        Of the array.
    dtype : dtype
        Element type.

    Returns
    -------
    (tuple of int, dtype)
        Sound.

    Raises
    ------
    CountOutOfRange
        For a negative extent.
    UnsupportedArray
        For Python objects, and for what is no shape or no type.
    """
    try:
        kind = np.dtype(dtype)
        dims = tuple(map(index, shape if isinstance(shape, Iterable) else (shape,)))
    except TypeError as error:
        raise UnsupportedArray(f"shape {shape!r}, dtype {dtype!r}: {error}") from None
    if kind.hasobject:
        raise UnsupportedArray(f"dtype {kind}: Python objects have no place in shared memory")
    if min(dims, default=0) < 0:
        raise CountOutOfRange(f"extents of shape {dims}", "0 or more", min(dims))
    return dims, kind


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
    dims, kind = checked_spec(shape, dtype)
    n_bytes = math.prod(dims) * kind.itemsize
    try:
        raw = np.empty(n_bytes + _LINE, np.uint8)
    except (MemoryError, ValueError):
        raise CountOutOfRange(
            f"bytes of an array of shape {dims} and dtype {kind}", "what this machine can give",
            n_bytes,
        ) from None  # fmt: skip
    start = -raw.__array_interface__["data"][0] % _LINE
    return raw[start : start + n_bytes].view(kind).reshape(dims)


def _rounded(n_bytes: int) -> int:
    """Pool size: a multiple of 64 bytes, and of an eighth of its power of two."""
    step = max(_LINE, 1 << max(0, n_bytes.bit_length() - 4))
    if step > _LINE and n_bytes > PAGE:
        step = max(step, PAGE)
    return max(_LINE, -(-n_bytes // step) * step)
