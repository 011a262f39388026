"""The paged cache against the algorithm of vLLM's block manager, and policies on a trace.

The other side is that algorithm written anew (`kv_objects.py`), also in a lean form with every call
written out; no vLLM is needed or measured. All sides do the same in interleaved rounds; medians
with quartiles.

    python benchmarks/kv_cache.py
    python benchmarks/kv_cache.py --trace conversation_trace.jsonl
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import get_args

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.kv_objects import LeanPool, ObjectPool, object_hashes
from mpipar.distributed_cache.directory import PrefixDirectory, PrefixLog
from mpipar.distributed_cache.eviction import LRU
from mpipar.distributed_cache.hashing import Chain, chain_of
from mpipar.distributed_cache.pool import BlockPool
from mpipar.distributed_cache.prefix_index import PrefixIndex
from mpipar.distributed_cache.replay import (
    ReplayCache,
    Request,
    farthest_next_use,
    id_chain,
    read_trace,
    replay,
)
from mpipar.distributed_cache.retention import Retention
from mpipar.distributed_cache.router import Router, RouterKind

BULK = 256
N_BLOCKS = 16_384


Prompts = list[tuple[Chain, list[bytes]]]


def chains(n: int, seed: int) -> Prompts:
    """Prompts of one bulk each, hashed for both sides."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, 50_000, BULK * 16) for _ in range(n)]
    return [(chain_of(tokens, 16), object_hashes(tokens, 16)) for tokens in prompts]


def fill(pool: BlockPool, index: PrefixIndex, made: Prompts) -> None:
    """Cache prompts in arrays."""
    for chain, _ in made:
        pool.release(index.insert(chain, pool.allocate(BULK)))


def fill_objects(objects: ObjectPool, made: Prompts) -> None:
    """Cache prompts in objects."""
    for _, hashes in made:
        blocks = objects.allocate(BULK)
        objects.store(blocks, hashes)
        objects.release(reversed(blocks))


Ways = dict[str, Callable[[], object]]


def interleaved(ways: Ways, rounds: int) -> dict[str, list[float]]:
    """Microseconds of each way, in turn."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            times[name].append(1e6 * (time.perf_counter() - start))
    return times


def show(what: str, times: dict[str, list[float]], target: str = "") -> None:
    """Print medians with quartiles, and how many times as long the others take."""
    ours = statistics.median(times["arrays"])
    print(what + target)
    for name, values in times.items():
        low, middle, high = statistics.quantiles(values, n=4)
        print(f"  {name:8} {middle:8.1f} us  [{low:.1f}, {high:.1f}]  {middle / ours:5.2f} x")


def speed(rounds: int) -> None:
    """Allocation and look-up in bulk, in the same run on three sides."""
    made = chains(N_BLOCKS // BULK, 0)
    pool = BlockPool(N_BLOCKS)
    index = PrefixIndex(pool)
    sides = {"objects": ObjectPool(N_BLOCKS), "lean": LeanPool(N_BLOCKS)}

    # free blocks in no order, as they are after a while
    rng = np.random.default_rng(3)
    pool.release(rng.permutation(pool.allocate(N_BLOCKS)))
    for side in sides.values():
        blocks = side.allocate(N_BLOCKS)
        side.release([blocks[i] for i in rng.permutation(N_BLOCKS)])

    def every(ours: Callable[[], object], theirs: Callable[[ObjectPool], object]) -> Ways:
        ways: Ways = {"arrays": ours}
        return ways | {name: partial(theirs, side) for name, side in sides.items()}

    def taken(objects: ObjectPool) -> None:
        objects.release(reversed(objects.allocate(BULK)))

    ways = every(lambda: pool.release(pool.allocate(BULK)), taken)
    show(f"allocate + release {BULK}", interleaved(ways, rounds), " (target: objects 5 x)")

    fill(pool, index, made)
    for side in sides.values():
        fill_objects(side, made)
    turns = cycle(made)
    there = lambda objects: objects.match(next(turns)[1])  # noqa: E731
    ways = every(lambda: index.match(next(turns)[0]), there)
    assert all(len(way()) == BULK for way in ways.values())  # type: ignore[arg-type]
    show(f"look-up of a {BULK}-block hit", interleaved(ways, rounds), " (target: objects 3 x)")

    def share() -> None:
        hit = index.match(next(turns)[0])
        pool.share(hit)
        pool.release(hit)

    def share_objects(objects: ObjectPool) -> None:
        hit = objects.match(next(turns)[1])
        objects.share(hit)
        objects.release(reversed(hit))

    show(f"look-up + share + release {BULK}", interleaved(every(share, share_objects), rounds))

    rounds = min(rounds, 200)
    fresh = {name: iter(chains(rounds, 1)) for name in ("arrays", *sides)}
    ways = {"arrays": lambda: fill(pool, index, [next(fresh["arrays"])])}
    for name, side in sides.items():
        ways[name] = lambda name=name, side=side: fill_objects(side, [next(fresh[name])])
    show(f"evict + store + release {BULK}", interleaved(ways, rounds))

    tokens = np.random.default_rng(2).integers(0, 50_000, BULK * 16)
    ways = {"arrays": lambda: chain_of(tokens, 16), "sha256": lambda: object_hashes(tokens, 16)}
    show(f"chained hash of {BULK} blocks of 16 tokens", interleaved(ways, rounds))


def memory() -> None:
    """Bytes a block, every block with a hash."""
    made = chains(N_BLOCKS // BULK, 0)
    used = {}
    for name in ("arrays", "objects"):
        tracemalloc.start()
        if name == "arrays":
            pool = BlockPool(N_BLOCKS)
            index = PrefixIndex(pool)
            fill(pool, index, made)
        else:
            objects = ObjectPool(N_BLOCKS)
            fill_objects(objects, made)
        used[name] = tracemalloc.get_traced_memory()[0] / N_BLOCKS
        tracemalloc.stop()
    share = used["arrays"] / used["objects"]
    print(f"bytes a block: arrays {used['arrays']:.0f}, objects {used['objects']:.0f}: ", end="")
    print(f"{share:.2f} (target at most 0.33)")


def recorded() -> list[Request]:
    """The trace that the tests carry."""
    data = Path(__file__).parents[1] / "tests" / "data" / "conversation_trace.npz"
    with np.load(data) as file:
        ids = np.cumsum(file["steps"].astype(np.int64))
        parts = np.split(ids, np.cumsum(file["n_blocks"].astype(np.int64))[:-1])
        return [Request(int(t), part) for t, part in zip(file["time_ms"], parts, strict=True)]


def policies(requests: list[Request], capacities: list[int]) -> None:
    """Hits of each policy, and of one that knows the future."""
    total = sum(len(request.blocks) for request in requests)
    made = [id_chain(request.blocks) for request in requests]
    for capacity in capacities:
        print(f"{capacity:,} blocks")
        for policy in (LRU, Retention):
            cache = ReplayCache(capacity, policy)
            start = time.perf_counter()
            hits = sum(cache.serve(chain) for chain in made)
            seconds = time.perf_counter() - start
            print(f"  {policy.__name__:18} {hits:8,}  {hits / total:.4f}  {seconds:.1f} s")
        hits = farthest_next_use(requests, capacity)
        print(f"  {'farthest next use':18} {hits:8,}  {hits / total:.4f}")


def routes(requests: list[Request], n_ranks: int, capacity: int) -> None:
    """Hits and balance of each routing rule."""
    for kind in get_args(RouterKind):
        caches = [ReplayCache(capacity) for _ in range(n_ranks)]
        start = time.perf_counter()
        result = replay(requests, caches, Router(n_ranks, kind))
        print(
            f"{n_ranks} x {capacity:,} blocks, {kind:14}: {result.hits:7,} "
            f"({result.hit_rate:.4f}), busiest/mean {result.busiest_over_mean:.3f}, "
            f"{time.perf_counter() - start:.1f} s"
        )


class Teller:
    """Writes what a pool gains and loses into its rank's log."""

    def __init__(self, pool: BlockPool, log: PrefixLog) -> None:
        self.pool, self.log = pool, log
        pool.listeners.append(self)

    def stored(self, blocks: np.ndarray) -> None:
        """Blocks carry a hash now."""
        self.log.add(names(self.pool.digest[blocks]))

    def removed(self, blocks: np.ndarray) -> None:
        """Blocks lose their hash."""
        self.log.remove(names(self.pool.digest[blocks]))


def names(digests: np.ndarray) -> list[bytes]:
    """Digests as bytes."""
    text = digests.tobytes()
    return [text[at : at + 16] for at in range(0, len(text), 16)]


def directory(requests: list[Request], n_ranks: int, capacity: int, every: int) -> None:
    """Route by a directory that hears of changes after every so many requests."""
    caches = [ReplayCache(capacity) for _ in range(n_ranks)]
    logs = [PrefixLog(rank) for rank in range(n_ranks)]
    for cache, log in zip(caches, logs, strict=True):
        Teller(cache.pool, log)
    known, router = PrefixDirectory(n_ranks), Router(n_ranks)
    hits = n_events = 0
    spent = {"apply": 0.0, "look-up": 0.0}
    begin = time.perf_counter()
    for number, request in enumerate(requests):
        chain = id_chain(request.blocks)
        start = time.perf_counter()
        lengths = known.lengths(names(chain.digests))
        spent["look-up"] += time.perf_counter() - start
        chosen = router.choose([len(chain) - length for length in lengths], request.time_ms)
        hits += caches[chosen].serve(chain)
        if number % every == 0:
            batches = [b for log in logs for b in log.since(*known.position(log.owner))]
            start = time.perf_counter()
            for batch in batches:
                known.apply(batch)
            spent["apply"] += time.perf_counter() - start
            n_events += sum(len(batch.events) for batch in batches)
    seconds = time.perf_counter() - begin
    print(
        f"directory of {n_ranks} ranks, told every {every:3} requests: {hits:,} hits; "
        f"{n_events:,} events applied at {n_events / spent['apply'] / 1e6:.2f} M/s, "
        f"{1e6 * spent['look-up'] / len(requests):.0f} us a look-up, {seconds:.1f} s in all"
    )


def main() -> None:
    """Run all parts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", help="a trace as JSON lines; the tests' one if left out")
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--only", choices=("speed", "memory", "policies", "routes", "directory"))
    given = parser.parse_args()
    if given.only in (None, "speed"):
        speed(given.rounds)
    if given.only in (None, "memory"):
        memory()
    if given.only in ("speed", "memory"):
        return
    requests = read_trace(given.trace) if given.trace else recorded()
    if given.only in (None, "policies"):
        policies(requests, [1_000, 3_000, 5_000, 10_000, 30_000, 50_000])
    if given.only in (None, "routes"):
        routes(requests, 8, 5_859)
    if given.only in (None, "directory"):
        for every in (1, 10, 100):
            directory(requests, 8, 5_859, every)


if __name__ == "__main__":
    main()
