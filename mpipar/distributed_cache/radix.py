"""The same answer as `PrefixIndex` from a radix tree: no hash is trusted, only tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from mpipar.distributed_cache.eviction import Blocks
from mpipar.distributed_cache.hashing import Chain
from mpipar.distributed_cache.pool import BlockPool
from mpipar.errors import CacheError


@dataclass(eq=False)
class _Node:
    """A run of blocks without a branch: the tokens of each and the block that holds them."""

    tokens: list[bytes]
    blocks: list[int]
    above: _Node | None = None
    below: dict[bytes, _Node] = field(default_factory=dict)


class RadixIndex:
    """A tree of token runs, one below each chain root.

    An edge is a run of whole blocks; it splits where two sequences part. Takes the same calls as
    `PrefixIndex` and must agree with it; it needs no hash, so it also proves the hashes right.

    Parameters
    ----------
    pool : BlockPool
        The blocks to find.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self._roots: dict[bytes, _Node] = {}
        self._where: dict[int, _Node] = {}
        pool.listeners.append(self)

    def match(self, chain: Chain) -> Blocks:
        """Find the longest prefix that is held.

        Parameters
        ----------
        chain : Chain
            The full blocks of a request.

        Returns
        -------
        array of int32
            Blocks of the leading part that is present; nobody holds them for the caller yet.
        """
        return np.array(self._walk(chain.root, _keys(chain))[0], np.int32)

    def insert(self, chain: Chain, blocks: Blocks) -> Blocks:
        """Name active blocks that hold a chain's data, so that others find them.

        Parameters
        ----------
        chain : Chain
            As long as `blocks`.
        blocks : array of int32
            The caller's blocks for all of the chain; those already known are left.

        Returns
        -------
        array of int32
            The blocks that stand for the chain: another one where the same data was there first.
        """
        keys = _keys(chain)
        known, node, used = self._walk(chain.root, keys)
        n = len(known)
        stands = np.array(blocks, np.int32)
        stands[:n] = known
        if n == len(stands):
            return stands
        parents = np.concatenate([stands[n - 1 : n] if n else np.full(1, -1), stands[n:-1]])
        self.pool.label(stands[n:], chain.digests[n:], parents.astype(np.int32))
        if node.above is not None and used == len(node.blocks) and not node.below:
            node.tokens += keys[n:]
            node.blocks += stands[n:].tolist()
        else:
            if used < len(node.blocks):
                self._split(node, used)
            node = self._hang(node, _Node(keys[n:], stands[n:].tolist()))
        self._where.update(dict.fromkeys(stands[n:].tolist(), node))
        return stands

    def stored(self, blocks: Blocks) -> None:
        """Do nothing: a tree needs tokens, which only `insert` brings.

        Parameters
        ----------
        blocks : array of int32
            Blocks with a new hash.
        """

    def removed(self, blocks: Blocks) -> None:
        """Let go of blocks that lose their hash (called by the pool).

        Parameters
        ----------
        blocks : array of int32
            A set that is closed below: no block stays whose parent goes.
        """
        going = set(blocks.tolist())
        for node in {self._where.pop(block) for block in going}:
            first = node.tokens[0]
            while node.blocks and node.blocks[-1] in going:
                node.blocks.pop()
                node.tokens.pop()
            if not node.blocks and node.above is not None:
                del node.above.below[first]

    def check(self) -> None:
        """Walk every invariant.

        Raises
        ------
        CacheError
            If the tree and the pool's hashes are not the same.
        """
        found: list[int] = []
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            for key, child in node.below.items():
                if not child.blocks or child.tokens[0] != key or child.above is not node:
                    raise CacheError(f"a node of {len(child.blocks)} blocks hangs in a wrong place")
            found += node.blocks
            stack += node.below.values()
        if not np.array_equal(np.sort(found), np.flatnonzero(self.pool.hashed)):
            raise CacheError(f"{len(found)} blocks in the tree, {self.pool.hashed.sum()} hashed")

    def _walk(self, root: bytes, keys: list[bytes]) -> tuple[list[int], _Node, int]:
        """Blocks found, the node where the walk ended and how much of its run was used."""
        node = self._roots.setdefault(root, _Node([], []))
        found: list[int] = []
        used = 0
        while used == len(node.blocks) and len(found) < len(keys):
            child = node.below.get(keys[len(found)])
            if child is None:
                break
            node, used = child, 0
            for key, token in zip(keys[len(found) :], node.tokens, strict=False):
                if key != token:
                    break
                used += 1
            found += node.blocks[:used]
        return found, node, used

    def _split(self, node: _Node, at: int) -> None:
        lower = _Node(node.tokens[at:], node.blocks[at:], below=node.below)
        for child in lower.below.values():
            child.above = lower
        self._where.update(dict.fromkeys(lower.blocks, lower))
        node.tokens, node.blocks, node.below = node.tokens[:at], node.blocks[:at], {}
        self._hang(node, lower)

    def _hang(self, node: _Node, child: _Node) -> _Node:
        node.below[child.tokens[0]] = child
        child.above = node
        return child


def _keys(chain: Chain) -> list[bytes]:
    return [row.tobytes() for row in chain.tokens]
