"""Running requests: their block tables, and who may write where."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mpipar.distributed_cache.eviction import Blocks
from mpipar.distributed_cache.hashing import Chain, chain_of, root_digest
from mpipar.distributed_cache.pool import BlockPool
from mpipar.distributed_cache.prefix_index import Index, PrefixIndex
from mpipar.errors import CacheError, CountOutOfRange, EmptyInput

Copies = list[tuple[int, int]]


@dataclass(eq=False)
class Sequence:
    """One request and where its keys and values lie.

    Attributes
    ----------
    tokens : array of int32
        All tokens so far.
    table : array of int32
        Block of each run of `block_size` tokens; empty while preempted.
    n_hit_tokens : int
        Leading tokens whose keys and values were there at the start (or resume).
    n_committed : int
        Leading tokens whose data is known to be complete.
    running : bool
        False while preempted and after the end.
    """

    tokens: NDArray[np.int32]
    chain: Chain
    table: Blocks = field(default_factory=lambda: np.empty(0, np.int32))
    n_hit_tokens: int = 0
    n_committed: int = 0
    running: bool = True

    @property
    def n_tokens(self) -> int:
        """Number of tokens so far."""
        return len(self.tokens)


class PagedSequences:
    """Block tables of all running requests of one rank over one pool.

    The order of a step is: `start` or `append` (blocks are there), compute and write the keys and
    values, `commit` (full blocks can be hit by others). A block that another sequence holds, or
    that others could hit, is never written: `append` and `fork` give the copies that the storage
    must make first.

    Parameters
    ----------
    pool : BlockPool
        The blocks.
    block_size : int
        Tokens in a block.
    index : Index, optional
        Finds prefixes; a `PrefixIndex` over the pool if left out.
    model : str
        Name and version of the weights, part of every hash.
    """

    def __init__(
        self, pool: BlockPool, block_size: int, *, index: Index | None = None, model: str = ""
    ) -> None:
        if block_size < 1:
            raise CountOutOfRange("tokens in a block", "1 or more", block_size)
        self.pool = pool
        self.block_size = block_size
        self.index: Index = index if index is not None else PrefixIndex(pool)
        self.model = model
        self.live: set[Sequence] = set()

    def start(self, tokens: ArrayLike, *, adapter: str = "", salt: str = "") -> Sequence:
        """Begin a request: take what is cached of its prompt and blocks for the rest.

        Parameters
        ----------
        tokens : array of int
            The prompt, at least one token; the last one is always computed anew, so that there
            is something to predict from.
        adapter, salt : str
            Part of the hash: only equal ones share blocks.

        Returns
        -------
        Sequence
            With `n_hit_tokens` tokens that need no computation.

        Raises
        ------
        CacheError
            If the pool has too few blocks; nothing was changed.
        """
        chain = chain_of(tokens, self.block_size, root_digest(self.model, adapter, salt))
        sequence = Sequence(np.array(tokens, np.int32), chain)
        if not sequence.n_tokens:
            raise EmptyInput("start of a sequence", "a prompt needs at least one token")
        self._place(sequence)
        self.live.add(sequence)
        return sequence

    def append(self, sequence: Sequence, tokens: ArrayLike) -> Copies:
        """Make room for more tokens.

        Parameters
        ----------
        sequence : Sequence
            A running one.
        tokens : array of int
            What comes next.

        Returns
        -------
        list of (int, int)
            (source, target) blocks that the storage must copy before the new tokens are written.

        Raises
        ------
        CacheError
            If the pool has too few blocks; nothing was changed.
        """
        self._running("append to", sequence)
        more = np.concatenate([sequence.tokens, np.asarray(tokens, np.int32).reshape(-1)])
        chain = chain_of(more, self.block_size, sequence.chain.root, sequence.chain)
        grows = len(more) > sequence.n_tokens
        tail = self._tail(sequence)
        frozen = grows and tail >= 0 and self._frozen(tail)
        n_new = -(-len(more) // self.block_size) - len(sequence.table) + frozen
        new = self.pool.allocate(n_new)
        copies: Copies = []
        if frozen:
            copies, new = [(tail, int(new[0]))], new[1:]
            sequence.table[-1] = copies[0][1]
            self.pool.release([tail])
        sequence.table = np.concatenate([sequence.table, new])
        sequence.tokens, sequence.chain = more, chain
        return copies

    def commit(self, sequence: Sequence, n_tokens: int | None = None) -> None:
        """Declare keys and values complete: full blocks can be hit from now on.

        Where another sequence committed the same block first, the table goes over to that one.

        Parameters
        ----------
        sequence : Sequence
            A running one.
        n_tokens : int, optional
            How many leading tokens are complete; all if left out.
        """
        self._running("commit", sequence)
        n = sequence.n_tokens if n_tokens is None else n_tokens
        if not 0 <= n <= sequence.n_tokens:
            raise CountOutOfRange("committed tokens", f"0..{sequence.n_tokens}", n)
        before, full = sequence.n_committed // self.block_size, n // self.block_size
        sequence.n_committed = max(sequence.n_committed, n)
        if full <= before:
            return
        mine = sequence.table[:full]
        stands = self.index.insert(sequence.chain[:full], mine)
        other = stands != mine
        if other.any():
            self.pool.share(stands[other])
            self.pool.release(mine[other])
            sequence.table[:full] = stands

    def fork(self, sequence: Sequence) -> tuple[Sequence, Copies]:
        """Continue a sequence in a second way: full blocks are shared, the tail is copied.

        Parameters
        ----------
        sequence : Sequence
            A running one; its data must be written before the copies are made.

        Returns
        -------
        child : Sequence
            Has the same tokens.
        copies : list of (int, int)
            (source, target) blocks that the storage must copy: at most the partial tail.

        Raises
        ------
        CacheError
            If the pool has no block for the tail; nothing was changed.
        """
        self._running("fork", sequence)
        tail = self._tail(sequence)
        new = self.pool.allocate(int(tail >= 0))
        shared = sequence.table[: len(sequence.table) - len(new)]
        self.pool.share(shared)
        child = Sequence(
            sequence.tokens,
            sequence.chain,
            np.concatenate([shared, new]),
            sequence.n_hit_tokens,
            sequence.n_committed,
        )
        self.live.add(child)
        return child, [(tail, int(block)) for block in new]

    def truncate(self, sequence: Sequence, n_tokens: int) -> None:
        """Take back the last tokens.

        Parameters
        ----------
        sequence : Sequence
            A running one.
        n_tokens : int
            How many stay, at least 1. A tail that others may read is copied by the next `append`.
        """
        self._running("truncate", sequence)
        if not 1 <= n_tokens <= sequence.n_tokens:
            raise CountOutOfRange("tokens to keep", f"1..{sequence.n_tokens}", n_tokens)
        keep = -(-n_tokens // self.block_size)
        self.pool.release(sequence.table[keep:])
        sequence.table = sequence.table[:keep].copy()
        sequence.tokens = sequence.tokens[:n_tokens]
        sequence.chain = sequence.chain[: n_tokens // self.block_size]
        sequence.n_committed = min(sequence.n_committed, n_tokens)
        sequence.n_hit_tokens = min(sequence.n_hit_tokens, n_tokens)

    def preempt(self, sequence: Sequence) -> None:
        """Give up a sequence's blocks for a while; committed ones can still be hit.

        Parameters
        ----------
        sequence : Sequence
            A running one; its tokens are kept for `resume`.
        """
        self._running("preempt", sequence)
        self.pool.release(sequence.table)
        sequence.table = np.empty(0, np.int32)
        sequence.n_committed = sequence.n_hit_tokens = 0
        sequence.running = False

    def resume(self, sequence: Sequence) -> None:
        """Take blocks again for a preempted sequence, with whatever is still cached.

        Parameters
        ----------
        sequence : Sequence
            A preempted one.

        Raises
        ------
        CacheError
            If it is not preempted or the pool has too few blocks; nothing was changed.
        """
        if sequence.running or sequence not in self.live:
            raise CacheError("cannot resume a sequence that is not preempted")
        self._place(sequence)
        sequence.running = True

    def finish(self, sequence: Sequence) -> None:
        """End a request, running or preempted; committed blocks stay cached.

        Parameters
        ----------
        sequence : Sequence
            A live one.

        Raises
        ------
        CacheError
            If it has ended before.
        """
        if sequence not in self.live:
            raise CacheError("cannot finish a sequence that has ended")
        if sequence.running:
            self.preempt(sequence)
        self.live.remove(sequence)

    def check(self) -> None:
        """Walk every invariant of the pool; a block that no table holds is a leak.

        Raises
        ------
        CacheError
            With the rule that is broken.
        """
        self.pool.check([sequence.table for sequence in self.live])

    def _place(self, sequence: Sequence) -> None:
        hits = self.index.match(sequence.chain[: (sequence.n_tokens - 1) // self.block_size])
        self.pool.share(hits)
        try:
            new = self.pool.allocate(-(-sequence.n_tokens // self.block_size) - len(hits))
        except CacheError:
            self.pool.release(hits)
            raise
        sequence.table = np.concatenate([hits, new])
        sequence.n_hit_tokens = sequence.n_committed = len(hits) * self.block_size

    def _tail(self, sequence: Sequence) -> int:
        """The block of the last tokens if it is not full, or -1."""
        return int(sequence.table[-1]) if sequence.n_tokens % self.block_size else -1

    def _frozen(self, block: int) -> bool:
        return bool(self.pool.references[block] > 1 or self.pool.hashed[block])

    def _running(self, what: str, sequence: Sequence) -> None:
        if not sequence.running or sequence not in self.live:
            raise CacheError(f"cannot {what} a sequence that is preempted or has ended")
