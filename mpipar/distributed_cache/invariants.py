"""The states of a block, who hears of them, and the rules between a pool's arrays."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mpipar.distributed_cache.eviction import Blocks

if TYPE_CHECKING:
    from mpipar.distributed_cache.pool import BlockPool

FREE, CACHED, ACTIVE, RESERVED, DRAINING = range(5)
STATES = ("free", "cached", "active", "reserved", "draining")


class PoolListener(Protocol):
    """Who wants to hear which hashes come and go: an index, a directory."""

    def stored(self, blocks: Blocks) -> None:
        """Blocks carry a hash now.

        Parameters
        ----------
        blocks : array of int32
            Parents before children.
        """
        ...

    def removed(self, blocks: Blocks) -> None:
        """Blocks are about to lose their hash; it can still be read.

        Parameters
        ----------
        blocks : array of int32
            Any order.
        """
        ...


def broken_rules(
    pool: BlockPool, free: NDArray[np.int32], tables: Iterable[ArrayLike] | None
) -> dict[str, NDArray[np.bool_]]:
    """Hold every block against every rule.

    Parameters
    ----------
    pool : BlockPool
        Whose arrays are walked.
    free : array of int32
        Its stack of free blocks.
    tables : iterable of arrays of int32, optional
        All block tables there are; left out, the holders are not counted.

    Returns
    -------
    dict
        What is wrong -> for each block, whether it is.
    """

    def count(blocks: ArrayLike) -> NDArray[np.int64]:
        return np.bincount(np.asarray(blocks, np.int64), minlength=pool.n_blocks)

    state, hashed, parent = pool.state, pool.hashed, pool.parent
    held, cached = state == ACTIVE, state == CACHED
    rules = {
        "in no known state": state > DRAINING,
        "holders but not active, or the reverse": (pool.references > 0) != held,
        "fewer than no holders": pool.references < 0,
        "free but not once in the free stack": count(free) != (state == FREE),
        "a hash in a state that has none": hashed & ~held & ~cached,
        "cached without a hash": cached & ~hashed,
        "a parent without a hash of its own": (parent >= 0) & ~hashed,
        "a parent that has lost its hash": (parent >= 0) & ~hashed[parent],
        "a wrong number of children": pool.children != count(parent[parent >= 0]),
        "cached and unknown to the policy, or the reverse": count(pool.policy.first(pool.n_blocks))
        != cached,
    }
    if tables is not None:
        holders = np.zeros(pool.n_blocks, np.int64)
        for table in tables:
            np.add.at(holders, np.asarray(table, np.int64), 1)
        rules["more or fewer holders than tables that name it"] = pool.references != holders
    return rules
