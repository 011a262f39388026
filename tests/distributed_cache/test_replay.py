"""Replay of a recorded trace: exact hits, against published counts and slow models."""

import json
from collections import OrderedDict
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpipar.comm import Communicator
from mpipar.distributed_cache.replay import (
    ReplayCache,
    Request,
    farthest_next_use,
    id_chain,
    read_trace,
    replay,
)
from mpipar.distributed_cache.router import Router, RouterKind
from mpipar.errors import RecipeError

DATA = Path(__file__).parents[1] / "data" / "conversation_trace.npz"


@cache
def conversation() -> tuple[Request, ...]:
    """All requests of the recorded trace."""
    with np.load(DATA) as file:
        ids = np.cumsum(file["steps"].astype(np.int64))
        ends = np.cumsum(file["n_blocks"].astype(np.int64))
        parts = np.split(ids, ends[:-1])
        return tuple(Request(int(t), part) for t, part in zip(file["time_ms"], parts, strict=True))


class SlowCache:
    """The rule in words: count what leads, touch or insert from last to first, evict the oldest."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.order: OrderedDict[int, None] = OrderedDict()

    def count(self, ids: list[int]) -> int:
        return next((i for i, b in enumerate(ids) if b not in self.order), len(ids))

    def serve(self, ids: list[int]) -> int:
        hits = self.count(ids)
        for block in reversed(ids):
            self.order[block] = None
            self.order.move_to_end(block)
        while len(self.order) > self.capacity:
            self.order.popitem(last=False)
        return hits


def lru_hits(requests: tuple[Request, ...], capacity: int) -> int:
    """Hits of one cache, with every invariant walked at the end."""
    one = ReplayCache(capacity)
    hits = sum(one.serve(id_chain(request.blocks)) for request in requests)
    one.pool.check([])
    one.index.check()
    return hits


def test_the_trace_is_whole() -> None:
    ids = np.concatenate([request.blocks for request in conversation()])
    assert (len(conversation()), len(ids), len(np.unique(ids))) == (12_031, 288_500, 182_790)


SHORT = (1_000, 10_000, 182_790)


@pytest.mark.parametrize(
    ("capacity", "hits"),
    [
        pytest.param(capacity, hits, marks=() if capacity in SHORT else pytest.mark.slow)
        for capacity, hits in (
            (182_790, 105_710),
            (100_000, 104_924),
            (50_000, 102_290),
            (30_000, 93_978),
            (10_000, 61_046),
            (5_859, 39_258),
            (5_000, 32_260),
            (3_000, 18_850),
            (1_000, 12_847),
        )
    ],
)
def test_hits_of_least_recently_used(capacity: int, hits: int) -> None:
    assert lru_hits(conversation(), capacity) == hits


@pytest.mark.parametrize(
    ("kind", "hits", "busiest"),
    [
        ("cost", 102_041, 1.014),
        pytest.param("round robin", 32_690, 1.04, marks=pytest.mark.slow),
        pytest.param("longest prefix", 39_258, 8.0, marks=pytest.mark.slow),
    ],
)
def test_hits_over_eight_ranks(kind: RouterKind, hits: int, busiest: float) -> None:
    caches = [ReplayCache(5_859) for _ in range(8)]
    result = replay(conversation(), caches, Router(8, kind))
    assert (result.hits, result.blocks) == (hits, 288_500)
    assert result.busiest_over_mean == pytest.approx(busiest, abs=0.0015)
    assert sum(result.work) == 288_500 - hits
    for one in caches:
        one.pool.check([])
        one.index.check()


def slow_routed(
    requests: tuple[Request, ...], n_ranks: int, capacity: int
) -> tuple[int, list[int]]:
    """The cost rule in words, over dictionaries."""
    caches = [SlowCache(capacity) for _ in range(n_ranks)]
    load, work, minute, hits = [0] * n_ranks, [0] * n_ranks, 0, 0
    for request in requests:
        while minute < request.time_ms // 60_000:
            load, minute = [value // 2 for value in load], minute + 1
        ids = request.blocks.tolist()
        lacks = [len(ids) - one.count(ids) for one in caches]
        best = sorted((100 * lacks[r] + load[r], work[r], r) for r in range(n_ranks))[0][2]
        hits += caches[best].serve(ids)
        load[best] += lacks[best]
        work[best] += lacks[best]
    return hits, work


@pytest.mark.ranks(1, 2, 4)
def test_ranks_that_share_the_caches_out_count_the_same(comm: Communicator) -> None:
    requests = conversation()[:300]
    caches = [ReplayCache(400) for _ in range(8 // comm.size)]
    result = replay(requests, caches, Router(8), comm)
    assert (result.hits, list(result.work)) == slow_routed(requests, 8, 400)


@pytest.mark.slow
@pytest.mark.deadline(240)
@pytest.mark.ranks(4)
def test_the_whole_trace_on_four_ranks_of_two_caches(comm: Communicator) -> None:
    result = replay(conversation(), [ReplayCache(5_859) for _ in range(2)], Router(8), comm)
    assert result.hits == 102_041
    assert result.busiest_over_mean == pytest.approx(1.014, abs=0.0005)


@st.composite
def traces(draw: st.DrawFn) -> tuple[Request, ...]:
    """Requests that grow, part and come back; a block's id stands for its whole prefix."""
    ids: dict[tuple[int, ...], int] = {}
    requests, time = [], 0
    for tokens in draw(st.lists(st.lists(st.integers(0, 2), max_size=9), max_size=40)):
        prefixes = [tuple(tokens[: n + 1]) for n in range(len(tokens))]
        blocks = [ids.setdefault(prefix, len(ids)) for prefix in prefixes]
        time += draw(st.integers(0, 40_000))
        requests.append(Request(time, np.array(blocks, np.int64)))
    return tuple(requests)


@given(traces(), st.integers(1, 30))
def test_every_trace_hits_as_in_the_slow_model(
    requests: tuple[Request, ...], capacity: int
) -> None:
    slow = SlowCache(capacity)
    expected = sum(slow.serve(request.blocks.tolist()) for request in requests)
    assert lru_hits(requests, capacity) == expected
    caches = [ReplayCache(capacity) for _ in range(3)]
    result = replay(requests, caches)
    assert (result.hits, list(result.work)) == slow_routed(requests, 3, capacity)


def test_a_future_that_is_known_gives_more_hits() -> None:
    assert farthest_next_use(conversation(), 182_790) == 105_710
    assert farthest_next_use(conversation(), 10_000) / 288_500 == pytest.approx(0.366, abs=5e-4)
    assert farthest_next_use(conversation(), 1_000) / 288_500 == pytest.approx(0.1907, abs=5e-4)


def test_a_file_of_the_same_kind_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [{"timestamp": 5, "hash_ids": [0, 7], "output_length": 3, "input_length": 900}]
    lines.append({"timestamp": 60_007, "hash_ids": []})
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n", encoding="utf-8")
    first, second = read_trace(path)
    assert (first.time_ms, first.blocks.tolist()) == (5, [0, 7])
    assert (second.time_ms, second.blocks.tolist()) == (60_007, [])
    path.write_text('{"timestamp": 1, "hash_ids": [1]}\n{"timestamp": 2}\n', encoding="utf-8")
    with pytest.raises(RecipeError, match="line 2"):
        read_trace(path)
