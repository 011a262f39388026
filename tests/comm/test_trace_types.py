"""Typed collective traces: values, the named estimate and the exact bytes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpipar.comm.trace_types import (
    CollectiveKind,
    CollectiveTrace,
    ParallelTraceVisibility,
    exact_ring_bytes,
)
from mpipar.errors import (
    CollectiveMismatch,
    CountOutOfRange,
    EmptyInput,
    NonFiniteValue,
    Overflow,
    UnevenSplit,
)
from mpipar.units import (
    Bytes,
    CommunicationBytes,
    ParallelStrategy,
    RankId,
    RankIndex,
    RankShard,
    ShardPlan,
    ShardStart,
    TensorLine,
    WorldSize,
    shard_tensor_line,
)

RING = [CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_GATHER]
B64 = CommunicationBytes(64)


def plan_of(values: list[float], world: int) -> ShardPlan:
    line = TensorLine.from_values(values)
    return shard_tensor_line(line, WorldSize(world), ParallelStrategy.DATA_PARALLEL)


def numbers(lines: tuple[TensorLine, ...]) -> list[list[float]]:
    return [[float(v) for v in line.values] for line in lines]


def test_the_founding_all_reduce():
    trace = CollectiveTrace.all_reduce(plan_of([1, 2, 3, 4], 2), B64)
    assert str(trace.kind) == "all-reduce"
    assert str(trace.reduced_value) == "10.0"
    assert numbers(trace.output) == [[10.0], [10.0]]
    assert trace.communication_estimate == CommunicationBytes(128)
    assert str(trace.communication_estimate) == "128 bytes"
    assert trace.exact_bytes_per_rank == (Bytes(64), Bytes(64))


def test_reduce_scatter_and_all_gather():
    scattered = CollectiveTrace.reduce_scatter(plan_of([1, 2, 3, 4], 2), B64)
    assert numbers(scattered.output) == [[4.0], [6.0]]
    gathered = CollectiveTrace.all_gather(plan_of([1, 2, 3, 4], 2), B64)
    assert numbers(gathered.output) == [[1.0, 2.0, 3.0, 4.0]] * 2
    for trace in (scattered, gathered):
        assert str(trace.reduced_value) == "10.0"
        assert str(trace.communication_estimate) == "64 bytes"
        assert trace.exact_bytes_per_rank == (Bytes(32), Bytes(32))


@pytest.mark.parametrize(
    ("world", "n_bytes", "sent"),
    [
        (1, 64, [0]),
        (2, 64, [64, 64]),
        (4, 64, [96, 96, 96, 96]),
        (3, 64, [85, 86, 85]),  # shards of 22, 21, 21 bytes: 128 less own and right neighbour's
        (4, 1, [1, 2, 2, 1]),  # shards of 1, 0, 0, 0 bytes
    ],
)
def test_exact_all_reduce_bytes_by_hand(world, n_bytes, sent):
    plan = plan_of([1.0] * world, world)
    trace = CollectiveTrace.all_reduce(plan, CommunicationBytes(n_bytes))
    assert [int(b) for b in trace.exact_bytes_per_rank] == sent


def run_ring(kind: CollectiveKind, sizes: list[int]) -> list[int]:
    """Play the ring step by step on labelled shards and count what each rank puts on the wire."""
    world = len(sizes)
    sent = [0] * world
    held = [[{r} for _ in range(world)] for r in range(world)]
    phases = []
    if kind is not CollectiveKind.ALL_GATHER:
        phases.append(-1)
    if kind is not CollectiveKind.REDUCE_SCATTER:
        phases.append(0)
    for offset in phases:
        for step in range(world - 1):
            moves = []
            for r in range(world):
                shard = (r + offset - step) % world
                sent[r] += sizes[shard]
                moves.append(((r + 1) % world, shard, set(held[r][shard])))
            for to, shard, who in moves:
                held[to][shard] |= who
    if kind is not CollectiveKind.ALL_GATHER:
        assert all(held[r][r] == set(range(world)) for r in range(world))
    if kind is not CollectiveKind.REDUCE_SCATTER:
        assert all(s in held[r][s] for r in range(world) for s in range(world))
    return sent


@given(st.sampled_from(RING), st.lists(st.integers(0, 100), min_size=1, max_size=7))
def test_exact_bytes_equal_those_of_a_ring_played_step_by_step(kind, sizes):
    assert [int(b) for b in exact_ring_bytes(kind, sizes)] == run_ring(kind, sizes)


@given(st.integers(1, 9), st.integers(1, 10**6))
def test_equal_shards_give_the_formula_and_the_estimate_is_its_limit(world, shard):
    whole = world * shard
    plan = plan_of([1.0] * world, world)
    trace = CollectiveTrace.all_reduce(plan, CommunicationBytes(whole))
    exact = {int(b) for b in trace.exact_bytes_per_rank}
    assert exact == {2 * (world - 1) * whole // world}
    assert int(trace.communication_estimate) - exact.pop() == 2 * shard


@given(st.integers(1, 9), st.integers(1, 10**9))
def test_an_all_reduce_costs_a_reduce_scatter_and_an_all_gather(world, n_bytes):
    plan = plan_of([1.0] * world * world, world)
    both, scatter, gather = (
        CollectiveTrace(kind, plan, CommunicationBytes(n_bytes)) for kind in RING
    )
    assert both.communication_estimate == (
        scatter.communication_estimate + gather.communication_estimate
    )
    halves = zip(scatter.exact_bytes_per_rank, gather.exact_bytes_per_rank, strict=True)
    assert both.exact_bytes_per_rank == tuple(a + b for a, b in halves)
    assert sum(map(int, both.exact_bytes_per_rank)) == 2 * (world - 1) * n_bytes


@given(
    st.integers(1, 5).flatmap(
        lambda n: st.tuples(
            st.just(n),
            st.integers(1, 3).flatmap(
                lambda k: st.lists(
                    st.integers(-1000, 1000).map(float), min_size=k * n * n, max_size=k * n * n
                )
            ),
        )
    )
)
def test_outputs_equal_numpy(case):
    world, values = case
    plan = plan_of(values, world)
    shards = np.array(values).reshape(world, -1)
    total = shards.sum()
    assert numbers(CollectiveTrace.all_reduce(plan, B64).output) == [[total]] * world
    assert numbers(CollectiveTrace.all_gather(plan, B64).output) == [values] * world
    parts = np.split(shards.sum(axis=0), world)
    assert numbers(CollectiveTrace.reduce_scatter(plan, B64).output) == [list(p) for p in parts]


def test_what_a_trace_refuses():
    plan = plan_of([1, 2], 2)
    with pytest.raises(UnevenSplit, match="tensor length=1 cannot"):
        CollectiveTrace.reduce_scatter(plan, B64)
    for kind in set(CollectiveKind) - set(RING):
        with pytest.raises(CollectiveMismatch, match=f"no ring form of kind {kind}"):
            CollectiveTrace(kind, plan, B64)
    with pytest.raises(Overflow, match="communication bytes"):
        CollectiveTrace.all_reduce(plan, CommunicationBytes(2**62))
    with pytest.raises(NonFiniteValue, match="got inf"):
        CollectiveTrace.all_reduce(plan_of([1.7e308, 1.7e308], 2), B64)
    with pytest.raises(CountOutOfRange, match="not Bytes"):
        CollectiveTrace.all_reduce(plan, Bytes(64))  # type: ignore[arg-type]
    with pytest.raises(EmptyInput, match="no shards"):
        exact_ring_bytes(CollectiveKind.ALL_REDUCE, [])
    with pytest.raises(CountOutOfRange, match="got -1"):
        exact_ring_bytes(CollectiveKind.ALL_REDUCE, [1, -1])


def test_a_reduce_scatter_of_unequal_shards_is_refused():
    shards = tuple(
        RankShard(RankId(RankIndex(r), WorldSize(2)), ShardStart(start), TensorLine.from_values(v))
        for r, start, v in [(0, 0, [1, 2]), (1, 2, [3, 4, 5, 6])]
    )
    plan = ShardPlan(ParallelStrategy.DATA_PARALLEL, shards)
    assert str(CollectiveTrace.all_reduce(plan, B64).reduced_value) == "21.0"
    with pytest.raises(CollectiveMismatch, match=r"one length, got \[2, 4\]"):
        CollectiveTrace.reduce_scatter(plan, B64)


def test_names():
    assert {str(k) for k in CollectiveKind} == {
        *("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "broadcast"),
        *("reduce", "gather", "scatter", "barrier", "point-to-point"),
    }
    assert [str(v) for v in ParallelTraceVisibility] == ["public", "research-restricted", "private"]
