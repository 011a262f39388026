"""Laws of the pure half: buckets tile the parameters, last one first."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpipar.data_parallel import plan_buckets
from mpipar.errors import CountOutOfRange

SIZES = {"float16": 2, "float32": 4, "float64": 8}
SHAPES = st.lists(st.integers(0, 7), max_size=3).map(tuple)
PARAMETERS = st.lists(st.tuples(SHAPES, st.sampled_from(sorted(SIZES))), max_size=12).map(
    lambda rows: [(f"p{i}", shape, dtype, SIZES[dtype]) for i, (shape, dtype) in enumerate(rows)]
)


@given(PARAMETERS, st.integers(1, 600))
def test_buckets_tile_the_parameters_in_backward_order(parameters, bucket_bytes):
    buckets = plan_buckets(parameters, bucket_bytes)
    assert [n for b in buckets for n in b.names] == [p[0] for p in reversed(parameters)]
    by_name = {name: (math.prod(shape), dtype) for name, shape, dtype, _ in parameters}
    for bucket in buckets:
        assert {by_name[n][1] for n in bucket.names} == {bucket.dtype}
        sizes = [by_name[n][0] for n in bucket.names]
        stops = [o + s for o, s in zip(bucket.offsets, sizes, strict=True)]
        assert list(bucket.offsets) == [0, *stops[:-1]]  # neither gap nor overlap
        assert bucket.size == stops[-1]


@given(PARAMETERS, st.integers(1, 600))
def test_a_bucket_ends_with_the_parameter_that_fills_it(parameters, bucket_bytes):
    buckets = plan_buckets(parameters, bucket_bytes)
    for bucket, after in zip(buckets, [*buckets[1:], None], strict=False):
        size = SIZES[bucket.dtype]
        assert bucket.offsets[-1] * size < bucket_bytes
        is_full = bucket.size * size >= bucket_bytes
        assert is_full or after is None or after.dtype != bucket.dtype


def test_an_example_by_hand():
    rows = [("a", (4,), "float32", 4), ("b", (2, 3), "float32", 4), ("c", (5,), "float32", 4)]
    first, second = plan_buckets(rows, 40)
    assert (first.names, first.offsets, first.size) == (("c", "b"), (0, 5), 11)
    assert (second.names, second.offsets, second.size) == (("a",), (0,), 4)


def test_a_bucket_of_no_bytes_is_refused():
    with pytest.raises(CountOutOfRange, match="bucket_bytes must be in range 1 or more, got 0"):
        plan_buckets([], 0)
