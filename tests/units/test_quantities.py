"""Typed quantities: what is refused, how they compare, print and combine."""

from __future__ import annotations

import copy
import math
import operator
import pickle
import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mpipar.units as units
from mpipar.errors import (
    CountOutOfRange,
    EmptyInput,
    NonFiniteValue,
    OutOfRange,
    Overflow,
    ParallelismError,
    RankMismatch,
    UnevenSplit,
)

LARGEST = 9223372036854775807

FROM_ONE = [
    "WorldSize",
    "GlobalBatchSize",
    "LocalBatchSize",
    "ModelWidth",
    "ShardWidth",
    "LayerCount",
    "LayersPerRank",
    "MicroBatchCount",
    "TensorLength",
    "ShardLength",
    "PipelineStageCount",
    "PipelineScheduleLength",
    "CommunicationBytes",
    "CommunicationRounds",
]
FROM_ZERO = ["RankIndex", "ShardStart", "Bytes"]
MEASURES = ["TensorElement", "Seconds", "Flops", "BytesPerSecond", "FlopsPerSecond"]
COUNTS = FROM_ONE + FROM_ZERO


def kind_of(name: str):
    return getattr(units, name)


@pytest.mark.parametrize("name", FROM_ONE)
def test_zero_is_empty_input_where_at_least_one_is_needed(name):
    with pytest.raises(EmptyInput, match=r"got 0, outside the range of whole numbers from 1"):
        kind_of(name)(0)


@pytest.mark.parametrize("name", FROM_ZERO)
def test_zero_is_a_valid_index_offset_and_size(name):
    assert int(kind_of(name)(0)) == 0


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("value", [-1, -(2**70)])
def test_negative_counts_are_refused(name, value):
    with pytest.raises(CountOutOfRange, match=f"got {value}"):
        kind_of(name)(value)


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize(
    "value", [True, False, 2.0, np.float64(3), np.True_, "4", None, [1], np.array(3), 1 + 0j]
)
def test_what_is_no_whole_number_is_refused_with_its_type(name, value):
    with pytest.raises(CountOutOfRange, match=f"not {type(value).__name__}") as caught:
        kind_of(name)(value)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("name", COUNTS)
def test_counts_end_at_two_to_the_63(name):
    assert int(kind_of(name)(LARGEST)) == LARGEST
    with pytest.raises(Overflow, match="9223372036854775808 is above") as caught:
        kind_of(name)(LARGEST + 1)
    assert isinstance(caught.value, OverflowError)


@pytest.mark.parametrize("name", MEASURES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float32("inf")])
def test_measures_are_finite(name, value):
    with pytest.raises(NonFiniteValue, match="must be finite"):
        kind_of(name)(value)


@pytest.mark.parametrize("name", MEASURES)
@pytest.mark.parametrize("value", [True, np.True_, "1.0", None, 1j, np.array(1.0)])
def test_what_is_no_real_number_is_refused(name, value):
    with pytest.raises(OutOfRange, match=f"not {type(value).__name__}"):
        kind_of(name)(value)


def test_sign_and_size_of_measures():
    assert float(units.TensorElement(-2.5)) == -2.5
    assert float(units.Seconds(0)) == float(units.Flops(0)) == 0.0
    assert float(units.Seconds(Fraction(1, 4))) == 0.25
    for name in ("BytesPerSecond", "FlopsPerSecond"):
        with pytest.raises(EmptyInput, match="real numbers above 0"):
            kind_of(name)(0.0)
    for name in ("Seconds", "Flops", "BytesPerSecond", "FlopsPerSecond"):
        with pytest.raises(OutOfRange, match=r"got -0\.5"):
            kind_of(name)(-0.5)
    with pytest.raises(Overflow, match="double precision"):
        units.TensorElement(10**400)


def test_another_kind_must_be_converted_on_purpose():
    with pytest.raises(CountOutOfRange, match=r"world size .*not LocalBatchSize.*got 3"):
        units.WorldSize(units.LocalBatchSize(3))
    with pytest.raises(OutOfRange, match="not Flops"):
        units.Seconds(units.Flops(3.0))
    assert units.WorldSize(int(units.LocalBatchSize(3))) == units.WorldSize(3)
    assert units.WorldSize(units.WorldSize(3)) == units.WorldSize(3)
    assert int(units.Bytes(np.int64(7))) == 7


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (units.WorldSize(4), "4"),
        (units.GlobalBatchSize(128), "128"),
        (units.RankIndex(0), "0"),
        (units.RankId(units.RankIndex(3), units.WorldSize(4)), "rank 3"),
        (units.TensorElement(10), "10.0"),
        (units.PipelineScheduleLength(6), "6 schedule slots"),
        (units.CommunicationBytes(128), "128 bytes"),
        (units.Bytes(0), "0 bytes"),
        (units.Seconds(0.25), "0.25 s"),
        (units.BytesPerSecond(1.5e9), "1.5e+09 bytes/s"),
        (units.Flops(2), "2 FLOP"),
        (units.ParallelStrategy.DATA_PARALLEL, "data-parallel"),
        (units.ParallelStrategy.TENSOR_PARALLEL, "tensor-parallel"),
        (units.ParallelStrategy.PIPELINE_PARALLEL, "pipeline-parallel"),
    ],
)
def test_how_each_kind_prints(value, text):
    assert str(value) == text
    assert f"{value:>20}" == " " * (20 - len(text)) + text


@pytest.mark.parametrize("name", COUNTS + MEASURES)
def test_repr_evaluates_to_an_equal_value(name):
    value = kind_of(name)(3)
    assert eval(repr(value), vars(units)) == value
    assert repr(value).startswith(f"{name}(3")


def test_repr_of_a_rank_and_a_plan_evaluates():
    plan = units.shard_tensor_line(
        units.TensorLine.from_values([1, 2.5]),
        units.WorldSize(2),
        units.ParallelStrategy.DATA_PARALLEL,
    )
    assert eval(repr(plan.shards), vars(units)) == plan.shards


@given(st.integers(1, LARGEST), st.integers(1, LARGEST))
def test_order_and_equality_follow_the_numbers(a, b):
    x, y = units.WorldSize(a), units.WorldSize(b)
    for compare in (operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne):
        assert compare(x, y) is compare(a, b)
    assert hash(x) == hash(units.WorldSize(a))
    assert len({x, y}) == len({a, b})


@pytest.mark.parametrize("other", [units.LocalBatchSize(2), 2, 2.0, "2"])
@pytest.mark.parametrize("compare", [operator.lt, operator.le, operator.gt, operator.ge])
def test_kinds_do_not_order_across_types(compare, other):
    with pytest.raises(TypeError):
        compare(units.WorldSize(2), other)


def test_kinds_are_never_equal_across_types():
    twos = {kind_of(name)(2) for name in COUNTS + MEASURES}
    assert len(twos) == len(COUNTS + MEASURES)
    assert units.WorldSize(2) != 2
    assert units.Bytes(2) != units.CommunicationBytes(2)


def test_counts_serve_as_python_indices():
    assert list(range(units.WorldSize(3))) == [0, 1, 2]
    assert ["a", "b"][units.RankIndex(1)] == "b"
    assert operator.index(units.RankId(units.RankIndex(2), units.WorldSize(3))) == 2
    assert float(units.LayerCount(3)) == 3.0
    with pytest.raises(TypeError):
        int(units.Seconds(2.0))


def test_zero_is_false():
    assert not units.Bytes(0)
    assert units.Bytes(1)
    assert not units.Seconds(0)


@pytest.mark.parametrize("name", COUNTS + MEASURES)
def test_values_are_immutable_and_copy(name):
    value = kind_of(name)(3)
    for attribute in ("_number", "anything"):
        with pytest.raises(AttributeError, match="immutable"):
            setattr(value, attribute, 4)
    with pytest.raises(AttributeError, match="immutable"):
        del value._number
    assert copy.deepcopy(value) == pickle.loads(pickle.dumps(value)) == value


def test_the_four_exact_divisions():
    four = units.WorldSize(4)
    assert units.GlobalBatchSize(128) / four == units.LocalBatchSize(32)
    assert units.ModelWidth(1024) / four == units.ShardWidth(256)
    assert units.LayerCount(12) / units.WorldSize(3) == units.LayersPerRank(4)
    assert units.TensorLength(8) / four == units.ShardLength(2)


@pytest.mark.parametrize("name", ["GlobalBatchSize", "ModelWidth", "LayerCount", "TensorLength"])
def test_an_uneven_division_is_refused_and_names_what_would_do(name):
    whole = kind_of(name)(10)
    with pytest.raises(UnevenSplit) as caught:
        whole / units.WorldSize(4)
    message = str(caught.value)
    assert f"{whole.role}=10 cannot be split exactly over world size=4" in message
    assert "world size=2 or 5 would do" in message
    assert f"{whole.role}=8 or 12" in message


@given(st.integers(1, 10**6), st.integers(1, 10**4))
def test_exact_division_is_undone_by_multiplication(total, world):
    try:
        share = units.GlobalBatchSize(total) / units.WorldSize(world)
    except UnevenSplit:
        assert total % world != 0
    else:
        assert int(share) * world == total


def test_pipeline_schedule_length():
    slots = units.PipelineStageCount(3) + units.MicroBatchCount(4)
    assert slots == units.PipelineScheduleLength(6)
    assert units.PipelineStageCount(1) + units.MicroBatchCount(1) == units.PipelineScheduleLength(1)
    with pytest.raises(Overflow):
        units.PipelineStageCount(2) + units.MicroBatchCount(LARGEST)


def test_communication_arithmetic_is_checked():
    sixty_four = units.CommunicationBytes(64)
    assert sixty_four + sixty_four == units.CommunicationBytes(128)
    assert sixty_four * units.CommunicationRounds(2) == units.CommunicationBytes(128)
    with pytest.raises(Overflow, match="communication bytes"):
        units.CommunicationBytes(LARGEST) + units.CommunicationBytes(1)
    with pytest.raises(Overflow, match="communication bytes"):
        units.CommunicationBytes(2**62) * units.CommunicationRounds(2)
    assert sum([units.Bytes(3), units.Bytes(4)], units.Bytes(0)) == units.Bytes(7)


def test_rates():
    assert units.Bytes(3_000_000) / units.BytesPerSecond(1e6) == units.Seconds(3.0)
    assert units.CommunicationBytes(10) / units.Seconds(4) == units.BytesPerSecond(2.5)
    assert units.Flops(6e15) / units.FlopsPerSecond(2e15) == units.Seconds(3.0)
    assert units.Flops(6e15) / units.Seconds(3) == units.FlopsPerSecond(2e15)
    assert units.Seconds(1) + units.Seconds(0.5) == units.Seconds(1.5)
    assert units.Bytes(0) / units.BytesPerSecond(5) == units.Seconds(0)
    with pytest.raises(OutOfRange, match="time that divides bytes"):
        units.Bytes(3) / units.Seconds(0)
    with pytest.raises(EmptyInput, match="bytes per second"):
        units.Bytes(0) / units.Seconds(1)
    with pytest.raises(NonFiniteValue, match="seconds"):
        units.Bytes(3) / units.BytesPerSecond(5e-324)
    with pytest.raises(NonFiniteValue, match="flops"):
        units.Flops(1.7e308) + units.Flops(1.7e308)


@pytest.mark.parametrize(
    ("operation", "left", "right"),
    [
        (operator.truediv, units.GlobalBatchSize(4), units.LocalBatchSize(2)),
        (operator.truediv, units.GlobalBatchSize(4), 2),
        (operator.truediv, units.WorldSize(4), units.WorldSize(2)),
        (operator.truediv, units.Bytes(4), units.FlopsPerSecond(2)),
        (operator.truediv, units.Flops(4), units.BytesPerSecond(2)),
        (operator.truediv, 8, units.WorldSize(2)),
        (operator.add, units.PipelineStageCount(1), units.PipelineStageCount(1)),
        (operator.add, units.MicroBatchCount(1), units.PipelineStageCount(1)),
        (operator.add, units.Bytes(4), units.CommunicationBytes(4)),
        (operator.add, units.Bytes(4), 4),
        (operator.add, units.WorldSize(4), units.WorldSize(4)),
        (operator.mul, units.CommunicationBytes(4), 2),
        (operator.mul, units.CommunicationBytes(4), units.CommunicationBytes(2)),
        (operator.mul, units.CommunicationRounds(2), units.CommunicationBytes(4)),
        (operator.sub, units.Bytes(4), units.Bytes(1)),
    ],
)
def test_what_is_not_in_the_table_is_a_type_error(operation, left, right):
    with pytest.raises(TypeError):
        operation(left, right)


def test_a_rank_id_needs_a_rank_that_the_world_has():
    two = units.WorldSize(2)
    assert int(units.RankId(units.RankIndex(1), two)) == 1
    with pytest.raises(CountOutOfRange, match=r"rank index must be in range 0\.\.2, got 2"):
        units.RankId(units.RankIndex(2), two)
    with pytest.raises(CountOutOfRange, match="not WorldSize"):
        units.RankId(two, two)  # type: ignore[arg-type]
    assert units.RankId(1, 2) == units.RankId(units.RankIndex(1), two)  # type: ignore[arg-type]


def test_ranks_order_within_one_world_only():
    a, b = (units.RankId(units.RankIndex(i), units.WorldSize(3)) for i in (0, 2))
    assert a < b
    assert b > a
    assert a <= a
    assert b >= a
    assert max(a, b) is b
    other = units.RankId(units.RankIndex(0), units.WorldSize(4))
    assert a != other
    assert len({a, other}) == 2
    with pytest.raises(RankMismatch, match="worlds 3 and 4"):
        _ = a < other
    with pytest.raises(TypeError):
        _ = a < 1


@given(st.sampled_from(COUNTS + MEASURES), st.one_of(st.integers(), st.floats(), st.booleans()))
def test_construction_gives_the_number_or_an_error_of_the_tree(name, value):
    kind = kind_of(name)
    try:
        made = kind(value)
    except ParallelismError:
        return
    assert not isinstance(value, bool)
    assert (int(made) if name in COUNTS else float(made)) == pytest.approx(value, rel=1e-15)


def test_importing_the_units_needs_no_numpy():
    code = "import sys, mpipar.units; print('numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
