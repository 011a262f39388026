"""What a pool keeps of each block in one word, and the check of what it is given."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mpipar.distributed_cache.invariants import ACTIVE, CACHED, STATES
from mpipar.errors import CacheError

Places = NDArray[Any]
"""Block ids as NumPy indexes fastest: intp, three times as fast as int32."""

# one word a block, so that the common cases of a bulk call read and write one array
STATUS = np.dtype(
    [("state", np.uint8), ("hashed", np.bool_), ("unused", np.uint16), ("references", np.int32)]
)


def word(state: int, hashed: bool, references: int) -> np.int64:
    """Pack a block's status.

    Parameters
    ----------
    state : int
        FREE, CACHED, ACTIVE, RESERVED or DRAINING.
    hashed : bool
        Whether it carries a hash.
    references : int
        Its holders.

    Returns
    -------
    int64
        The bytes of `STATUS` as one number.
    """
    return np.int64(np.array((state, hashed, 0, references), STATUS).view(np.int64))


LONELY = word(ACTIVE, False, 1)
KNOWN = word(ACTIVE, True, 1)
ASLEEP = word(CACHED, True, 0)
NO_DIGEST = 0x6E6F5F6469676573


class BlockName(NamedTuple):
    """The only name of a block that may leave its rank: it dies when the block is reused."""

    rank: int
    block: int
    generation: int


class Distinct:
    """Turns block ids into places and refuses what is no block or named twice.

    Parameters
    ----------
    n_blocks : int
        Size of the pool.
    """

    def __init__(self, n_blocks: int) -> None:
        self._turn = np.empty(n_blocks, np.int32)

    def __call__(self, what: str, blocks: ArrayLike) -> Places:
        """Check ids in linear time.

        Parameters
        ----------
        what : str
            The operation, for the message.
        blocks : array of int32
            Ids.

        Returns
        -------
        array of intp
            The same ids.

        Raises
        ------
        CacheError
            With the first id that is wrong.
        """
        # an id below 0 is a large number without its sign: beyond the end, as any wrong one
        ids = np.asarray(blocks, np.int32).view(np.uint32).astype(np.intp)
        turns = np.arange(len(ids), dtype=np.int32)
        try:
            self._turn[ids] = turns
        except IndexError:
            wrong = np.asarray(blocks)[ids >= len(self._turn)][0]
            raise CacheError(f"{what}: block {wrong} of a pool of {len(self._turn)}") from None
        # of a block that is named twice only the last turn is left
        if self._turn[ids].tobytes() != turns.tobytes():
            twice = ids[self._turn[ids] != turns][0]
            raise CacheError(f"{what}: block {twice} is named twice")
        return ids


def must_be(what: str, ids: Places, found: NDArray[np.uint8], *states: int) -> None:
    """Refuse blocks that are in none of the given states.

    Parameters
    ----------
    what : str
        The operation, for the message.
    ids : array of intp
        Blocks.
    found : array of uint8
        The state of each.
    *states : int
        What is allowed.

    Raises
    ------
    CacheError
        With the first block in another state.
    """
    each = found.tobytes()
    if sum(map(each.count, states)) < len(ids):
        bad = next(place for place, state in enumerate(each) if state not in states)
        wanted = " or ".join(STATES[s] for s in states)
        raise CacheError(f"{what}: block {ids[bad]} is {STATES[each[bad]]}, must be {wanted}")
