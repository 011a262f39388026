"""The blocks of one rank: who holds which, what may be reused, what is on its way."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mpipar.distributed_cache.eviction import LRU, Blocks, EvictionPolicy, leaves_first
from mpipar.distributed_cache.invariants import (
    ACTIVE,
    CACHED,
    DRAINING,
    RESERVED,
    STATES,
    PoolListener,
    broken_rules,
)
from mpipar.distributed_cache.status import (
    ASLEEP,
    KNOWN,
    LONELY,
    NO_DIGEST,
    STATUS,
    BlockName,
    Distinct,
    Places,
    must_be,
    word,
)
from mpipar.errors import CacheError, CountOutOfRange


class BlockPool:
    """All blocks of one rank, each in exactly one state.

    *free*: no hash. *cached*: nobody holds it, the hash is kept until the block is reused.
    *active*: held by one or more tables. *reserved*: data is on its way in. *draining*: given up,
    but somebody may still read or write it. Every operation is in bulk and either happens for all
    of its blocks or raises before it changed anything.

    Parameters
    ----------
    n_blocks : int
        Number of blocks, at least 1.
    policy : callable, optional
        Makes the eviction policy from the number of blocks; `LRU` if left out.

    Attributes
    ----------
    references : array of int32
        Number of holders, by block.
    state : array of uint8
        One of FREE, CACHED, ACTIVE, RESERVED, DRAINING.
    generation : array of uint32
        Number of the call that took the block last: another one at each reuse.
    digest : array of uint64, shape [block, 2]
        Chain hash of the hashed blocks.
    parent, children : array of int32
        The block before (-1 at a root) and the number of hashed blocks after each.
    listeners : list of PoolListener
        Told of each hash that comes or goes.
    """

    def __init__(
        self, n_blocks: int, *, policy: Callable[[int], EvictionPolicy] | None = None
    ) -> None:
        if n_blocks < 1:
            raise CountOutOfRange("number of blocks", "1 or more", n_blocks)
        self.n_blocks = n_blocks
        status = np.zeros(n_blocks, STATUS)
        self._status = status.view(np.int64)
        self.references: NDArray[np.int32] = status["references"]
        self.state: NDArray[np.uint8] = status["state"]
        self.hashed: NDArray[np.bool_] = status["hashed"]
        self.generation = np.zeros(n_blocks, np.uint32)
        # one row more, which an index may name for "no block": it equals no digest
        self.digests = np.full((n_blocks + 1, 2), NO_DIGEST, np.uint64)
        self.digest = self.digests[:-1]
        self.parent = np.full(n_blocks, -1, np.int32)
        self.children = np.zeros(n_blocks, np.int32)
        self.policy: EvictionPolicy = (policy or LRU)(n_blocks)
        self.listeners: list[PoolListener] = []
        self._stack: Blocks = np.arange(n_blocks, dtype=np.int32)[::-1].copy()
        self._n_free = n_blocks
        self._distinct = Distinct(n_blocks)
        self._clock = 0

    @property
    def n_free(self) -> int:
        """Blocks without a hash that nobody holds."""
        return self._n_free

    @property
    def n_cached(self) -> int:
        """Blocks that nobody holds and that can still be hit."""
        return len(self.policy)

    def allocate(self, n: int) -> Blocks:
        """Take blocks for writing, each with one holder; cached blocks are evicted when needed.

        Parameters
        ----------
        n : int
            How many.

        Returns
        -------
        array of int32
            Active blocks with a new generation.

        Raises
        ------
        CacheError
            If fewer can be had; nothing was changed.
        """
        return self._take(n, ACTIVE)

    def reserve(self, n: int) -> Blocks:
        """Take blocks for data that comes from elsewhere; they cannot be hit or shared yet.

        Parameters
        ----------
        n : int
            How many.

        Returns
        -------
        array of int32
            Reserved blocks with a new generation.
        """
        return self._take(n, RESERVED)

    def commit(self, blocks: ArrayLike) -> None:
        """Turn reserved blocks into active ones: their data is complete.

        Parameters
        ----------
        blocks : array of int32
            Reserved blocks.
        """
        ids = self._of("commit", blocks, RESERVED)
        self._status[ids] = LONELY

    def share(self, blocks: ArrayLike) -> None:
        """Add one holder to each block; cached ones come back to life.

        Parameters
        ----------
        blocks : array of int32
            Active or cached blocks.

        Raises
        ------
        CacheError
            If one is neither.
        """
        ids = self._of("share", blocks, ACTIVE, CACHED)
        status = self._status[ids]
        asleep = status == ASLEEP
        if np.count_nonzero(asleep):
            self.policy.revive(ids[asleep])
            status[asleep] = word(ACTIVE, True, 0)
        self._status[ids] = status
        self.references[ids] += 1

    def release(self, blocks: ArrayLike) -> None:
        """Take one holder from each block.

        Parameters
        ----------
        blocks : array of int32
            Active blocks as they lie in a table: the last is evicted first. Those that nobody
            holds any more are cached if they carry a hash and free if not.

        Raises
        ------
        CacheError
            If one is not active, or named twice.
        """
        ids = self._distinct("release", blocks)[::-1]
        status = self._status[ids]
        lonely = status == LONELY
        n_lonely = np.count_nonzero(lonely)
        if n_lonely == len(ids):
            self._push(ids)
            return
        must_be("release", ids, self.state[ids], ACTIVE)
        known = status == KNOWN
        n_known = np.count_nonzero(known)
        if n_known + n_lonely < len(ids):
            self.references[ids[~known & ~lonely]] -= 1
        if n_known:
            kept = ids[known] if n_known < len(ids) else ids
            self._status[kept] = ASLEEP
            self.policy.insert(kept)
        if n_lonely:
            self._push(ids[lonely])

    def drain(self, blocks: ArrayLike) -> None:
        """Give up blocks that somebody may still read or write; `forget` ends it.

        Parameters
        ----------
        blocks : array of int32
            Reserved blocks, or active ones with one holder; a hash is dropped.

        Raises
        ------
        CacheError
            If one is in another state, has more holders, or hashed children that stay.
        """
        ids = self._of("drain", blocks, RESERVED, ACTIVE)
        if (self.references[ids] > 1).any():
            worst = ids[self.references[ids].argmax()]
            raise CacheError(
                f"cannot drain block {worst}: {self.references[worst]} holders, at most 1 allowed"
            )
        self._unhash(ids)
        self.references[ids] = 0
        self.state[ids] = DRAINING

    def forget(self, blocks: ArrayLike) -> None:
        """Make cached or draining blocks free; their hashes are gone.

        Parameters
        ----------
        blocks : array of int32
            Cached or draining blocks.

        Raises
        ------
        CacheError
            If one is in another state, or has hashed children that stay.
        """
        ids = self._of("forget", blocks, CACHED, DRAINING)
        self._unhash(ids)
        asleep = ids[self.state[ids] == CACHED]
        if asleep.size:
            self.policy.drop(asleep)
        self._push(ids)

    def label(self, blocks: Blocks, digests: NDArray[np.uint64], parents: Blocks) -> None:
        """Give full blocks their chain hash, so that they can be found and cached.

        Parameters
        ----------
        blocks : array of int32
            Active blocks without a hash, parents before children.
        digests : array of uint64, shape [block, 2]
            Their chain hashes.
        parents : array of int32
            The block before each, -1 at a root.

        Raises
        ------
        CacheError
            If a block already has a hash, or a parent has none.
        """
        ids = self._of("label", blocks, ACTIVE)
        held = parents[parents >= 0].astype(np.intp)
        if np.count_nonzero(self.hashed[ids]):
            raise CacheError(f"block {ids[self.hashed[ids].argmax()]} already carries a hash")
        self.hashed[ids] = True
        if np.count_nonzero(self.hashed[held]) < len(held):
            self.hashed[ids] = False
            raise CacheError(f"parent {held[~self.hashed[held]][0]} carries no hash")
        self.digest[ids] = digests
        self.parent[ids] = parents
        self._count(held, 1)
        for listener in self.listeners:
            listener.stored(ids)

    def name(self, rank: int, block: int) -> BlockName:
        """Name a block for other ranks.

        Parameters
        ----------
        rank : int
            The rank of this pool.
        block : int
            The block.

        Returns
        -------
        BlockName
            Rank, block and the generation of now.
        """
        return BlockName(rank, block, int(self.generation[block]))

    def is_current(self, name: BlockName) -> bool:
        """Whether a name still means the same data.

        Parameters
        ----------
        name : BlockName
            A name that this pool gave.

        Returns
        -------
        bool
            False once the block was free or reused.
        """
        inside = 0 <= name.block < self.n_blocks
        return bool(
            inside
            and self.generation[name.block] == name.generation
            and self.state[name.block] in (ACTIVE, CACHED)
        )

    def check(self, tables: Iterable[ArrayLike] | None = None) -> None:
        """Walk every invariant.

        Parameters
        ----------
        tables : iterable of arrays of int32, optional
            All block tables there are: then a leaked or lost holder is found too.

        Raises
        ------
        CacheError
            With the rule that is broken and the first block that breaks it.
        """
        for rule, broken in broken_rules(self, self._stack[: self._n_free], tables).items():
            if broken.any():
                block = int(broken.argmax())
                state = (*STATES, "in no state")[min(self.state[block], len(STATES))]
                raise CacheError(
                    f"{int(broken.sum())} of {self.n_blocks} blocks: {rule}; first: block {block}, "
                    f"{state}, {self.references[block]} holders"
                )

    def _take(self, n: int, state: int) -> Blocks:
        if n < 0:
            raise CountOutOfRange("blocks to take", "0 or more", n)
        if n > self._n_free:
            self.forget(self._victims(n - self._n_free, n))
        top = self._n_free - n
        ids = self._stack[top : self._n_free][::-1].copy()
        self._n_free = top
        at = ids.astype(np.intp)
        self._status[at] = LONELY if state == ACTIVE else word(state, False, 0)
        self._clock = (self._clock + 1) % 2**32
        self.generation[at] = self._clock
        return ids

    def _push(self, ids: Places) -> None:
        self._status[ids] = 0
        end = self._n_free + len(ids)
        self._stack[self._n_free : end] = ids
        self._n_free = end

    def _of(self, what: str, blocks: ArrayLike, *states: int) -> Places:
        """The blocks as places, once they are known to be distinct and in one of the states."""
        ids = self._distinct(what, blocks)
        must_be(what, ids, self.state[ids], *states)
        return ids

    def _count(self, parents: Places, step: int) -> None:
        # an array of steps: numpy's path for a number takes fifteen times as long
        np.add.at(self.children, parents, np.full(len(parents), step, np.int32))

    def _parents(self, ids: Places) -> Places:
        parents = self.parent[ids]
        return parents[parents >= 0].astype(np.intp)

    def _unhash(self, ids: Places) -> None:
        ids = ids[self.hashed[ids]]
        if not ids.size:
            return
        parents = self._parents(ids)
        self._count(parents, -1)
        if np.count_nonzero(self.children[ids]):
            block = ids[self.children[ids].argmax()]
            self._count(parents, 1)
            raise CacheError(f"block {block} has hashed children: give those up first")
        for listener in self.listeners:
            listener.removed(ids)
        self.hashed[ids] = False
        self.parent[ids] = -1

    def _victims(self, n: int, wanted: int) -> Blocks:
        best = self.policy.first(n)
        if len(best) == n:
            parents = self._parents(best.astype(np.intp))
            self._count(parents, -1)
            closed = not np.count_nonzero(self.children[best])
            self._count(parents, 1)
            if closed:
                return best
            order = self.policy.first(self.n_blocks)
            best = leaves_first(order, self.parent, self.children, n)
        if len(best) < n:
            raise CacheError(
                f"{wanted} blocks asked for: {self._n_free} are free and {len(best)} of "
                f"{len(self.policy)} cached ones have no held block after them; "
                f"ask for at most {self._n_free + len(best)} of {self.n_blocks}"
            )
        return best
