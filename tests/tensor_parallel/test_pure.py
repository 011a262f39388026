"""Shards of parameters, random parts, and the founding surface."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpipar import nn
from mpipar.errors import CountOutOfRange, LayoutError, UnevenSplit
from mpipar.tensor_parallel import (
    LayerParallelPlan,
    ShardDim,
    ShardedParameter,
    TensorParallelConfig,
    TensorShard,
    check_heads,
    draw_shard,
    dropout_slope_shard,
)
from mpipar.units import ParallelStrategy


@given(st.integers(1, 5), st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(0, 1))
def test_cut_and_join(n, sizes, dim):
    segments = tuple(n * k for k in sizes)
    shape = (sum(segments), 3) if dim == 0 else (3, sum(segments))
    shard = ShardedParameter(shape, n, dim, segments)
    whole = np.arange(np.prod(shape)).reshape(shape)
    parts = [shard.cut(whole, r) for r in range(n)]
    assert {p.shape for p in parts} == {shard.local_shape}
    assert sum(p.size for p in parts) == whole.size
    np.testing.assert_array_equal(shard.join(parts), whole)
    for rank in range(n):  # the r-th part of each segment
        cuts = [np.split(s, n, dim)[rank] for s in np.split(whole, np.cumsum(segments)[:-1], dim)]
        np.testing.assert_array_equal(parts[rank], np.concatenate(cuts, dim))


@pytest.mark.parametrize(("size", "n"), [(10, 4), (2, 4), (1, 3), (8, 4)])
def test_padded_parts_are_zero_beyond_the_end(size, n):
    shard = ShardedParameter((size, 2), n, 0, padded=True)
    whole = np.ones((size, 2))
    parts = [shard.cut(whole, r) for r in range(n)]
    assert {p.shape for p in parts} == {(-(-size // n), 2)}
    assert sum(p.sum() for p in parts) == whole.sum()
    np.testing.assert_array_equal(shard.join(parts), whole)


def test_refusals_name_what_would_do():
    with pytest.raises(UnevenSplit, match=r"over tp=4; tp=3 or 6 would do"):
        ShardedParameter((6, 2), 4, 0)
    with pytest.raises(UnevenSplit, match=r"n_heads=9 .* over tp=2; tp=1 or 3 would do"):
        check_heads(9, 3, 2)
    with pytest.raises(UnevenSplit, match=r"kv_heads=2 .* over tp=4; tp=2 would do"):
        check_heads(8, 2, 4)
    assert check_heads(9, 3, 3) == (3, 1)
    with pytest.raises(LayoutError, match="sum to 5"):
        ShardedParameter((6,), 1, 0, (2, 3))
    with pytest.raises(LayoutError, match="has shape"):
        ShardedParameter((6,), 2, 0).cut(np.zeros(5), 0)


def philox():
    return np.random.Generator(np.random.Philox(7))


@given(st.integers(1, 3), st.integers(1, 40), st.sampled_from([1, 2, 6, 300]), st.data())
def test_a_part_is_what_the_whole_would_have_there(batch, rows, width, data):
    shape = (batch, rows, width)
    part = []
    for n in shape:
        start = data.draw(st.integers(0, n))
        part.append(slice(start, data.draw(st.integers(start, n))))
    whole = philox().normal(0.0, 2.0, shape)
    generator = philox()
    drawn = draw_shard(lambda s: generator.normal(0.0, 2.0, s), shape, tuple(part), np.float64)
    np.testing.assert_array_equal(drawn, whole[tuple(part)])


@pytest.mark.parametrize(("shape", "n"), [((2, 12, 6), 3), ((2, 12, 6), 4), ((5000, 48), 2)])
def test_dropout_is_the_same_for_any_degree(shape, n):
    like = np.empty(shape, np.float32)
    whole = nn.dropout_slope(like, 0.3, philox())
    for dim in range(len(shape)):
        if shape[dim] % n:
            continue
        masks, after = [], set()
        for rank, piece in enumerate(np.split(like, n, dim)):
            size = shape[dim] // n
            part = [slice(None)] * len(shape)
            part[dim] = slice(rank * size, (rank + 1) * size)
            generator = philox()
            masks.append(dropout_slope_shard(piece, 0.3, generator, shape, tuple(part)))
            after.add(int(generator.integers(1 << 62)))
        np.testing.assert_array_equal(np.concatenate(masks, dim), whole)
        assert len(after) == 1  # the streams stay together
        assert not np.array_equal(masks[0], masks[1])
    with pytest.raises(LayoutError):
        dropout_slope_shard(
            like[:1], 0.3, philox(), shape, (slice(0, 2), *[slice(None)] * (len(shape) - 1))
        )


@pytest.mark.parametrize("world", range(1, 6))
@pytest.mark.parametrize("full", [0, 1, 7, 10, 4096])
@pytest.mark.parametrize("last_takes_rest", [False, True])
def test_founding_shards_tile(world, full, last_takes_rest):
    config = TensorParallelConfig(world)
    for dim in ShardDim:
        at = 0
        for rank in range(world):
            start, end = config.shard_range(rank, full, dim, last_takes_rest)
            shard = config.make_shard(rank, (full, full), dim, last_takes_rest)
            assert (start, end, end - start) == (shard.start, shard.end, shard.shard_size)
            assert start == at
            at = end
        assert at == full


def test_founding_remainders_and_refusals():
    def sizes(full, world, by_name):
        shards = [TensorShard(r, world, ShardDim.Row, (full, 1), by_name) for r in range(world)]
        return [s.shard_size for s in shards]

    assert sizes(10, 3, False) == [4, 3, 3]
    assert sizes(10, 3, True) == [3, 3, 4]
    assert sizes(2, 4, True) == [0, 0, 0, 2]
    assert sizes(7, 5, True) == [1, 1, 1, 1, 3]
    assert TensorParallelConfig(2).make_shard(1, (4, 6), ShardDim.Column).range == (3, 6)
    with pytest.raises(CountOutOfRange):
        TensorParallelConfig(0)
    with pytest.raises(CountOutOfRange):
        TensorShard(2, 2, ShardDim.Row, (4, 4))
    plan = LayerParallelPlan("mlp", ParallelStrategy.TENSOR_PARALLEL)
    assert (plan.group_id, plan.with_group(3).group_id, plan.name) == (0, 3, "mlp")
