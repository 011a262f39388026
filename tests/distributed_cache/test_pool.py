"""The block pool against a slow dictionary model, and every rule of `check` against a planted
fault.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpipar.distributed_cache.invariants import ACTIVE, CACHED, DRAINING, FREE, RESERVED
from mpipar.distributed_cache.pool import BlockName, BlockPool
from mpipar.errors import CacheError, CountOutOfRange


class Model:
    """Blocks in dictionaries, one by one: the rules in words."""

    def __init__(self, n_blocks: int) -> None:
        self.state = dict.fromkeys(range(n_blocks), FREE)
        self.holders = dict.fromkeys(range(n_blocks), 0)
        self.parent: dict[int, int] = {}  # of hashed blocks
        self.cached: OrderedDict[int, None] = OrderedDict()  # the oldest first

    def has_children(self, block: int) -> bool:
        return block in self.parent.values()

    def victims(self, n: int) -> list[int]:
        """The oldest cached blocks, each time the first without hashed blocks after it."""
        gone: list[int] = []
        while len(gone) < n:
            kept = {p for b, p in self.parent.items() if b not in gone}
            gone.append(next(b for b in self.cached if b not in gone and b not in kept))
        return gone

    def take(self, blocks: list[int], state: int) -> None:
        for block in blocks:
            assert self.state[block] == FREE
            self.state[block], self.holders[block] = state, int(state == ACTIVE)

    def free(self, block: int) -> None:
        self.state[block], self.holders[block] = FREE, 0
        self.parent.pop(block, None)
        self.cached.pop(block, None)

    def release(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self.holders[block] -= 1
            if not self.holders[block]:
                if block in self.parent:
                    self.state[block] = CACHED
                    self.cached[block] = None
                else:
                    self.free(block)

    def share(self, blocks: list[int]) -> None:
        for block in blocks:
            self.holders[block] += 1
            self.state[block] = ACTIVE
            self.cached.pop(block, None)


class Program:
    """Random calls to a pool and to the model beside it."""

    def __init__(self, seed: int, n_blocks: int) -> None:
        self.random = random.Random(seed)
        self.pool, self.model = BlockPool(n_blocks), Model(n_blocks)
        self.tables: list[list[int]] = []
        self.moving: list[list[int]] = []
        self.n_evicted = 0

    def step(self) -> None:
        """One call."""
        names = ["take", "take", "release", "release", "share", "label", "label", "reserve"]
        getattr(self, self.random.choice([*names, "arrive", "drain", "end_drain", "forget"]))()

    def take(self, state: int = ACTIVE) -> list[int] | None:
        n = self.random.randint(0, 6)
        pool, model = self.pool, self.model
        lacks = max(0, n - sum(s == FREE for s in model.state.values()))
        call = pool.allocate if state == ACTIVE else pool.reserve
        try:
            gone = model.victims(lacks)
        except StopIteration:
            with pytest.raises(CacheError, match="ask for at most"):
                call(n)
            return None
        for block in gone:
            model.free(block)
        self.n_evicted += len(gone)
        before = pool.generation.copy()
        blocks = call(n)
        assert blocks.dtype == np.int32
        model.take(blocks.tolist(), state)
        np.testing.assert_array_equal(np.flatnonzero(pool.generation != before), np.sort(blocks))
        (self.tables if state == ACTIVE else self.moving).append(blocks.tolist())
        return blocks.tolist()

    def reserve(self) -> None:
        self.take(RESERVED)

    def arrive(self) -> None:
        """Data of reserved blocks is complete."""
        if self.moving:
            blocks = self.moving.pop(self.random.randrange(len(self.moving)))
            self.pool.commit(blocks)
            for block in blocks:
                self.model.state[block], self.model.holders[block] = ACTIVE, 1
            self.tables.append(blocks)

    def drain(self) -> None:
        """A transfer is given up."""
        if self.moving:
            blocks = self.random.choice(self.moving)
            if all(self.model.state[b] == RESERVED for b in blocks):
                self.pool.drain(blocks)
                self.model.state.update(dict.fromkeys(blocks, DRAINING))
                self.moving.remove(blocks)
                with pytest.raises(CacheError, match="draining") if blocks else no_error():
                    self.pool.share(blocks)

    def end_drain(self) -> None:
        """All that drains is at its end."""
        blocks = [b for b, s in self.model.state.items() if s == DRAINING]
        self.pool.forget(blocks)
        for block in blocks:
            self.model.free(block)

    def forget(self) -> None:
        """A cached block goes, which only one without hashed blocks after it may."""
        if self.model.cached:
            block = self.random.choice(list(self.model.cached))
            if self.model.has_children(block):
                with pytest.raises(CacheError, match="children"):
                    self.pool.forget([block])
            else:
                self.pool.forget([block])
                self.model.free(block)

    def release(self) -> None:
        if self.tables:
            blocks = self.tables.pop(self.random.randrange(len(self.tables)))
            self.pool.release(blocks)
            self.model.release(blocks)

    def share(self) -> None:
        """A new holder of some active or cached blocks."""
        known = [b for b, s in self.model.state.items() if s in (ACTIVE, CACHED)]
        blocks = self.random.sample(known, min(len(known), self.random.randint(0, 4)))
        self.pool.share(blocks)
        self.model.share(blocks)
        self.tables.append(blocks)

    def label(self) -> None:
        """Blocks of a table without a hash become a chain, after any hashed block."""
        if self.tables:
            table = self.random.choice(self.tables)
            bare = [b for b in table if b not in self.model.parent]
            above = self.random.choice([-1, *self.model.parent])
            parents = [above, *bare[:-1]][: len(bare)]
            digests = np.array([[b, self.random.getrandbits(60)] for b in bare], np.uint64)
            self.pool.label(
                np.array(bare, np.int32), digests.reshape(-1, 2), np.array(parents, np.int32)
            )
            self.model.parent.update(zip(bare, parents, strict=True))

    def verify(self) -> None:
        """The arrays say what the dictionaries say."""
        pool, model = self.pool, self.model
        pool.check(self.tables)
        assert pool.state.tolist() == list(model.state.values())
        assert pool.references.tolist() == list(model.holders.values())
        assert np.flatnonzero(pool.hashed).tolist() == sorted(model.parent)
        assert pool.parent.tolist() == [model.parent.get(b, -1) for b in model.state]
        assert pool.n_cached == len(model.cached)
        assert pool.n_free == sum(s == FREE for s in model.state.values())
        assert pool.policy.first(pool.n_blocks).tolist() == list(model.cached)


class no_error:
    """A context in which nothing is expected."""

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


@settings(max_examples=40)
@given(st.integers(0, 2**32), st.integers(1, 24))
def test_programs_equal_the_slow_model(seed: int, n_blocks: int) -> None:
    program = Program(seed, n_blocks)
    for _ in range(60):
        program.step()
        program.verify()


def test_a_long_program_equals_the_slow_model() -> None:
    program = Program(4, 40)
    for at in range(3_000):
        program.step()
        if at % 20 == 0:
            program.verify()
    assert program.n_evicted > 150


def chain(pool: BlockPool, n: int) -> list[int]:
    """Active hashed blocks, each after the one before."""
    blocks = pool.allocate(n)
    parents = np.concatenate(([-1], blocks[:-1])).astype(np.int32)
    pool.label(blocks, np.stack([blocks + 1, blocks + 1], axis=1).astype(np.uint64), parents)
    return list(blocks.tolist())


def prepared() -> tuple[BlockPool, list[list[int]]]:
    """A pool with blocks in every state, and its tables."""
    pool = BlockPool(16)
    held, cached = chain(pool, 3), chain(pool, 3)
    pool.release(cached)
    pool.reserve(2)
    gone = pool.reserve(1)
    pool.drain(gone)
    plain = pool.allocate(2).tolist()
    pool.check([held, plain])
    assert set(pool.state.tolist()) == {FREE, CACHED, ACTIVE, RESERVED, DRAINING}
    return pool, [held, plain]


def first_of(pool: BlockPool, state: int) -> int:
    """A block in a state."""
    return int(np.flatnonzero(pool.state == state)[0])


FAULTS: dict[str, Callable[[BlockPool], object]] = {
    "no known state": lambda p: p.state.__setitem__(first_of(p, RESERVED), 9),
    "holders but not active": lambda p: p.references.__setitem__(first_of(p, CACHED), 1),
    "fewer than no holders": lambda p: p.references.__setitem__(first_of(p, DRAINING), -1),
    "free stack": lambda p: p.state.__setitem__(first_of(p, RESERVED), FREE),
    "a hash in a state": lambda p: p.hashed.__setitem__(first_of(p, RESERVED), True),
    "cached without": lambda p: p.hashed.__setitem__(first_of(p, CACHED), False),
    "number of children": lambda p: p.children.__setitem__(first_of(p, ACTIVE), 5),
    "a parent without": lambda p: p.parent.__setitem__(first_of(p, DRAINING), 0),
    "lost its hash": lambda p: p.hashed.__setitem__(first_of(p, ACTIVE), False),
    "unknown to the policy": lambda p: p.policy.drop(np.array([first_of(p, CACHED)], np.int32)),
    "tables that name it": lambda p: p.share([first_of(p, ACTIVE)]),
}


@pytest.mark.parametrize("rule", FAULTS)
def test_check_finds_each_planted_fault(rule: str) -> None:
    pool, tables = prepared()
    FAULTS[rule](pool)
    with pytest.raises(CacheError, match=rule):
        pool.check(tables)


def test_wrong_calls_are_refused_and_change_nothing() -> None:
    pool, tables = prepared()
    free, held = first_of(pool, FREE), tables[0]
    before = [array.copy() for array in (pool.state, pool.references, pool.hashed, pool.generation)]
    wrong: list[tuple[str, Callable[[], object]]] = [
        (r"release.*free", lambda: pool.release([held[0], free])),
        ("named twice", lambda: pool.release([held[0], held[1], held[0]])),
        ("block 16 of a pool of 16", lambda: pool.release([held[0], 16])),
        ("block -1 of a pool of 16", lambda: pool.share([-1])),
        (r"share.*reserved", lambda: pool.share([first_of(pool, RESERVED)])),
        (r"share.*free", lambda: pool.share([held[0], free])),
        (r"commit.*active", lambda: pool.commit(held)),
        ("children", lambda: pool.drain(held[:1])),
        (r"forget.*active", lambda: pool.forget(held)),
        ("at most", lambda: pool.allocate(17)),
        ("already carries", lambda: pool.label(*numbers(held[:1], [-1]))),
        ("carries no hash", lambda: pool.label(*numbers(tables[1][:1], [tables[1][1]]))),
    ]
    for message, call in wrong:
        with pytest.raises(CacheError, match=message):
            call()
        now = (pool.state, pool.references, pool.hashed, pool.generation)
        for old, new in zip(before, now, strict=True):
            np.testing.assert_array_equal(old, new)
        pool.check(tables)
    with pytest.raises(CountOutOfRange):
        pool.allocate(-1)
    with pytest.raises(CountOutOfRange):
        BlockPool(0)


def numbers(blocks: list[int], parents: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Arguments of `label`."""
    digests = np.ones((len(blocks), 2), np.uint64)
    return np.array(blocks, np.int32), digests, np.array(parents, np.int32)


def test_a_name_lives_until_the_block_is_reused() -> None:
    pool = BlockPool(2)
    blocks = chain(pool, 2)
    name = pool.name(3, blocks[0])
    assert (name.rank, name.block) == (3, blocks[0])
    pool.release(blocks)
    assert pool.is_current(name)
    pool.share(blocks)
    assert pool.is_current(name)
    pool.release(blocks)
    pool.allocate(2)
    assert not pool.is_current(name)
    assert not pool.is_current(BlockName(3, 99, 0))


def test_listeners_hear_of_a_hash_before_it_is_gone() -> None:
    pool = BlockPool(3)
    heard: list[tuple[str, list[int]]] = []

    class Ear:
        def stored(self, blocks: np.ndarray) -> None:
            heard.append(("stored", pool.digest[blocks, 0].tolist()))

        def removed(self, blocks: np.ndarray) -> None:
            heard.append(("removed", pool.digest[blocks, 0].tolist()))

    pool.listeners.append(Ear())
    blocks = chain(pool, 3)
    pool.release(blocks)
    pool.allocate(2)
    tags = [block + 1 for block in blocks]
    assert heard == [("stored", tags), ("removed", [tags[2], tags[1]])]
