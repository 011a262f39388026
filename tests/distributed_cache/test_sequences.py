"""Sequences over a pool: seeded programs against stored contents and a slow dictionary."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpipar.distributed_cache.eviction import LRU, EvictionPolicy
from mpipar.distributed_cache.pool import BlockPool
from mpipar.distributed_cache.prefix_index import PrefixIndex
from mpipar.distributed_cache.radix import RadixIndex
from mpipar.distributed_cache.retention import Retention
from mpipar.distributed_cache.sequences import PagedSequences, Sequence
from mpipar.errors import CacheError, CountOutOfRange, EmptyInput

KINDS = ("digests", "digests and tokens", "tree")


def paged(
    n_blocks: int,
    block_size: int,
    kind: str = "digests",
    policy: Callable[[int], EvictionPolicy] | None = None,
) -> PagedSequences:
    """Sequences over a new pool with one of the indices."""
    pool = BlockPool(n_blocks, policy=policy)
    index = RadixIndex(pool) if kind == "tree" else PrefixIndex(pool, verify="and" in kind)
    return PagedSequences(pool, block_size, index=index)


class Program:
    """Random calls; a storage in which each slot holds an id of its token and all before it.

    So a slot that was overwritten, shared too early or copied wrongly is always seen, and the
    blocks that a prompt must hit are known without digests: full hashed blocks by last id.
    """

    def __init__(
        self,
        seed: int,
        n_blocks: int,
        block_size: int,
        kind: str,
        policy: Callable[[int], EvictionPolicy] | None = None,
    ) -> None:
        self.random = random.Random(seed)
        self.paged = paged(n_blocks, block_size, kind, policy)
        self.size = block_size
        self.store = np.zeros((n_blocks, block_size), np.int64)
        self.ids: dict[Sequence, list[int]] = {}
        self.salts: dict[Sequence, str] = {}
        self.n_refused = self.n_hits = self.n_copies = 0

    def step(self) -> None:
        """One call, chosen at random."""
        running = [s for s in self.ids if s.running]
        waiting = [s for s in self.ids if not s.running]
        name = self.random.choice(
            ["start", "append", "append", "append", "fork", "truncate", "preempt", "finish"]
        )
        try:
            if waiting and self.random.random() < 0.2:
                self.resume(self.random.choice(waiting))
            elif name == "start" or not running:
                self.start()
            else:
                getattr(self, name)(self.random.choice(running))
        except CacheError:
            self.n_refused += 1
            if self.ids:
                self.finish(self.random.choice(list(self.ids)))

    def start(self) -> None:
        """A prompt that is often the beginning of one that is known."""
        salt = self.random.choice(["", "", "", "tenant"])
        tokens = self.random.choices(range(2), k=self.random.randint(1, 6 * self.size))
        expected = self.expected_hits(self.follow([], salt, tokens))
        sequence = self.paged.start(tokens, salt=salt)
        self.ids[sequence], self.salts[sequence] = self.follow([], salt, tokens), salt
        assert sequence.n_hit_tokens == expected * self.size
        self.n_hits += expected
        self.write(sequence, sequence.n_hit_tokens)

    def append(self, sequence: Sequence) -> None:
        """A few tokens more."""
        tokens = self.random.choices(range(2), k=self.random.randint(1, 3))
        before = sequence.n_tokens
        self.copy(self.paged.append(sequence, tokens))
        self.ids[sequence] = self.follow(self.ids[sequence], self.salts[sequence], tokens)
        self.write(sequence, before)

    def fork(self, sequence: Sequence) -> None:
        """A second sequence, which often goes on differently at once."""
        child, copies = self.paged.fork(sequence)
        self.copy(copies)
        self.ids[child], self.salts[child] = list(self.ids[sequence]), self.salts[sequence]

    def truncate(self, sequence: Sequence) -> None:
        """Back to a random length."""
        n = self.random.randint(1, sequence.n_tokens)
        self.paged.truncate(sequence, n)
        del self.ids[sequence][n:]

    def preempt(self, sequence: Sequence) -> None:
        """Blocks given up, tokens kept."""
        self.paged.preempt(sequence)
        assert len(sequence.table) == 0

    def resume(self, sequence: Sequence) -> None:
        """On again, computing what is not cached any more."""
        expected = self.expected_hits(self.ids[sequence])
        self.paged.resume(sequence)
        assert sequence.n_hit_tokens == expected * self.size
        self.write(sequence, sequence.n_hit_tokens)

    def finish(self, sequence: Sequence) -> None:
        """The end."""
        self.paged.finish(sequence)
        del self.ids[sequence], self.salts[sequence]

    # -- the model --

    def follow(self, ids: list[int], salt: str, tokens: list[int]) -> list[int]:
        """Ids of all tokens after some more."""
        ids = list(ids)
        for token in tokens:
            ids.append(hash((ids[-1] if ids else len(salt), token)) >> 1)
        return ids

    def expected_hits(self, ids: list[int]) -> int:
        """Leading blocks, the last token's left out, whose end is that of a hashed block."""
        pool = self.paged.pool
        known = set(self.store[pool.hashed, -1].tolist())
        n = 0
        while (n + 1) * self.size < len(ids) and ids[(n + 1) * self.size - 1] in known:
            n += 1
        return n

    def copy(self, copies: list[tuple[int, int]]) -> None:
        """What the storage is told to copy."""
        for source, target in copies:
            assert self.paged.pool.references[target] == 1
            self.store[target] = self.store[source]
        self.n_copies += len(copies)

    def write(self, sequence: Sequence, start: int) -> None:
        """Store new tokens, only into blocks that nobody else reads; then commit, mostly."""
        pool, ids = self.paged.pool, self.ids[sequence]
        for at in range(start, len(ids)):
            block = sequence.table[at // self.size]
            assert pool.references[block] == 1
            assert not pool.hashed[block]
            self.store[block, at % self.size] = ids[at]
        if self.random.random() < 0.8:
            self.paged.commit(sequence)

    def verify(self) -> None:
        """Every sequence reads its own data, and every invariant holds."""
        self.paged.check()
        self.paged.index.check()  # type: ignore[attr-defined]
        for sequence, ids in self.ids.items():
            if sequence.running:
                assert self.store[sequence.table].reshape(-1)[: len(ids)].tolist() == ids
        assert sorted(map(id, self.ids)) == sorted(map(id, self.paged.live))

    def end(self) -> None:
        """Nothing is leaked once all sequences are at their end."""
        self.verify()
        for sequence in list(self.ids):
            self.finish(sequence)
        pool = self.paged.pool
        self.paged.check()
        assert pool.n_free + pool.n_cached == pool.n_blocks
        assert not pool.references.any()


def run(program: Program, n_steps: int, every: int) -> Program:
    """A whole program."""
    for at in range(n_steps):
        program.step()
        if at % every == 0:
            program.verify()
    program.end()
    return program


@settings(max_examples=40)
@given(
    st.integers(0, 2**32),
    st.integers(6, 60),
    st.integers(1, 5),
    st.sampled_from(KINDS),
    st.sampled_from([LRU, Retention]),
)
def test_programs_read_their_own_data_and_leak_nothing(
    seed: int, n_blocks: int, block_size: int, kind: str, policy: Callable[[int], EvictionPolicy]
) -> None:
    run(Program(seed, n_blocks, block_size, kind, policy), 120, every=1)


@pytest.mark.parametrize("kind", KINDS)
def test_long_programs(kind: str) -> None:
    program = run(Program(8, 64, 4, kind), 4_000, every=50)
    assert min(program.n_refused, program.n_hits, program.n_copies) > 100


@pytest.mark.slow
@pytest.mark.deadline(500)
def test_a_million_operations_leak_no_block() -> None:
    program = run(Program(1, 128, 4, KINDS[0]), 1_000_000, every=2_000)
    assert min(program.n_refused, program.n_hits, program.n_copies) > 10_000


@settings(max_examples=15)
@given(st.integers(0, 2**32), st.integers(6, 60), st.integers(1, 4))
def test_tree_and_digests_agree(seed: int, n_blocks: int, block_size: int) -> None:
    first, second = (Program(seed, n_blocks, block_size, kind) for kind in (KINDS[0], KINDS[2]))
    for _ in range(150):
        first.step()
        second.step()
        tables = [[s.table.tolist() for s in p.ids] for p in (first, second)]
        assert tables[0] == tables[1]
        np.testing.assert_array_equal(first.paged.pool.digest, second.paged.pool.digest)


def test_a_planted_leak_is_found() -> None:
    program = Program(3, 64, 4, KINDS[0])
    for _ in range(50):
        program.step()
    program.verify()
    victim = next(s for s in program.ids if s.running)
    lost = int(victim.table[-1])
    victim.table = victim.table[:-1]  # what a forgotten release looks like
    with pytest.raises(CacheError, match=rf"more or fewer holders.*block {lost},"):
        program.paged.check()


def test_a_block_lost_by_a_release_too_many_is_found() -> None:
    rows = paged(8, 4)
    sequence = rows.start([1, 2, 3])
    rows.pool.release(sequence.table)
    with pytest.raises(CacheError, match="more or fewer holders"):
        rows.check()


def test_full_blocks_are_shared_after_the_commit_only_and_never_the_last_token() -> None:
    rows = paged(16, 4)
    first = rows.start(range(8))
    assert rows.start(range(8)).n_hit_tokens == 0
    rows.commit(first, 7)
    assert rows.start(range(8)).n_hit_tokens == 4
    rows.commit(first)
    assert rows.start(range(8)).n_hit_tokens == 4
    longer = rows.start(range(9))
    assert longer.n_hit_tokens == 8
    assert longer.table[:2].tolist() == first.table.tolist()
    assert rows.pool.references[first.table].tolist() == [4, 2]


def test_equal_blocks_become_one_at_the_second_commit() -> None:
    rows = paged(16, 2)
    first, second = rows.start(range(5)), rows.start(range(5))
    assert not set(first.table) & set(second.table)
    rows.commit(first)
    rows.commit(second)
    assert second.table[:2].tolist() == first.table[:2].tolist()
    assert second.table[2] != first.table[2]
    assert rows.pool.n_free == 16 - 4


def test_adapters_salts_and_models_keep_apart() -> None:
    rows = paged(32, 2)
    rows.commit(rows.start(range(5), adapter="a", salt="s"))
    assert rows.start(range(5), adapter="a", salt="s").n_hit_tokens == 4
    assert rows.start(range(5), adapter="a").n_hit_tokens == 0
    assert rows.start(range(5), salt="s").n_hit_tokens == 0
    assert rows.start(range(5), adapter="as").n_hit_tokens == 0
    other = PagedSequences(rows.pool, 2, index=rows.index, model="another")
    assert other.start(range(5), adapter="a", salt="s").n_hit_tokens == 0


def test_a_partial_tail_is_copied_before_anyone_writes() -> None:
    rows = paged(16, 4)
    parent = rows.start(range(6))
    child, copies = rows.fork(parent)
    assert child.table[0] == parent.table[0]
    assert copies == [(parent.table[1], child.table[1])]
    assert rows.append(parent, [9]) == []
    assert rows.append(child, [8]) == []
    assert (parent.tokens[-1], child.tokens[-1]) == (9, 8)


def test_a_published_block_is_copied_after_a_truncation_into_it() -> None:
    rows = paged(16, 4)
    sequence = rows.start(range(8))
    rows.commit(sequence)
    rows.truncate(sequence, 6)
    old = int(sequence.table[1])
    assert rows.append(sequence, [7]) == [(old, int(sequence.table[1]))]
    assert sequence.table[1] != old
    assert rows.start(range(9)).n_hit_tokens == 8  # the old one can still be hit


def test_a_pool_that_is_too_small_refuses_and_changes_nothing() -> None:
    rows = paged(4, 2)
    first = rows.start(range(5))
    state, references = rows.pool.state.copy(), rows.pool.references.copy()
    for wrong in (lambda: rows.start(range(4)), lambda: rows.append(first, range(9))):
        with pytest.raises(CacheError, match="at most 1"):
            wrong()
        np.testing.assert_array_equal(rows.pool.state, state)
        np.testing.assert_array_equal(rows.pool.references, references)
        assert first.n_tokens == 5
    rows.check()


def test_calls_out_of_order_are_refused() -> None:
    rows = paged(8, 2)
    with pytest.raises(EmptyInput):
        rows.start([])
    sequence = rows.start(range(3))
    with pytest.raises(CacheError, match="resume"):
        rows.resume(sequence)
    with pytest.raises(CountOutOfRange, match=r"1\.\.3"):
        rows.truncate(sequence, 0)
    rows.preempt(sequence)
    with pytest.raises(CacheError, match="append"):
        rows.append(sequence, [1])
    rows.resume(sequence)
    rows.finish(sequence)
    with pytest.raises(CacheError, match="ended"):
        rows.finish(sequence)
    with pytest.raises(CountOutOfRange):
        PagedSequences(rows.pool, 0)
