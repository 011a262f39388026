"""Chained hashes: the written form, computed here with hashlib alone, and equal everywhere."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpipar.distributed_cache.hashing import chain_of, root_digest
from mpipar.errors import CountOutOfRange

TOKENS = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=40)


def by_hand(tokens: list[int], size: int, root: bytes) -> list[bytes]:
    """The documented form: tag, length as 8 little-endian bytes, content; parent, then tokens."""
    found, parent = [], root
    for at in range(0, len(tokens) - size + 1, size):
        block = b"".join(t.to_bytes(4, "little", signed=True) for t in tokens[at : at + size])
        text = b"P" + len(parent).to_bytes(8, "little") + parent
        text += b"T" + len(block).to_bytes(8, "little") + block
        parent = hashlib.blake2b(text, digest_size=16).digest()
        found.append(parent)
    return found


@given(TOKENS, st.integers(1, 8), st.text(), st.text(), st.text())
def test_digests_are_those_of_the_written_form(
    tokens: list[int], size: int, model: str, adapter: str, salt: str
) -> None:
    text = b"".join(
        tag + len(word.encode()).to_bytes(8, "little") + word.encode()
        for tag, word in ((b"M", model), (b"A", adapter), (b"S", salt))
    )
    root = root_digest(model, adapter, salt)
    assert root == hashlib.blake2b(text, digest_size=16).digest()
    chain = chain_of(tokens, size, root)
    assert [row.astype("<u8").tobytes() for row in chain.digests] == by_hand(tokens, size, root)
    assert chain.tokens.reshape(-1).tolist() == tokens[: len(tokens) // size * size]


@given(TOKENS, st.integers(1, 4), st.data())
def test_a_chain_goes_on_where_another_one_ended(
    tokens: list[int], size: int, data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, len(tokens)))
    root = root_digest("model")
    whole = chain_of(tokens, size, root)
    part = chain_of(tokens, size, root, chain_of(tokens[:cut], size, root))
    np.testing.assert_array_equal(part.digests, whole.digests)
    np.testing.assert_array_equal(part.tokens, whole.tokens)


def test_no_two_lists_of_fields_look_alike() -> None:
    names = [("ab", "", ""), ("a", "b", ""), ("a", "", "b"), ("", "ab", ""), ("", "", "ab")]
    assert len({root_digest(*name) for name in names}) == len(names)
    # the same tokens in blocks of another size are other blocks
    assert chain_of([1, 2, 3, 4], 4).digests.tolist() != chain_of([1, 2, 3, 4], 2).digests.tolist()


def test_a_changed_token_changes_all_that_follows_and_nothing_before() -> None:
    tokens = list(range(20))
    first = chain_of(tokens, 4).digests
    tokens[9] += 1
    same = (chain_of(tokens, 4).digests == first).any(axis=1)
    assert same.tolist() == [True, True, False, False, False]


@pytest.mark.parametrize("seed", ["0", "12345"])
def test_digests_are_equal_in_every_process(seed: str) -> None:
    code = (
        "from mpipar.distributed_cache.hashing import chain_of, root_digest;"
        "print(chain_of(range(64), 16, root_digest('m', 'a', 's')).digests.tolist())"
    )
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    here = chain_of(range(64), 16, root_digest("m", "a", "s")).digests.tolist()
    assert done.stdout.strip() == str(here)


def test_token_ids_and_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(CountOutOfRange, match=r"2\*\*31"):
        chain_of([1, 2**31], 1)
    with pytest.raises(CountOutOfRange, match="1 or more"):
        chain_of([1], 0)
