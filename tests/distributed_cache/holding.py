"""A rank of the cache for tests: every element says where it belongs, so wrong data is seen."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from mpipar.comm import Communicator
from mpipar.distributed_cache.engine import TransferEngine
from mpipar.distributed_cache.hashing import Chain, chain_of, root_digest
from mpipar.distributed_cache.holder import PoolHolder
from mpipar.distributed_cache.layout import CacheLayout
from mpipar.distributed_cache.pool import BlockPool
from mpipar.distributed_cache.prefix_index import PrefixIndex
from mpipar.distributed_cache.sequences import PagedSequences
from mpipar.distributed_cache.storage import CacheStorage
from mpipar.distributed_cache.transfer import Transfer
from mpipar.errors import RankFailed


def content(layout: CacheLayout, digest: np.ndarray) -> np.ndarray:
    """One block: [layer, k/v, head, token, dim], each element from (layer, head, hash, dim)."""
    layers, kinds, heads, tokens, dims = np.ix_(
        np.arange(*layout.layers), np.arange(2), np.arange(*layout.heads),
        np.arange(layout.block_size), np.arange(layout.head_dim),
    )  # fmt: skip
    where = (((layers * 2 + kinds) * 64 + heads) * 64 + tokens) * 64 + dims
    return where + float(int(digest[0]) % 2**22) * 2.0**30


class CacheRank:
    """Pool, index, sequences, storage and engine of one rank."""

    def __init__(
        self, comm: Communicator, layout: CacheLayout, n_blocks: int, **options: Any
    ) -> None:
        self.comm, self.layout, self.n_blocks = comm, layout, n_blocks
        self.storage = CacheStorage(layout, n_blocks)
        self.engine = TransferEngine(comm, self.storage, **options)
        self.begin()

    def begin(self) -> None:
        """Start with an empty pool, also again."""
        self.pool = BlockPool(self.n_blocks)
        self.index = PrefixIndex(self.pool)
        self.sequences = PagedSequences(self.pool, self.layout.block_size, index=self.index)
        self.storage.data[...] = -1.0
        self.engine.serve(PoolHolder(self.pool, self.index, self.engine.log))

    def chain(self, tokens: list[int]) -> Chain:
        return chain_of(tokens, self.layout.block_size, root_digest())

    def compute(self, tokens: list[int]) -> int:
        """Prefill: fill the blocks of a prompt that are not there; gives the tokens skipped."""
        sequence = self.sequences.start(tokens)
        n_hit = sequence.n_hit_tokens
        self.fill(sequence)
        self.sequences.finish(sequence)
        return n_hit

    def fill(self, sequence: Any) -> None:
        """Write the full blocks of a sequence that are not committed, and commit them."""
        first = sequence.n_committed // self.layout.block_size
        for block, digest in zip(
            sequence.table[first:], sequence.chain.digests[first:], strict=False
        ):
            self.storage.data[block] = content(self.layout, digest)
        self.sequences.commit(sequence)

    def verified(self, chain: Chain) -> int:
        """How many leading blocks are here; their data is compared element by element."""
        found = self.index.match(chain)
        for block, digest in zip(found, chain.digests, strict=False):
            np.testing.assert_array_equal(self.storage.data[block], content(self.layout, digest))
        return len(found)

    def verify_all(self) -> None:
        """Every block that can be hit holds what its hash says."""
        for block in np.flatnonzero(self.pool.hashed):
            np.testing.assert_array_equal(
                self.storage.data[block], content(self.layout, self.pool.digest[block])
            )
        self.index.check()

    def until(self, done: Callable[[], bool], limit_s: float = 30.0) -> None:
        """Make progress until something holds."""
        stop = time.monotonic() + limit_s
        while not done():
            self.engine.progress()
            if getattr(getattr(self.comm, "_state", None), "failed", None):
                raise RankFailed("a peer on a thread has failed")
            assert time.monotonic() < stop, "no progress"

    def meet(self) -> None:
        """A barrier during which peers are answered."""
        request = self.comm.begin_all_reduce(np.array(1))
        self.until(request.test)
        request.wait()

    def leave(self) -> None:
        """The end: no pin is left, all data is right, no block is lost."""
        self.meet()
        self.until(lambda: self.engine.n_pinned == 0)
        self.verify_all()
        self.engine.close()
        self.sequences.check()

    def bring(self, group: list[int], tokens: list[int]) -> Transfer:
        """Fetch and wait for the end."""
        transfer = self.engine.fetch(group, self.chain(tokens))
        self.until(lambda: transfer.is_over)
        return transfer
