"""Replay of a recorded stream of requests: how many blocks would have been hit, and by whom."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mpipar.distributed_cache.eviction import EvictionPolicy
from mpipar.distributed_cache.hashing import Chain
from mpipar.distributed_cache.pool import BlockPool
from mpipar.distributed_cache.prefix_index import PrefixIndex
from mpipar.distributed_cache.router import Router
from mpipar.errors import RecipeError

if TYPE_CHECKING:
    from mpipar.comm import Communicator


@dataclass(frozen=True)
class Request:
    """One request of a trace: when it came and the ids of its blocks, from first to last."""

    time_ms: int
    blocks: NDArray[np.int64]


@dataclass(frozen=True)
class ReplayResult:
    """What a replay found.

    Attributes
    ----------
    hits, blocks : int
        Leading blocks that were present, and all blocks.
    work : tuple of int
        Blocks that each rank had to compute.
    """

    hits: int
    blocks: int
    work: tuple[int, ...]

    @property
    def hit_rate(self) -> float:
        """Hits over all blocks."""
        return self.hits / self.blocks

    @property
    def busiest_over_mean(self) -> float:
        """Work of the busiest rank over the mean."""
        return max(self.work) * len(self.work) / max(sum(self.work), 1)


def read_trace(path: str | Path) -> list[Request]:
    """Read a trace of requests.

    Parameters
    ----------
    path : str or Path
        One JSON object a line with `timestamp` (ms) and `hash_ids`: a block's id stands for its
        content and all before it (the format of the Mooncake traces, FAST 2025).

    Returns
    -------
    list of Request
        In the order of the file.

    Raises
    ------
    RecipeError
        With the first line that is not such an object.
    """
    found = []
    with Path(path).open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                entry = json.loads(line)
                ids = np.asarray(entry["hash_ids"], np.int64).reshape(-1)
                found.append(Request(int(entry["timestamp"]), ids))
            except (ValueError, KeyError, TypeError) as error:
                raise RecipeError(
                    f"line {number} of {path}: needs timestamp and hash_ids ({error!r})"
                ) from None
    return found


class ReplayCache:
    """The cache of one rank without data: a pool and its index, fed with block ids.

    Parameters
    ----------
    n_blocks : int
        Capacity.
    policy : callable, optional
        Makes the eviction policy; `LRU` if left out.
    """

    def __init__(
        self, n_blocks: int, policy: Callable[[int], EvictionPolicy] | None = None
    ) -> None:
        self.pool = BlockPool(n_blocks, policy=policy)
        self.index = PrefixIndex(self.pool)

    def count(self, chain: Chain) -> int:
        """Count the leading blocks of a request that are present.

        Parameters
        ----------
        chain : Chain
            The request (`id_chain`).

        Returns
        -------
        int
            Hit blocks; nothing is changed.
        """
        return len(self.index.match(chain))

    def serve(self, chain: Chain) -> int:
        """Run one request: hit blocks are touched, the others computed and kept.

        Parameters
        ----------
        chain : Chain
            The request. Of one longer than the capacity the tail is not kept.

        Returns
        -------
        int
            Hit blocks.
        """
        hits = self.index.match(chain)
        self.pool.share(hits)
        n_new = min(len(chain), self.pool.n_blocks) - len(hits)
        table = np.concatenate([hits, self.pool.allocate(n_new)])
        stands = self.index.insert(chain[: len(table)], table)
        self.pool.release(stands)
        return len(hits)


def id_chain(blocks: NDArray[np.int64]) -> Chain:
    """Take block ids as they are for chain hashes.

    Parameters
    ----------
    blocks : array of int64
        Ids of a trace; equal ids mean equal content from the start.

    Returns
    -------
    Chain
        Its tokens are the ids.
    """
    # spread over all bits: a hash map that takes the low ones sees no pattern
    low = blocks.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    digests = np.stack([low ^ (low >> np.uint64(32)), blocks.astype(np.uint64)], axis=1)
    return Chain(b"", digests, blocks.astype(np.int32).reshape(-1, 1))


def replay(
    requests: Iterable[Request],
    caches: Sequence[ReplayCache],
    router: Router | None = None,
    comm: Communicator | None = None,
) -> ReplayResult:
    """Run a trace through caches and count what they hit. Collective if a communicator is given.

    Parameters
    ----------
    requests : iterable of Request
        In order of time; the same on every rank.
    caches : sequence of ReplayCache
        All caches, or those of this rank, equally many on each.
    router : Router, optional
        Chooses the cache; by cost if left out.
    comm : Communicator, optional
        Whose ranks share the caches out in rank order; each request then costs one all-gather of
        its missing blocks.

    Returns
    -------
    ReplayResult
        Exact counts over all caches, the same on every rank.
    """
    n_ranks, rank = (1, 0) if comm is None else (comm.size, comm.rank)
    router = router if router is not None else Router(n_ranks * len(caches))
    first = rank * len(caches)
    hits = blocks = 0
    for request in requests:
        chain = id_chain(request.blocks)
        missing = [len(chain) - cache.count(chain) for cache in caches]
        if comm is not None:
            missing = comm.all_gather(np.array(missing)).tolist()
        chosen = router.choose(missing, request.time_ms)
        if first <= chosen < first + len(caches):
            caches[chosen - first].serve(chain)
        hits += len(chain) - missing[chosen]
        blocks += len(chain)
    return ReplayResult(hits, blocks, tuple(router.work))


def farthest_next_use(requests: Sequence[Request], n_blocks: int) -> int:
    """Count the hits of a cache that knows the future: what an online policy is measured against.

    Parameters
    ----------
    requests : sequence of Request
        The whole trace.
    n_blocks : int
        Capacity of the one cache.

    Returns
    -------
    int
        Hit blocks when the block whose next use is farthest away is evicted first.
    """
    uses: dict[int, list[int]] = {}
    for at in range(len(requests) - 1, -1, -1):
        for block in requests[at].blocks.tolist():
            uses.setdefault(block, []).append(at)
    never = len(requests)
    present: dict[int, tuple[int, int]] = {}
    heap: list[tuple[int, int, int]] = []
    hits = 0
    for request in requests:
        ids = request.blocks.tolist()
        leading = 0
        while leading < len(ids) and ids[leading] in present:
            leading += 1
        hits += leading
        for depth, block in enumerate(ids):
            uses[block].pop()
            key = (uses[block][-1] if uses[block] else never, depth)
            present[block] = key
            heappush(heap, (-key[0], -depth, block))
        while len(present) > n_blocks:
            after, depth, block = heappop(heap)
            if present.get(block) == (-after, -depth):
                del present[block]
    return hits
