"""Keep some sequences for as long as a reuse takes, instead of all for too short a time.

Least recently used serves a stream well while the pool holds what arrives between a use and the
next. Where it holds less, every block goes just before it is wanted. `Retention` then lets a part
of the blocks stay for a window and gives up the newest ones, those with the fewest uses first.

The window is learned while running. With S(a) the share of blocks not used again up to age a
(Kaplan and Meier's estimate, which takes evicted and still cached blocks for what they are:
seen up to some age), holding blocks for a window w costs ``sum S(a), a < w`` and gives
``1 - S(w)`` hits; the window with the most hits for its cost wins, the idea of hit density
(Beckmann, Chen and Cidon, NSDI 2018). A few blocks stay four times as long, to see beyond it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mpipar.distributed_cache.eviction import Blocks

_N_BINS = 24  # ages of n_blocks / 16 up to 180 n_blocks, each bin 1.41 times as far
_SHARED = 16  # a prefix with so many uses is a common prompt and says nothing of what follows it
_SCOUTS = 16  # one release in so many, up to so small a part of the pool, is kept longer
_FAR = 4  # windows, or pools, as long


class Retention:
    """An eviction policy for streams that are larger than the pool.

    Age is counted in blocks that were released since, so no clock is needed.

    Parameters
    ----------
    n_blocks : int
        Size of the pool.

    Attributes
    ----------
    window : float
        The age up to which a block is kept, as learned so far.
    """

    def __init__(self, n_blocks: int) -> None:
        self._n_blocks = n_blocks
        self._edges = n_blocks / 16 * 2 ** (np.arange(_N_BINS) / 2)
        self._widths = np.diff(self._edges, prepend=0)
        self._born = np.full(n_blocks, -1, np.int64)  # -1: not cached
        self._place = np.zeros(n_blocks, np.int32)  # from the tail, among those released with it
        self._uses = np.full(n_blocks, -1, np.int32)  # -1: not known yet
        self._is_new = np.zeros(n_blocks, np.bool_)  # not used again yet
        self._is_scout = np.zeros(n_blocks, np.bool_)
        self._hits = np.zeros(_N_BINS)
        self._ends = np.zeros(_N_BINS)
        self._now = self._count = self._n_calls = self._n_scouts = 0
        self._next = np.empty(0, np.int64)
        self._next_born = np.empty(0, np.int64)
        self._learn_at = n_blocks
        self.window = float("inf")

    def __len__(self) -> int:
        """Count the cached blocks."""
        return self._count

    def insert(self, blocks: Blocks) -> None:
        """Blocks became cached; those that are new count as often used as what they follow.

        Parameters
        ----------
        blocks : array of int32
            Distinct blocks that were not cached, tail first.
        """
        ids = blocks.astype(np.int64)
        is_new = self._uses[ids] < 0
        uses = int(self._uses[ids[is_new.argmin()]]) if not is_new.all() else 0
        self._uses[ids[is_new]] = uses if uses < _SHARED else 0
        self._is_new[ids[is_new]] = True
        self._now += len(ids)
        self._count += len(ids)
        self._born[ids] = self._now
        self._place[ids] = np.arange(len(ids))
        self._n_calls += 1
        if self._n_calls % _SCOUTS == 0 and _SCOUTS * self._n_scouts < self._n_blocks:
            self._n_scouts += len(ids) - int(np.count_nonzero(self._is_scout[ids]))
            self._is_scout[ids] = True
        if self._now >= self._learn_at:
            self._learn()

    def revive(self, blocks: Blocks) -> None:
        """Cached blocks were hit.

        Parameters
        ----------
        blocks : array of int32
            Distinct cached blocks.
        """
        ids = blocks.astype(np.int64)
        self._see(self._hits, ids)
        self._is_new[ids] = False
        self._uses[ids] += 1
        self._born[ids] = -1
        self._count -= len(ids)

    def drop(self, blocks: Blocks) -> None:
        """Cached blocks were evicted or forgotten.

        Parameters
        ----------
        blocks : array of int32
            Distinct cached blocks.
        """
        ids = blocks.astype(np.int64)
        self._see(self._ends, ids)
        self._n_scouts -= int(np.count_nonzero(self._is_scout[ids]))
        self._is_scout[ids] = False
        self._uses[ids] = self._born[ids] = -1
        self._count -= len(ids)

    def first(self, n: int) -> Blocks:
        """Name the oldest beyond the window, then the least used and newest within.

        Parameters
        ----------
        n : int
            How many.

        Returns
        -------
        array of int32
            `n` cached blocks, or all there are.
        """
        n = min(n, self._count)
        ready = self._next[self._born[self._next] == self._next_born]
        if len(ready) < n:
            cached = np.flatnonzero(self._born >= 0)
            age = self._now - self._born[cached]
            scout = self._is_scout[cached]
            expired = age > np.where(scout, _FAR * max(self.window, self._n_blocks), self.window)
            rank = np.where(expired, -1, self._uses[cached] + scout * (1 << 30))
            order = np.lexsort((self._place[cached], np.where(expired, -age, age), rank))
            ready = cached[order[: max(n, self._n_blocks // 64)]]
            if n < self._count:
                self._next, self._next_born = ready, self._born[ready]
        found: Blocks = ready[:n].astype(np.int32)
        return found

    # -- inside ---------------------------------------------------------------------------------

    def _see(self, counts: NDArray[np.float64], ids: NDArray[np.int64]) -> None:
        """Count the ages of blocks before their first reuse; a common prompt would hide them."""
        ids = ids[self._is_new[ids]]
        bins = np.searchsorted(self._edges, self._now - self._born[ids])
        counts += np.bincount(np.minimum(bins, _N_BINS - 1), minlength=_N_BINS)

    def _learn(self) -> None:
        """Choose the window anew; older counts fade."""
        self._learn_at = self._now + max(1, self._n_blocks // 2)
        alive = np.zeros(_N_BINS)
        self._see(alive, np.flatnonzero(self._born >= 0))
        at_risk = np.cumsum((self._hits + self._ends + alive)[::-1])[::-1]
        seen = int(np.count_nonzero(at_risk))
        if seen:
            stays = np.cumprod(1 - self._hits[:seen] / at_risk[:seen])
            before = np.concatenate(([1.0], stays[:-1]))
            density = (1 - stays) / np.cumsum(self._widths[:seen] * (before + stays) / 2)
            best = int(density.argmax())
            # no reuse yet, or the most at the edge of what was seen: look beyond it
            at_edge = best == seen - 1 or not density[best]
            self.window = float(2 * self._edges[seen - 1] if at_edge else self._edges[best])
        self._hits *= 0.95
        self._ends *= 0.95
