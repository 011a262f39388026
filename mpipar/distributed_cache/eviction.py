"""Which cached block is given up first: one interface, least recently used by default."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Blocks = NDArray[np.int32]


class EvictionPolicy(Protocol):
    """An order of the cached blocks: the pool asks for victims and keeps the rules of the tree.

    A policy sees only blocks that nobody holds, so it can never name a pinned one. The pool sees
    to it that a block with cached children is not evicted before them.
    """

    def __len__(self) -> int:
        """Count the cached blocks."""
        ...

    def insert(self, blocks: Blocks) -> None:
        """Blocks became cached, the tail of their chain first.

        Parameters
        ----------
        blocks : array of int32
            Distinct blocks that were not cached.
        """
        ...

    def revive(self, blocks: Blocks) -> None:
        """Cached blocks were hit and are held again.

        Parameters
        ----------
        blocks : array of int32
            Distinct cached blocks.
        """
        ...

    def drop(self, blocks: Blocks) -> None:
        """Cached blocks were evicted or forgotten.

        Parameters
        ----------
        blocks : array of int32
            Distinct cached blocks.
        """
        ...

    def first(self, n: int) -> Blocks:
        """Name the next victims and change nothing.

        Parameters
        ----------
        n : int
            How many.

        Returns
        -------
        array of int32
            `n` cached blocks, or all there are; the first is the best victim.
        """
        ...


def leaves_first(order: Blocks, parent: Blocks, children: Blocks, n: int) -> Blocks:
    """Choose the first of an order that have nothing hashed after them but what was chosen.

    Parameters
    ----------
    order : array of int32
        Cached blocks, the best victim first.
    parent, children : array of int32
        By block: the one before it (-1 at a root), and how many hashed ones come after it.
    n : int
        How many.

    Returns
    -------
    array of int32
        `n` blocks, or fewer where held blocks come after the others.
    """
    rank = {block: place for place, block in enumerate(order.tolist())}
    left = children[order]
    heap: list[int] = np.flatnonzero(left == 0).tolist()
    found: list[int] = []
    while heap and len(found) < n:
        place = heappop(heap)
        found.append(int(order[place]))
        above = rank.get(int(parent[order[place]]), -1)
        if above >= 0:
            left[above] -= 1
            if not left[above]:
                heappush(heap, above)
    return np.array(found, np.int32)


class LRU:
    """Least recently used; of one request the tail goes before the head.

    A queue in one array: a block's stamp is its place there, so a place whose block carries
    another stamp is stale. Bulk operations touch each block once; the queue is packed when its
    end is reached, which costs a constant share per block.

    Parameters
    ----------
    n_blocks : int
        Size of the pool.
    """

    def __init__(self, n_blocks: int) -> None:
        self._stamp = np.full(n_blocks, -1, np.int32)
        self._queue: Blocks = np.empty(2 * n_blocks + 1, np.int32)
        self._head = self._tail = self._count = 0

    def __len__(self) -> int:
        """Count the cached blocks."""
        return self._count

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return self._stamp.nbytes + self._queue.nbytes

    def insert(self, blocks: Blocks) -> None:
        """Append blocks at the young end.

        Parameters
        ----------
        blocks : array of int32
            Distinct blocks that were not cached, tail first.
        """
        if self._tail + len(blocks) > len(self._queue):
            self._pack()
        end = self._tail + len(blocks)
        self._queue[self._tail : end] = blocks
        self._stamp[blocks.astype(np.int64)] = np.arange(self._tail, end, dtype=np.int32)
        self._tail = end
        self._count += len(blocks)

    def revive(self, blocks: Blocks) -> None:
        """Take blocks out of the order.

        Parameters
        ----------
        blocks : array of int32
            Distinct cached blocks.
        """
        self._stamp[blocks.astype(np.int64)] = -1
        self._count -= len(blocks)

    drop = revive

    def first(self, n: int) -> Blocks:
        """Name the oldest blocks and change nothing.

        Parameters
        ----------
        n : int
            How many.

        Returns
        -------
        array of int32
            The `n` oldest, or all there are.
        """
        n = min(n, self._count)
        span = n
        while True:
            window = self._queue[self._head : min(self._head + span, self._tail)]
            places = np.arange(self._head, self._head + len(window), dtype=np.int32)
            live = self._stamp.take(window) == places
            if n and not live[0]:
                stale = int(live.argmax()) or len(live)
                self._head += stale
                continue
            found: Blocks = window[live]
            if len(found) >= n:
                return found[:n]
            span *= 2

    def _pack(self) -> None:
        kept = self.first(self._count)
        self._queue[: len(kept)] = kept
        self._stamp[kept] = np.arange(len(kept), dtype=np.int32)
        self._head, self._tail = 0, len(kept)
