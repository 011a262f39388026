"""Lines, shards and plans; the three layouts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpipar.errors import (
    CountOutOfRange,
    EmptyInput,
    NonFiniteValue,
    RankMismatch,
    UnevenSplit,
)
from mpipar.units import (
    DataParallelLayout,
    GlobalBatchSize,
    LayerCount,
    LayersPerRank,
    LocalBatchSize,
    MicroBatchCount,
    ModelWidth,
    ParallelStrategy,
    PipelineLayout,
    PipelineScheduleLength,
    PipelineStageCount,
    RankId,
    RankIndex,
    RankShard,
    ShardLength,
    ShardPlan,
    ShardStart,
    ShardWidth,
    TensorElement,
    TensorLength,
    TensorLine,
    TensorParallelLayout,
    WorldSize,
    shard_tensor_line,
)

DATA = ParallelStrategy.DATA_PARALLEL


def rank(index: int, world: int) -> RankId:
    return RankId(RankIndex(index), WorldSize(world))


def plan_of(values: list[float], world: int) -> ShardPlan:
    return shard_tensor_line(TensorLine.from_values(values), WorldSize(world), DATA)


def test_a_line_holds_at_least_one_finite_value():
    line = TensorLine.from_values([1, 2.5])
    assert line.length == TensorLength(2)
    assert line.values == (TensorElement(1), TensorElement(2.5))
    assert str(line.total) == "3.5"
    with pytest.raises(EmptyInput, match="at least 1"):
        TensorLine.from_values([])
    with pytest.raises(NonFiniteValue, match="got nan"):
        TensorLine.from_values([1, float("nan")])
    with pytest.raises(NonFiniteValue, match="got inf"):
        _ = TensorLine.from_values([1.7e308, 1.7e308]).total


def test_a_segment_stays_inside_its_line():
    line = TensorLine.from_values([1, 2, 3])
    assert line.segment(ShardStart(1), ShardLength(2)) == TensorLine.from_values([2, 3])
    with pytest.raises(CountOutOfRange, match=r"range 1\.\.3, got 4"):
        line.segment(ShardStart(2), ShardLength(2))


def test_shard_sums_of_the_founding_example():
    plan = plan_of([1, 2, 3, 4], 2)
    assert [float(s.values.total) for s in plan.shards] == [3.0, 7.0]
    assert [str(s.rank) for s in plan.shards] == ["rank 0", "rank 1"]
    assert [int(s.start) for s in plan.shards] == [0, 2]
    assert [s.length for s in plan.shards] == [ShardLength(2)] * 2
    assert plan.strategy is DATA
    assert plan.world_size == WorldSize(2)


def test_first_rung_four_losses_over_two_ranks():
    plan = plan_of([0.9, 0.7, 0.5, 0.3], 2)
    lines = [f"{s.rank} owns {s.length} values from offset {s.start}" for s in plan.shards]
    assert lines == ["rank 0 owns 2 values from offset 0", "rank 1 owns 2 values from offset 2"]


def test_an_uneven_line_is_refused():
    with pytest.raises(UnevenSplit, match="tensor length=3 cannot be split exactly"):
        plan_of([1, 2, 3], 2)


@given(
    st.integers(1, 6).flatmap(
        lambda world: st.tuples(
            st.just(world),
            st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=8).map(lambda v: v * world),
        )
    )
)
def test_a_plan_tiles_its_line(case):
    world, values = case
    plan = plan_of(values, world)
    assert [v for s in plan.shards for v in map(float, s.values.values)] == values
    assert [int(s.rank) for s in plan.shards] == list(range(world))
    assert [int(s.start) for s in plan.shards] == [i * len(values) // world for i in range(world)]
    assert [float(v) for v in plan.line.values] == values


@pytest.mark.parametrize(
    "shards",
    [
        [(1, 2, 0, [1]), (0, 2, 1, [2])],  # out of rank order
        [(0, 2, 0, [1]), (1, 2, 2, [2])],  # a gap
        [(0, 2, 0, [1, 2]), (1, 2, 1, [2])],  # an overlap
        [(0, 3, 0, [1]), (1, 3, 1, [2])],  # a rank is missing
        [(0, 2, 1, [1]), (1, 2, 2, [2])],  # does not start at 0
        [(0, 2, 0, [1]), (0, 2, 1, [2])],  # one owner twice
    ],
)
def test_a_plan_that_does_not_tile_is_refused(shards):
    made = [
        RankShard(rank(i, n), ShardStart(start), TensorLine.from_values(values))
        for i, n, start, values in shards
    ]
    with pytest.raises(RankMismatch, match="must be owned by rank"):
        ShardPlan(DATA, tuple(made))


def test_a_plan_has_shards_and_may_be_uneven_when_built_by_hand():
    with pytest.raises(EmptyInput, match="no shards"):
        ShardPlan(DATA, ())
    two = RankShard(rank(0, 2), ShardStart(0), TensorLine.from_values([1, 2]))
    one = RankShard(rank(1, 2), ShardStart(2), TensorLine.from_values([3]))
    assert ShardPlan(DATA, (two, one)).line == TensorLine.from_values([1, 2, 3])


def test_every_strategy_splits_another_axis():
    assert [s.splits for s in ParallelStrategy] == ["batch", "width", "layers"]
    layouts = (DataParallelLayout, TensorParallelLayout, PipelineLayout)
    assert [layout.strategy for layout in layouts] == list(ParallelStrategy)


def test_data_parallel_layout():
    layout = DataParallelLayout(GlobalBatchSize(128), WorldSize(4))
    assert layout.local_batch == LocalBatchSize(32)
    assert layout.owned_by(rank(3, 4)) == range(96, 128)
    with pytest.raises(UnevenSplit, match="global batch size=10 cannot"):
        DataParallelLayout(GlobalBatchSize(10), WorldSize(4))


def test_tensor_parallel_layout():
    layout = TensorParallelLayout(ModelWidth(1024), WorldSize(4))
    assert layout.shard_width == ShardWidth(256)
    assert layout.owned_by(rank(1, 4)) == range(256, 512)
    with pytest.raises(UnevenSplit, match="model width=1023 cannot"):
        TensorParallelLayout(ModelWidth(1023), WorldSize(4))


def test_pipeline_layout():
    layout = PipelineLayout(LayerCount(12), WorldSize(3))
    assert layout.stage_count == PipelineStageCount(3)
    assert layout.layers_per_rank == LayersPerRank(4)
    assert layout.owned_by(rank(2, 3)) == range(8, 12)
    slots = layout.stage_count + MicroBatchCount(4)
    assert slots == PipelineScheduleLength(6)
    assert str(slots) == "6 schedule slots"
    with pytest.raises(UnevenSplit, match="layer count=13 cannot"):
        PipelineLayout(LayerCount(13), WorldSize(3))


def test_a_layout_refuses_quantities_in_each_others_place_and_ranks_of_other_worlds():
    with pytest.raises(CountOutOfRange, match=r"global batch size .*not WorldSize"):
        DataParallelLayout(WorldSize(4), GlobalBatchSize(128))  # type: ignore[arg-type]
    with pytest.raises(RankMismatch, match="world of 2, the layout of one of 4"):
        DataParallelLayout(GlobalBatchSize(8), WorldSize(4)).owned_by(rank(1, 2))


@given(st.integers(1, 50), st.integers(1, 12))
def test_owned_parts_tile_the_global_object(share, world):
    layout = TensorParallelLayout(ModelWidth(share * world), WorldSize(world))
    owned = [i for r in range(world) for i in layout.owned_by(rank(r, world))]
    assert owned == list(range(share * world))
