"""The algorithm of vLLM's block manager, written anew to measure against; nothing of it is copied.

One object a block, a doubly linked free queue with a sentinel at both ends, a dictionary from chain
hash (with the number of the group of layers) to block.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256
from itertools import pairwise

import numpy as np

GROUP = (0).to_bytes(4, "big")


class Block:
    """A block as an object."""

    __slots__ = ("after", "before", "block_hash", "block_id", "is_null", "references")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.references = 0
        self.is_null = False
        self.block_hash: bytes | None = None
        self.before: Block | None = None
        self.after: Block | None = None


class FreeQueue:
    """Free blocks, linked in the order of eviction."""

    def __init__(self, blocks: list[Block]) -> None:
        self.count = len(blocks)
        self.head, self.tail = Block(-1), Block(-1)
        line = [self.head, *blocks, self.tail]
        for left, right in pairwise(line):
            left.after, right.before = right, left

    def pop(self, n: int) -> list[Block]:
        """Take the n oldest."""
        assert n <= self.count
        self.count -= n
        found = []
        block = self.head.after
        for _ in range(n):
            found.append(block)
            last, block = block, block.after
            last.before = last.after = None
        self.head.after, block.before = block, self.head
        return found

    def remove(self, block: Block) -> None:
        """Take one from the middle."""
        block.before.after, block.after.before = block.after, block.before
        block.before = block.after = None
        self.count -= 1

    def append(self, blocks: list[Block]) -> None:
        """Add at the young end."""
        self.count += len(blocks)
        last = self.tail.before
        for block in blocks:
            block.before, last.after = last, block
            last = block
        last.after, self.tail.before = self.tail, last


class ObjectPool:
    """vLLM's block manager: its algorithm and its calls a block, written anew."""

    def __init__(self, n_blocks: int) -> None:
        self.blocks = [Block(i) for i in range(n_blocks)]
        self.queue = FreeQueue(self.blocks)
        # a hash has one block, or a dictionary of those with equal data
        self.map: dict[bytes, Block | dict[int, Block]] = {}

    def allocate(self, n: int) -> list[Block]:
        """Take n blocks; cached ones lose their hash."""
        found = self.queue.pop(n)
        for block in found:
            self.evict(block)
            assert block.references == 0
            block.references += 1
        return found

    def evict(self, block: Block) -> bool:
        """Take a block out of the map if it is in there."""
        if block.block_hash is None:
            return False
        known = self.map.pop(block.block_hash, None)
        if isinstance(known, dict):
            known.pop(block.block_id)
            if known:
                self.map[block.block_hash] = known
        block.block_hash = None
        return True

    def release(self, blocks: Iterable[Block]) -> None:
        """Take one holder from each, tail first."""
        ordered = list(blocks)
        for block in ordered:
            block.references -= 1
        self.queue.append([b for b in ordered if b.references == 0 and not b.is_null])

    def share(self, blocks: list[Block]) -> None:
        """Add one holder to each."""
        for block in blocks:
            if block.references == 0 and not block.is_null:
                self.queue.remove(block)
            block.references += 1

    def store(self, blocks: list[Block], hashes: list[bytes]) -> None:
        """Enter full blocks into the map."""
        for block, block_hash in zip(blocks, hashes, strict=True):
            key = block_hash + GROUP
            block.block_hash = key
            known = self.map.get(key)
            if known is None:
                self.map[key] = block
            elif isinstance(known, dict):
                known[block.block_id] = block
            else:
                self.map[key] = {known.block_id: known, block.block_id: block}

    def one(self, key: bytes) -> Block | None:
        """Any block of a hash."""
        known = self.map.get(key)
        if isinstance(known, dict):
            return next(iter(known.values()))
        return known

    def cached(self, block_hash: bytes, groups: tuple[bytes, ...]) -> list[Block] | None:
        """Blocks of a hash in each group of layers."""
        found = []
        for group in groups:
            block = self.one(block_hash + group)
            if block is None:
                return None
            found.append(block)
        return found

    def match(self, hashes: list[bytes]) -> list[Block]:
        """Walk a chain to the first block that is missing."""
        found: list[Block] = []
        for block_hash in hashes:
            blocks = self.cached(block_hash, (GROUP,))
            if blocks is None:
                break
            found.append(blocks[0])
        return found


class LeanPool(ObjectPool):
    """The same with every call a block written out: as fast as plain Python objects get."""

    def allocate(self, n: int) -> list[Block]:
        """Take n blocks; cached ones lose their hash."""
        found = self.queue.pop(n)
        for block in found:
            if block.block_hash is not None:
                self.map.pop(block.block_hash, None)
                block.block_hash = None
            block.references += 1
        return found

    def release(self, blocks: Iterable[Block]) -> None:
        """Take one holder from each, tail first."""
        ordered = list(blocks)
        for block in ordered:
            block.references -= 1
        self.queue.append([block for block in ordered if block.references == 0])

    def store(self, blocks: list[Block], hashes: list[bytes]) -> None:
        """Enter full blocks into the map."""
        for block, block_hash in zip(blocks, hashes, strict=True):
            block.block_hash = key = block_hash + GROUP
            self.map[key] = block

    def match(self, hashes: list[bytes]) -> list[Block]:
        """Walk a chain to the first block that is missing."""
        found = []
        for block_hash in hashes:
            block = self.map.get(block_hash + GROUP)
            if block is None:
                break
            found.append(block)
        return found


def object_hashes(tokens: np.ndarray, block_size: int) -> list[bytes]:
    """Chained sha256, as vLLM's default."""
    parent, found = b"", []
    raw = tokens.astype("<i4").tobytes()
    for start in range(0, len(raw) - 4 * block_size + 1, 4 * block_size):
        parent = sha256(parent + raw[start : start + 4 * block_size]).digest()
        found.append(parent)
    return found
