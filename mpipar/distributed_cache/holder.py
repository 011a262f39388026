"""What a transfer needs of a rank's blocks: pin what is there, make room, take in what came."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from mpipar.distributed_cache.directory import PrefixLog
from mpipar.distributed_cache.eviction import Blocks
from mpipar.distributed_cache.hashing import Chain
from mpipar.distributed_cache.pool import BlockPool
from mpipar.distributed_cache.prefix_index import PrefixIndex
from mpipar.errors import CacheError


class PoolHolder:
    """One rank's pool and index as the two ends of a transfer see them.

    It listens to the pool: blocks that get a hash enter the log, blocks that lose it leave.

    Parameters
    ----------
    pool : BlockPool
        The blocks.
    index : PrefixIndex
        Finds them by digest; one that compares tokens cannot, as tokens do not travel.
    log : PrefixLog
        What the peers are told.
    """

    def __init__(self, pool: BlockPool, index: PrefixIndex, log: PrefixLog) -> None:
        if index.verify:
            raise CacheError("an index with verify=True finds nothing by digest alone")
        self.pool, self.index, self.log = pool, index, log
        pool.listeners.append(self)

    def pin(self, digests: NDArray[np.uint64]) -> Blocks:
        """Hold the leading blocks of a chain that are present.

        Parameters
        ----------
        digests : array of uint64, shape [block, 2]
            Of the chain.

        Returns
        -------
        array of int32
            The blocks; nobody evicts them before `unpin`.
        """
        chain = Chain(b"", digests, np.empty((len(digests), 0), np.int32))
        found = self.index.match(chain)
        self.pool.share(found)
        return found

    def unpin(self, blocks: Blocks) -> None:
        """End a `pin`.

        Parameters
        ----------
        blocks : array of int32
            What it returned.
        """
        self.pool.release(blocks)

    def reserve(self, n: int) -> Blocks:
        """Make room for blocks that come.

        Parameters
        ----------
        n : int
            How many are wanted.

        Returns
        -------
        array of int32
            Perhaps fewer.
        """
        n = min(n, self.pool.n_free + self.pool.n_cached)
        while True:
            try:
                return self.pool.reserve(n)
            except CacheError:  # cached blocks that stand above held ones cannot go
                n //= 2

    def commit(self, blocks: Blocks, chain: Chain) -> None:
        """Take in blocks whose data is complete: cached, as if they had been computed here.

        Parameters
        ----------
        blocks : array of int32
            Reserved ones.
        chain : Chain
            Of the same length.
        """
        self.pool.commit(blocks)
        self.index.insert(chain, blocks)
        self.pool.release(blocks)

    def discard(self, blocks: Blocks) -> None:
        """Give reserved blocks back.

        Parameters
        ----------
        blocks : array of int32
            Reserved ones.
        """
        self.pool.drain(blocks)
        self.pool.forget(blocks)

    def stored(self, blocks: Blocks) -> None:
        """Tell the log (called by the pool).

        Parameters
        ----------
        blocks : array of int32
            Have a hash now.
        """
        self._tell(self.log.add, blocks)

    def removed(self, blocks: Blocks) -> None:
        """Tell the log (called by the pool).

        Parameters
        ----------
        blocks : array of int32
            Lose their hash.
        """
        self._tell(self.log.remove, blocks)

    def _tell(self, tell: Callable[[list[bytes]], None], blocks: Blocks) -> None:
        tell(digest_bytes(self.pool.digest[blocks]))


def digest_bytes(digests: NDArray[np.uint64]) -> list[bytes]:
    """Digests as the directory knows them.

    Parameters
    ----------
    digests : array of uint64, shape [block, 2]
        Of a chain or a pool.

    Returns
    -------
    list of bytes
        16 bytes each, the same on every machine.
    """
    text = digests.astype("<u8").tobytes()
    return [text[at : at + 16] for at in range(0, len(text), 16)]
