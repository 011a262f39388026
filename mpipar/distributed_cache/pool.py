"""The blocks of one rank: who holds which, what may be reused, what is on its way."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mpipar.distributed_cache.eviction import LRU, Blocks, EvictionPolicy, leaves_first
from mpipar.distributed_cache.invariants import (
    ACTIVE,
    CACHED,
    DRAINING,
    FREE,
    RESERVED,
    STATES,
    PoolListener,
    broken_rules,
)
from mpipar.errors import CacheError, CountOutOfRange


class BlockName(NamedTuple):
    """The only name of a block that may leave its rank: it dies when the block is reused."""

    rank: int
    block: int
    generation: int


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
        Grows at each reuse.
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
        self.references = np.zeros(n_blocks, np.int32)
        self.state = np.zeros(n_blocks, np.uint8)
        self.generation = np.zeros(n_blocks, np.uint32)
        self.digest = np.zeros((n_blocks, 2), np.uint64)
        self.hashed = np.zeros(n_blocks, np.bool_)
        self.parent = np.full(n_blocks, -1, np.int32)
        self.children = np.zeros(n_blocks, np.int32)
        self.policy: EvictionPolicy = (policy or LRU)(n_blocks)
        self.listeners: list[PoolListener] = []
        self._stack: Blocks = np.arange(n_blocks, dtype=np.int32)[::-1].copy()
        self._n_free = n_blocks

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
        self.references[ids] = 1
        self.state[ids] = ACTIVE

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
        asleep = ids[self.state[ids] == CACHED]
        if asleep.size:
            self.policy.revive(asleep)
            self.state[asleep] = ACTIVE
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
        ids = self._of("release", blocks, ACTIVE)[::-1]
        left = self.references[ids] - 1
        self.references[ids] = left
        gone = ids[left == 0]
        hashed = self.hashed[gone]
        if hashed.any():
            kept = gone[hashed]
            self.state[kept] = CACHED
            self.policy.insert(kept)
            gone = gone[~hashed]
        self._push(gone)

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
        held = parents[parents >= 0]
        if self.hashed[ids].any():
            raise CacheError(f"block {ids[self.hashed[ids].argmax()]} already carries a hash")
        self.hashed[ids] = True
        if not self.hashed[held].all():
            self.hashed[ids] = False
            raise CacheError(f"parent {held[~self.hashed[held]][0]} carries no hash")
        self.digest[ids] = digests
        self.parent[ids] = parents
        np.add.at(self.children, held, 1)
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
                raise CacheError(
                    f"{int(broken.sum())} of {self.n_blocks} blocks: {rule}; first: block {block}, "
                    f"{STATES[self.state[block]]}, {self.references[block]} holders"
                )

    def _take(self, n: int, state: int) -> Blocks:
        if n < 0:
            raise CountOutOfRange("blocks to take", "0 or more", n)
        if n > self._n_free:
            self.forget(self._victims(n - self._n_free, n))
        top = self._n_free - n
        ids = self._stack[top : self._n_free][::-1].copy()
        self._n_free = top
        self.references[ids] = state == ACTIVE
        self.state[ids] = state
        self.generation[ids] += 1
        return ids

    def _push(self, ids: Blocks) -> None:
        self.state[ids] = FREE
        self._stack[self._n_free : self._n_free + len(ids)] = ids
        self._n_free += len(ids)

    def _of(self, what: str, blocks: ArrayLike, *states: int) -> Blocks:
        """The blocks as an array, once they are known to be distinct and in one of the states."""
        ids = np.asarray(blocks, np.int32)
        if not ids.size:
            return ids
        order = np.sort(ids)
        if order[0] < 0 or order[-1] >= self.n_blocks:
            raise CacheError(f"{what}: block ids {order[0]}..{order[-1]} of {self.n_blocks} blocks")
        if (order[1:] == order[:-1]).any():
            twice = order[1:][order[1:] == order[:-1]][0]
            raise CacheError(f"{what}: block {twice} is named twice")
        found = self.state[ids]
        good = found == states[0]
        for state in states[1:]:
            good |= found == state
        if not good.all():
            bad = ids[good.argmin()]
            wanted = " or ".join(STATES[s] for s in states)
            raise CacheError(f"{what}: block {bad} is {STATES[self.state[bad]]}, must be {wanted}")
        return ids

    def _unhash(self, ids: Blocks) -> None:
        ids = ids[self.hashed[ids]]
        if not ids.size:
            return
        parents = self.parent[ids]
        parents = parents[parents >= 0]
        np.subtract.at(self.children, parents, 1)
        if self.children[ids].any():
            block = ids[self.children[ids].argmax()]
            np.add.at(self.children, parents, 1)
            raise CacheError(f"block {block} has hashed children: give those up first")
        for listener in self.listeners:
            listener.removed(ids)
        self.hashed[ids] = False
        self.parent[ids] = -1

    def _victims(self, n: int, wanted: int) -> Blocks:
        best = self.policy.first(n)
        if len(best) == n:
            parents = self.parent[best]
            parents = parents[parents >= 0]
            np.subtract.at(self.children, parents, 1)
            closed = not self.children[best].any()
            np.add.at(self.children, parents, 1)
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
