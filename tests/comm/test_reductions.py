"""Reductions: every operation and type, NaN, locations, small floats, and rank order on request."""

import functools
from collections.abc import Callable
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mpipar.comm import Communicator, ReduceOp
from mpipar.errors import UnsupportedArray
from tests.comm.cases import (
    COMPLEX,
    FLOATS,
    INTEGERS,
    MODES,
    NUMBERS,
    SMALL_FLOATS,
    Case,
    in_mode,
    reduced,
    run_case,
    same,
    uniform_case,
    values_of,
)

pytestmark = pytest.mark.ranks(1, 2, 3, 4)
SUMS = (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MEAN)
ORDERS = (ReduceOp.MIN, ReduceOp.MAX)


@pytest.mark.parametrize("verb", ["all_reduce", "reduce", "reduce_scatter"])
def test_every_operation_on_every_type(comm: Communicator, verb: str) -> None:
    for i, dtype in enumerate(NUMBERS):
        for op in SUMS if dtype in COMPLEX else (*SUMS, *ORDERS):
            case = uniform_case(verb, comm.size, (7,), dtype, i)
            run_case(comm, Case(**{**vars(case), "op": op, "deterministic": i % 2 == 0}))


def test_integers_wrap_as_numpys_do(comm: Communicator) -> None:
    for dtype in INTEGERS:
        top = np.full(3, np.iinfo(dtype).max, dtype)
        assert same(comm.all_reduce(top), reduced([top] * comm.size, ReduceOp.SUM))


@pytest.mark.parametrize("op", ORDERS)
def test_nan_wins_on_whichever_rank_it_is(comm: Communicator, op: ReduceOp) -> None:
    pick = np.minimum if op is ReduceOp.MIN else np.maximum
    for dtype in FLOATS:
        rows = []
        for rank in range(comm.size):
            row = np.arange(1.0, 5.0) + rank
            row[rank % 4] = np.nan
            rows.append(row.astype(dtype))
        with np.errstate(invalid="ignore"):
            wanted = functools.reduce(pick, rows)
        assert np.isnan(wanted.astype(float)).sum() == min(4, comm.size)
        for n in (1, 300):
            got = comm.all_reduce(np.tile(rows[comm.rank], n), op)
            assert np.array_equal(
                got.astype(float), np.tile(wanted, n).astype(float), equal_nan=True
            )


@pytest.mark.parametrize("op", [ReduceOp.MIN_LOCATION, ReduceOp.MAX_LOCATION])
def test_locations_name_the_lowest_rank(comm: Communicator, op: ReduceOp) -> None:
    find = np.argmin if op is ReduceOp.MIN_LOCATION else np.argmax
    for dtype in (*INTEGERS, np.dtype("f4"), np.dtype("f8")):
        for shape in ((), (4,), (3, 500)):
            rows = np.stack([values_of(3, r, shape, dtype) for r in range(comm.size)])
            value, rank = comm.all_reduce(rows[comm.rank], op)
            where = find(rows, axis=0)
            assert rank.dtype == np.int64
            assert np.array_equal(rank, where)
            assert np.array_equal(value, np.take_along_axis(rows, where[None], 0)[0])
            at_root = comm.reduce(rows[comm.rank], op, root=comm.size - 1)
            assert (at_root is None) == (comm.rank != comm.size - 1)


def test_bool_has_any_and_all(comm: Communicator) -> None:
    x = np.array([True, False, comm.rank == 0])
    assert comm.all_reduce(x, ReduceOp.MAX).tolist() == [True, False, True]
    assert comm.all_reduce(x, ReduceOp.MIN).tolist() == [True, False, comm.size == 1]


def test_four_values_of_30000_in_float16_have_a_mean(comm: Communicator) -> None:
    x = np.full(5, 30000, np.float16)
    assert comm.all_reduce(x, ReduceOp.MEAN).tolist() == [30000.0] * 5
    with np.errstate(over="ignore"):
        total = comm.all_reduce(x)
    assert np.isinf(total).all() == (comm.size > 2)


def test_small_floats_accumulate_in_float32(comm: Communicator) -> None:
    """256 + 1 is 256 in bfloat16; the sum of all ranks must not lose the ones."""
    x = np.array([256 if comm.rank == 0 else 1], ml_dtypes.bfloat16)
    wanted = np.float32(256 + comm.size - 1).astype(ml_dtypes.bfloat16)
    for verb in (comm.all_reduce, comm.reduce):
        got = verb(x)
        assert got is None or got[0] == wanted
    assert all(d.itemsize < 4 for d in SMALL_FLOATS)


@pytest.mark.parametrize(
    ("dtype", "op", "says"),
    [
        ("?", ReduceOp.SUM, "bool is ambiguous"),
        ("?", ReduceOp.MEAN, "bool is ambiguous"),
        ("c16", ReduceOp.MIN, "complex numbers is not defined"),
        ("c8", ReduceOp.MAX_LOCATION, "complex numbers is not defined"),
        ("M8[s]", ReduceOp.SUM, "not defined"),
        ("S3", ReduceOp.MAX, "not defined"),
        ("U3", ReduceOp.SUM, "not defined"),
    ],
)
def test_what_has_no_meaning_is_refused_with_a_reason(
    comm: Communicator, dtype: str, op: ReduceOp, says: str
) -> None:
    with pytest.raises(UnsupportedArray, match=says):
        comm.all_reduce(np.zeros(3, dtype), op)
    assert comm.all_reduce(1) == comm.size


def rough(rank: int, n: int, dtype: Any) -> Any:
    """Values whose sum depends on the order of the summands."""
    rng = np.random.default_rng(rank)
    return (rng.standard_normal(n) * 10.0 ** rng.integers(-6, 6, n)).astype(dtype)


@pytest.mark.parametrize("mode", MODES)
def test_rank_order_is_bitwise_that_of_numpy(comm: Communicator, mode: str) -> None:
    with in_mode(comm, mode) as group:
        for dtype, n in product(("f4", "f8", "g", "c16"), (1, 17, 400, 3001)):
            rows = [rough(r, n, dtype) for r in range(group.size)]
            wanted = functools.reduce(np.add, rows)
            x = rows[group.rank]
            verbs: list[Callable[..., Any]] = [group.all_reduce, group.reduce]
            for verb in verbs:
                got = verb(x, deterministic=True)
                assert got is None or np.array_equal(got, wanted)
            block = group.reduce_scatter(x, deterministic=True)
            sizes = [n // group.size + (r < n % group.size) for r in range(group.size)]
            start = sum(sizes[: group.rank])
            assert np.array_equal(block, wanted[start : start + sizes[group.rank]])
            begun = group.begin_all_reduce(x, deterministic=True).wait()
            assert np.array_equal(begun, wanted)


def test_the_order_matters_for_these_values() -> None:
    """The planted fault of the test above: another order gives other bits."""
    rows = [rough(r, 400, "f8") for r in range(4)]
    forward = functools.reduce(np.add, rows)
    assert not np.array_equal(forward, functools.reduce(np.add, rows[::-1]))
    assert not np.array_equal(forward, (rows[0] + rows[1]) + (rows[2] + rows[3]))


def test_a_communicator_can_be_deterministic_by_default(comm: Communicator) -> None:
    rows = [rough(r, 1000, "f8") for r in range(comm.size)]
    group = comm.split(0, purpose="deterministic")
    assert group is not None
    group.deterministic = True
    try:
        wanted = functools.reduce(np.add, rows)
        assert np.array_equal(group.all_reduce(rows[comm.rank]), wanted)
        assert np.array_equal(group.begin_all_reduce(rows[comm.rank]).wait(), wanted)
    finally:
        group.deterministic = False
        group.close()
