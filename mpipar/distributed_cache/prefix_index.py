"""Which block holds which prefix: a hash map in arrays, looked up in bulk."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mpipar.distributed_cache.eviction import Blocks
from mpipar.distributed_cache.hashing import Chain
from mpipar.distributed_cache.pool import BlockPool
from mpipar.errors import CacheError

_WAYS = 4
_HALF = np.uint64(32)


class Index(Protocol):
    """What finds the blocks of a prefix: `PrefixIndex` or `RadixIndex`."""

    pool: BlockPool

    def match(self, chain: Chain) -> Blocks:
        """Find the longest prefix that is held.

        Parameters
        ----------
        chain : Chain
            The full blocks of a request.

        Returns
        -------
        array of int32
            Blocks of the leading part that is present; nobody holds them for the caller yet.
        """
        ...

    def insert(self, chain: Chain, blocks: Blocks) -> Blocks:
        """Name active blocks that hold a chain's data, so that others find them.

        Parameters
        ----------
        chain : Chain
            As long as `blocks`.
        blocks : array of int32
            The caller's blocks for all of the chain; those already known are left.

        Returns
        -------
        array of int32
            The blocks that stand for the chain: another one where the same data was there first.
        """
        ...


class PrefixIndex:
    """A hash map from chain hash to block, in one array of small buckets.

    Looks up a whole chain at once. A digest that finds its bucket of four full goes into a small
    dictionary (at most one in 250). It listens to its pool: evicted blocks leave by themselves.

    Parameters
    ----------
    pool : BlockPool
        The blocks to find.
    verify : bool
        Keep each block's tokens (4 bytes each) and compare them at each hit: a digest that is
        equal by accident, or a damaged one, can then never give wrong data.
    """

    def __init__(self, pool: BlockPool, *, verify: bool = False) -> None:
        self.pool = pool
        self.verify = verify
        self._n_buckets = np.uint64(pool.n_blocks)
        self._table: Blocks = np.full((pool.n_blocks, _WAYS), -1, np.int32)
        self._places = self._table.reshape(-1)
        self._spill: dict[int, int] = {}
        self._tokens: NDArray[np.int32] | None = None
        pool.listeners.append(self)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        tokens = 0 if self._tokens is None else self._tokens.nbytes
        return self._table.nbytes + tokens

    def match(self, chain: Chain) -> Blocks:
        """Find the longest prefix that is held.

        Parameters
        ----------
        chain : Chain
            The full blocks of a request.

        Returns
        -------
        array of int32
            Blocks of the leading part that is present; nobody holds them for the caller yet.
        """
        found = self._find(chain.digests)
        if self.verify and found.size and self._tokens is not None:
            same = (self._tokens[found] == chain.tokens[: len(found)]).all(axis=1)
            if not same.all():
                found = found[: same.argmin()]
        return found

    def insert(self, chain: Chain, blocks: Blocks) -> Blocks:
        """Name active blocks that hold a chain's data, so that others find them.

        Parameters
        ----------
        chain : Chain
            As long as `blocks`.
        blocks : array of int32
            The caller's blocks for all of the chain; those already known are left.

        Returns
        -------
        array of int32
            The blocks that stand for the chain: another one where the same data was there first.
        """
        stands = np.array(blocks, np.int32)
        known = self.match(chain)
        n = len(known)
        stands[:n] = known
        if n == len(stands):
            return stands
        if self.verify:
            if self._tokens is None:
                self._tokens = np.zeros((self.pool.n_blocks, chain.tokens.shape[1]), np.int32)
            self._tokens[stands[n:]] = chain.tokens[n:]
        parents = np.concatenate([stands[n - 1 : n] if n else np.full(1, -1), stands[n:-1]])
        self.pool.label(stands[n:], chain.digests[n:], parents.astype(np.int32))
        return stands

    def stored(self, blocks: Blocks) -> None:
        """Take in blocks that were given a hash (called by the pool).

        Parameters
        ----------
        blocks : array of int32
            Blocks whose digests are in the pool.
        """
        low = self.pool.digest[:, 0][blocks]
        while blocks.size:
            bucket = self._bucket(low)
            rows = self._table.take(bucket, axis=0)
            way = (rows < 0).argmax(axis=1)
            place = bucket * _WAYS + way
            room = self._places[place] < 0
            if np.count_nonzero(room) < len(room):
                keys, over = low[~room].tolist(), blocks[~room].tolist()
                self._spill.update(zip(keys, over, strict=True))
                blocks, low, place = blocks[room], low[room], place[room]
            self._places[place] = blocks
            # two digests of one call may have chosen the same place: the losers go again
            lost = self._places[place] != blocks
            blocks, low = blocks[lost], low[lost]

    def removed(self, blocks: Blocks) -> None:
        """Let go of blocks that lose their hash (called by the pool).

        Parameters
        ----------
        blocks : array of int32
            Blocks whose digests are still in the pool.
        """
        low = self.pool.digest[:, 0][blocks]
        bucket = self._bucket(low)
        rows = self._table.take(bucket, axis=0)
        found = (rows == blocks.astype(np.int32)[:, None]).ravel().nonzero()[0]
        self._places[bucket[found // _WAYS] * _WAYS + found % _WAYS] = -1
        if len(found) < len(blocks):
            spilt = np.ones(len(blocks), np.bool_)
            spilt[found // _WAYS] = False
            for key in low[spilt].tolist():
                del self._spill[key]

    def check(self) -> None:
        """Walk every invariant.

        Raises
        ------
        CacheError
            If the map and the pool's hashes are not the same.
        """
        mapped = np.sort([*self._table[self._table >= 0].tolist(), *self._spill.values()])
        hashed = np.flatnonzero(self.pool.hashed)
        if not np.array_equal(mapped, hashed):
            raise CacheError(f"{len(mapped)} blocks in the index, {len(hashed)} with a hash")

    def _bucket(self, low: NDArray[np.uint64]) -> NDArray[np.int64]:
        # the upper half as a fraction of 2**32, times the number of buckets: no power of two needed
        return ((low >> _HALF) * self._n_buckets >> _HALF).view(np.int64)

    def _find(self, digests: NDArray[np.uint64]) -> Blocks:
        """Blocks of the leading digests that are present."""
        n = len(digests)
        low = digests[:, 0]
        rows = self._table.take(self._bucket(low), axis=0)
        # an empty place (-1) names the pool's last row, which equals no digest
        hit = self.pool.digests[:, 0][rows.astype(np.intp)] == low[:, None]
        places = hit.ravel().nonzero()[0]
        if len(places) == n:  # each digest is in one place at most: all are there
            found: Blocks = rows.ravel()[places]
        else:
            found = np.full(n, -1, np.int32)
            found[places // _WAYS] = rows.ravel()[places]
            upto = int((found < 0).argmax())
            while self._spill and upto < n and found[upto] < 0:
                found[upto] = self._spill.get(int(low[upto]), -1)
                if found[upto] < 0:
                    break
                upto = int((found < 0).argmax()) if (found < 0).any() else n
            found = found[:upto]
        same = self.pool.digest[:, 1][found.astype(np.intp)] == digests[: len(found), 1]
        return found if np.count_nonzero(same) == len(found) else found[: same.argmin()]
