"""Both indices against a dictionary of whole prefixes."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpipar.distributed_cache.hashing import Chain, chain_of, root_digest
from mpipar.distributed_cache.pool import BlockPool
from mpipar.distributed_cache.prefix_index import PrefixIndex
from mpipar.distributed_cache.radix import RadixIndex
from mpipar.errors import CacheError

Key = tuple[bytes, tuple[int, ...]]


class Served:
    """A pool with an index, and a dictionary from whole prefixes to blocks beside it."""

    def __init__(self, n_blocks: int, kind: type[PrefixIndex] | type[RadixIndex]) -> None:
        self.pool = BlockPool(n_blocks)
        self.index = kind(self.pool)
        self.known: dict[Key, int] = {}

    def expected(self, root: bytes, tokens: list[int]) -> list[int]:
        """Blocks of two tokens, as far as the dictionary knows them and the pool kept them."""
        found = []
        for end in range(2, len(tokens) + 1, 2):
            block = self.known.get((root, tuple(tokens[:end])), -1)
            if block < 0 or not self.pool.hashed[block]:
                break
            found.append(block)
        return found

    def serve(self, root: bytes, tokens: list[int]) -> None:
        """One request from look-up to release."""
        chain = chain_of(tokens, 2, root)
        hits = self.index.match(chain)
        assert hits.tolist() == self.expected(root, tokens)
        self.pool.share(hits)
        table = np.concatenate([hits, self.pool.allocate(len(chain) - len(hits))])
        reused = set(table[len(hits) :].tolist())
        self.known = {key: b for key, b in self.known.items() if b not in reused}
        stands = self.index.insert(chain, table)
        np.testing.assert_array_equal(stands, table)
        for n, block in enumerate(stands.tolist(), 1):
            self.known[root, tuple(tokens[: 2 * n])] = block
        self.pool.release(stands)
        self.index.check()


@given(
    st.lists(
        st.tuples(st.sampled_from([b"", b"x" * 16]), st.lists(st.integers(0, 1), max_size=16)),
        max_size=60,
    ),
    st.integers(8, 40),
)
def test_programs_find_what_a_dictionary_finds(
    requests: list[tuple[bytes, list[int]]], n_blocks: int
) -> None:
    first, second = Served(n_blocks, PrefixIndex), Served(n_blocks, RadixIndex)
    for root, tokens in requests:
        for one in (first, second):
            one.serve(root, tokens)
        np.testing.assert_array_equal(first.pool.digest, second.pool.digest)
        np.testing.assert_array_equal(first.pool.state, second.pool.state)


@pytest.mark.parametrize("kind", [PrefixIndex, RadixIndex])
def test_a_long_program(kind: type[PrefixIndex] | type[RadixIndex]) -> None:
    chance = random.Random(5)
    one = Served(300, kind)
    for _ in range(400):
        one.serve(b"", chance.choices(range(2), k=chance.randint(0, 40)))
    assert len(one.known) > 200


def test_a_full_bucket_loses_nothing() -> None:
    pool = BlockPool(64)
    index = PrefixIndex(pool)
    # digests whose low bits are all equal want the same few places
    digests = np.stack([np.arange(1, 65, dtype=np.uint64) << np.uint64(32)] * 2, axis=1)
    chain = Chain(b"", digests, np.arange(64, dtype=np.int32).reshape(-1, 1))
    blocks = pool.allocate(64)
    index.insert(chain, blocks)
    assert index.match(chain).tolist() == blocks.tolist()
    index.check()
    pool.release(blocks)
    pool.forget(blocks[20:])
    assert index.match(chain).tolist() == blocks[:20].tolist()
    index.check()


def test_a_digest_that_is_equal_by_accident_is_caught_by_the_tokens() -> None:
    pool = BlockPool(8)
    index = PrefixIndex(pool, verify=True)
    right = chain_of([1, 2, 3, 4, 5, 6], 2)
    index.insert(right, pool.allocate(3))
    wrong = Chain(b"", right.digests, np.array([[1, 2], [3, 9], [5, 6]], np.int32))
    assert len(index.match(right)) == 3
    assert len(index.match(wrong)) == 1
    trusting = PrefixIndex(BlockPool(8))
    trusting.insert(right, trusting.pool.allocate(3))
    assert len(trusting.match(wrong)) == 3


@pytest.mark.parametrize("kind", [PrefixIndex, RadixIndex])
def test_the_block_that_was_first_stands(kind: type[PrefixIndex] | type[RadixIndex]) -> None:
    pool = BlockPool(8)
    index = kind(pool)
    chain = chain_of(range(6), 2)
    first, second = pool.allocate(3), pool.allocate(3)
    assert index.insert(chain[:2], first[:2]).tolist() == first[:2].tolist()
    stands = index.insert(chain, second)
    assert stands.tolist() == [*first[:2].tolist(), second[2]]
    assert pool.parent[second[2]] == first[1]
    assert pool.hashed[second].tolist() == [False, False, True]


@pytest.mark.parametrize("kind", [PrefixIndex, RadixIndex])
def test_roots_keep_apart(kind: type[PrefixIndex] | type[RadixIndex]) -> None:
    pool = BlockPool(8)
    index = kind(pool)
    index.insert(chain_of([1, 2], 2, root_digest("a")), pool.allocate(1))
    assert len(index.match(chain_of([1, 2], 2, root_digest("b")))) == 0
    assert len(index.match(chain_of([1, 2], 2, root_digest("a")))) == 1


def test_a_damaged_map_is_found() -> None:
    pool = BlockPool(8)
    index, tree = PrefixIndex(pool), RadixIndex(pool)
    tree.insert(chain_of(range(6), 2), pool.allocate(3))
    index.check()
    tree.check()
    pool.hashed[0] = False
    for one in (index, tree):
        with pytest.raises(CacheError, match="3 blocks"):
            one.check()
