"""Collectives over lists of shards: the founding library's values, laws against NumPy, refusals."""

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpipar.comm import ReduceOp
from mpipar.device_group import DeviceGroup, Graph, HostDevice, LazyArray, trace
from mpipar.errors import (
    CountOutOfRange,
    EmptyInput,
    LayoutError,
    ParallelismError,
    UnsupportedArray,
)


def group(n: int) -> DeviceGroup:
    return DeviceGroup([HostDevice(f"cpu{i}") for i in range(n)])


def put(to: DeviceGroup, *values: object) -> list[LazyArray]:
    return [to.put(np.asarray(v, np.float64), i) for i, v in enumerate(values)]


def test_known_values_of_the_founding_library():
    two = group(2)
    assert two.reduce(put(two, [1, 2], [10, 20])).numpy().tolist() == [11, 22]
    assert two.reduce(put(two, [10, 2], [1, 50]), ReduceOp.MAX).numpy().tolist() == [10, 50]
    assert two.reduce(put(two, [3, 4])).numpy().tolist() == [3, 4]
    assert two.gather(put(two, [1, 2], [3, 4])).numpy().tolist() == [1, 2, 3, 4]
    cpu = HostDevice("cpu")
    thrice = DeviceGroup([cpu, cpu, cpu])
    shards = put(thrice, [1, 1], [2, 2], [3, 3])
    assert thrice.reduce(shards).numpy().tolist() == [6, 6]
    assert trace(*thrice.all_reduce(shards)).link_bytes.total() == 0
    assert (two.size, two.leader) == (2, two.devices[0])


@pytest.mark.parametrize(
    ("make", "error", "why"),
    [
        (lambda a, b: DeviceGroup([]), EmptyInput, "no devices"),
        (lambda a, b: a.reduce([]), EmptyInput, "no shards"),
        (lambda a, b: a.all_reduce(put(group(3), 1, 2, 3)), LayoutError, "3 shards for 2 devices"),
        (
            lambda a, b: a.all_reduce([a.put([1.0]), DeviceGroup(a.devices).put([1.0], 1)]),
            LayoutError,
            "graph=other.graph",
        ),
        (lambda a, b: a.all_gather([a.put([1.0], 1)]), LayoutError, r"shard 0 is on cpu1.*\.to"),
        (lambda a, b: a.all_reduce(put(a, [1, 2], [1])), LayoutError, "must be alike"),
        (lambda a, b: a.all_reduce([np.ones(2)]), UnsupportedArray, "make it with put"),
        (lambda a, b: a.put([1.0], 2), CountOutOfRange, r"0\.\.1"),
        (lambda a, b: a.broadcast(a.put([1.0], 1)), LayoutError, "root 0 is on cpu1"),
        (lambda a, b: a.broadcast(a.put([1.0]), -1), CountOutOfRange, "-1"),
        (lambda a, b: a.scatter(a.put([1.0]), dim=1), CountOutOfRange, "dim of shape"),
        (lambda a, b: a.reduce(put(a, 1, 2), ReduceOp.MAX_LOCATION), UnsupportedArray, "location"),
        (lambda a, b: a.reduce([a.put([True]), a.put([True], 1)]), UnsupportedArray, "bool"),
        (lambda a, b: a.put(["a"]), UnsupportedArray, "numbers are needed"),
        (lambda a, b: DeviceGroup([HostDevice("x"), HostDevice("x")]), LayoutError, "name 'x'"),
    ],
)
def test_mistakes_are_refused(make, error, why):
    with pytest.raises(error, match=why):
        make(group(2), group(2))
    assert issubclass(error, ParallelismError)


UFUNCS = {
    ReduceOp.SUM: np.add,
    ReduceOp.PRODUCT: np.multiply,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
}


@settings(max_examples=60)
@given(
    n=st.integers(1, 5),
    shape=st.lists(st.integers(0, 4), min_size=1, max_size=3),
    op=st.sampled_from(sorted(UFUNCS)),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_collectives_equal_numpy_bitwise(n, shape, op, seed, data):
    random = np.random.default_rng(seed)
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    values = [random.standard_normal(shape) for _ in range(n)]
    to = group(n)
    shards = put(to, *values)
    whole = functools.reduce(UFUNCS[op], values)
    blocks = [np.array_split(v, n, axis=dim) for v in values]
    expected = {
        "all_reduce": [whole] * n,
        "reduce_scatter": np.array_split(whole, n, axis=dim),
        "all_gather": [np.concatenate(values, axis=dim)] * n,
        "all_to_all": [np.concatenate([b[i] for b in blocks], axis=dim) for i in range(n)],
        "scatter": blocks[n - 1],
        "broadcast": [values[n - 1]] * n,
    }
    made = {
        "all_reduce": to.all_reduce(shards, op),
        "reduce_scatter": to.reduce_scatter(shards, op, dim),
        "all_gather": to.all_gather(shards, dim),
        "all_to_all": to.all_to_all(shards, dim),
        "scatter": to.scatter(shards[-1], n - 1, dim),
        "broadcast": to.broadcast(shards[-1], n - 1),
    }
    for name, arrays in made.items():
        for i, (got, want) in enumerate(zip(to.realize(arrays), expected[name], strict=True)):
            assert arrays[i].device is to.devices[i]
            np.testing.assert_array_equal(got, want, err_msg=name, strict=True)


def test_small_floats_are_reduced_wide_and_a_mean_is_taken_before_the_cast():
    four = group(4)
    shards = [four.put(np.array([30000.0], np.float16), i) for i in range(4)]
    mean = four.all_reduce(shards, ReduceOp.MEAN)
    assert [m.numpy().tolist() for m in mean] == [[30000.0]] * 4
    assert mean[0].dtype == np.float16
    tens = [four.put(np.array([2048.0 if i == 0 else 1.0], np.float16), i) for i in range(4)]
    assert four.reduce(tens).numpy().tolist() == [2052.0]  # 2048 + 1 is 2048 in float16
    ints = [four.put(np.array([i]), i) for i in range(4)]
    assert four.reduce(ints, ReduceOp.MEAN).numpy().tolist() == [1.5]


@pytest.mark.parametrize(("n", "size"), [(1, 5), (2, 8), (3, 7), (4, 12), (5, 3)])
def test_bytes_on_every_link(n, size):
    """Slice j goes from i to j to be reduced, then slice i from i to j."""
    to = group(n)
    found = trace(*to.all_reduce(put(to, *np.ones((n, size)))))
    slices = [len(part) * 8 for part in np.array_split(np.arange(size), n)]
    want = {(i, j): slices[i] + slices[j] for i in range(n) for j in range(n) if i != j}
    want = {(f"cpu{i}", f"cpu{j}"): b for (i, j), b in want.items() if b}
    assert dict(found.link_bytes) == want
    assert int(found.moved) == 2 * (n - 1) * size * 8
    small = Graph().placeholder((size,), np.float64, to.devices[0])
    assert trace(*to.broadcast(small)).link_bytes.total() == (n - 1) * size * 8
