"""Every verb against NumPy: layouts, types, roots, dims and counts, on any transport."""

import random
from itertools import product
from typing import Any

import numpy as np
import pytest

from mpipar.comm import Communicator, Op, ReduceOp
from mpipar.errors import RecipeError
from tests.comm.cases import (
    IN_LAYOUTS,
    MODES,
    MOVED,
    NUMBERS,
    OUT_LAYOUTS,
    VERBS,
    Case,
    in_mode,
    random_case,
    run_case,
    same,
    spread,
    uniform_case,
)

pytestmark = pytest.mark.ranks(1, 2, 3, 4)


@pytest.mark.parametrize("verb", VERBS)
def test_every_layout_as_input_and_output_differently_on_each_rank(
    comm: Communicator, verb: str
) -> None:
    for i, (x, out) in enumerate(product(range(len(IN_LAYOUTS)), range(len(OUT_LAYOUTS)))):
        ins = tuple(IN_LAYOUTS[(x + r) % len(IN_LAYOUTS)] for r in range(comm.size))
        outs = tuple(OUT_LAYOUTS[(out + 2 * r) % len(OUT_LAYOUTS)] for r in range(comm.size))
        run_case(comm, Case(verb, comm.size, i, (4, 3, 2), np.dtype("f8"), ins, outs, dim=i % 3))


@pytest.mark.parametrize("verb", VERBS)
def test_every_dtype(comm: Communicator, verb: str) -> None:
    dtypes = NUMBERS if "reduce" in verb else NUMBERS + MOVED
    for i, dtype in enumerate(dtypes):
        run_case(comm, uniform_case(verb, comm.size, (5, 2), dtype, i))


@pytest.mark.parametrize("verb", VERBS)
def test_zero_dimensional_empty_and_larger_arrays(comm: Communicator, verb: str) -> None:
    for i, shape in enumerate([(), (0,), (0, 3), (3, 0), (1, 1, 1), (2000,), (30, 31)]):
        run_case(comm, uniform_case(verb, comm.size, shape, "f4", i))


@pytest.mark.parametrize("verb", ["broadcast", "reduce", "gather", "scatter"])
def test_every_root(comm: Communicator, verb: str) -> None:
    for root in range(comm.size):
        case = uniform_case(verb, comm.size, (6, 2), "i4", root)
        run_case(comm, Case(**{**vars(case), "root": root}))


@pytest.mark.parametrize(
    "verb", ["reduce_scatter", "all_gather", "gather", "scatter", "all_to_all"]
)
def test_every_dim_also_from_the_end(comm: Communicator, verb: str) -> None:
    for dim in range(-3, 3):
        case = uniform_case(verb, comm.size, (5, 4, 3), "i8", dim + 3)
        run_case(comm, Case(**{**vars(case), "dim": dim}))


@pytest.mark.parametrize("mode", MODES)
def test_calls_at_random(comm: Communicator, mode: str) -> None:
    fuzz(comm, mode, 40)


@pytest.mark.slow
@pytest.mark.deadline(300)
@pytest.mark.parametrize("mode", MODES)
def test_many_calls_at_random(comm: Communicator, mode: str) -> None:
    fuzz(comm, mode, 2000)


def fuzz(comm: Communicator, mode: str, n_cases: int) -> None:
    """Cases from one seed: the same on every rank."""
    with in_mode(comm, mode) as group:
        rng = random.Random(f"{mode} {comm.size} {n_cases}")
        for _ in range(n_cases):
            run_case(group, random_case(rng, comm.size))


def test_the_comparison_sees_one_wrong_element(comm: Communicator) -> None:
    """The planted fault: what the random calls rest on must notice it."""
    case = uniform_case("all_reduce", comm.size, (5, 2), "f8")
    x = case.input(comm.rank)
    if comm.rank == comm.size - 1:
        x[3, 1] += 1
    got = comm.all_reduce(x)
    wanted = case.expected(comm.rank)
    assert wanted is not None
    assert not same(got, wanted)
    got[3, 1] -= 1
    assert same(got, wanted)
    assert not same(got.astype("f4"), wanted)


def test_my_result_changes_with_a_peers_input(comm: Communicator) -> None:
    for changed in range(comm.size):
        x = np.ones(3) + (comm.rank == changed)
        assert comm.all_reduce(x).tolist() == [comm.size + 1.0] * 3
        gathered = comm.all_gather(x[:1])
        assert gathered.tolist() == [1.0 + (r == changed) for r in range(comm.size)]


def test_scalars_and_lists_are_arrays(comm: Communicator) -> None:
    n = comm.size
    assert comm.all_reduce(comm.rank + 1) == n * (n + 1) // 2
    assert comm.all_reduce([1.5, comm.rank]).tolist() == [1.5 * n, n * (n - 1) / 2]
    assert comm.all_gather(2.5).tolist() == [2.5] * n
    assert comm.broadcast(np.float32(comm.rank), root=n - 1) == np.float32(n - 1)


def test_zero_strides_are_read_as_numpy_reads_them(comm: Communicator) -> None:
    x = np.broadcast_to(np.array([[comm.rank], [1]]), (2, 3))
    total = sum(range(comm.size))
    assert comm.all_reduce(x).tolist() == [[total] * 3, [comm.size] * 3]


def test_in_place(comm: Communicator) -> None:
    x = np.full((2, 2), float(comm.rank), order="F")
    assert comm.all_reduce(x, out=x) is x
    assert (x == sum(range(comm.size))).all()
    y = np.arange(3) * (comm.rank + 1)
    comm.broadcast(y, root=comm.size - 1, out=y)
    assert y.tolist() == [0, comm.size, 2 * comm.size]


def test_out_may_overlap_the_input(comm: Communicator) -> None:
    memory = np.arange(8.0)
    got = comm.all_reduce(memory[:6], out=memory[2:])
    assert got.tolist() == (np.arange(6.0) * comm.size).tolist()
    block = np.arange(float(2 * comm.size))
    start = 2 * comm.rank
    mine = block[start : start + 2]
    got = comm.reduce_scatter(block, out=mine)
    assert got.tolist() == [start * comm.size, (start + 1) * comm.size]


@pytest.mark.parametrize("mode", MODES)
def test_prepared_calls_read_their_input_anew(comm: Communicator, mode: str) -> None:
    with in_mode(comm, mode) as group:
        n = group.size
        for size in (1, 5, 700):
            x, total = np.zeros(size), np.zeros(size)
            joined = np.zeros(size * n)
            reduce = group.prepare(Op.ALL_REDUCE, x, out=total)
            gather = group.prepare(Op.ALL_GATHER, x, out=joined)
            barrier = group.prepare(Op.BARRIER)
            for turn in range(3):
                x[...] = group.rank + turn
                assert reduce() is total
                assert (total == sum(r + turn for r in range(n))).all()
                assert gather() is joined
                assert joined.reshape(n, size)[:, 0].tolist() == [r + turn for r in range(n)]
                barrier()


def test_small_objects(comm: Communicator) -> None:
    value = {"rank": comm.rank, "name": "é" * comm.rank, "list": [None, True, 1.5]}
    got = comm.all_gather_json(value)
    assert [g["rank"] for g in got] == list(range(comm.size))
    assert [len(g["name"]) for g in got] == list(range(comm.size))
    for root in range(comm.size):
        mine: Any = ["of", comm.rank] if comm.rank == root else None
        assert comm.broadcast_json(mine, root) == ["of", root]


@pytest.mark.parametrize("mode", MODES)
def test_messages_of_one_tag_keep_their_order(comm: Communicator, mode: str) -> None:
    with in_mode(comm, mode) as group:
        after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
        sizes = [3, 1000, 1, 0, 50]
        sent = [
            group.begin_send(np.full(s, i * 10 + group.rank), after, tag=t)
            for i, s in enumerate(sizes)
            for t in (0, 5)
        ]
        for t in (5, 0):
            for i, s in enumerate(sizes):
                got = group.recv(np.empty(s, np.int64), before, tag=t)
                assert (got == i * 10 + before).all()
        for request in sent:
            request.wait()


def test_more_ranks_than_items(comm: Communicator) -> None:
    """3 items over 4 ranks: the classic hang of a raw scatter."""
    x = np.arange(3.0) if comm.rank == 0 else None
    mine = comm.scatter(x)
    assert mine.size == spread(3, comm.size)[comm.rank]
    assert comm.all_reduce(mine.sum()) == 3.0


@pytest.mark.parametrize("mode", MODES)
def test_calls_made_again_on_one_array_see_what_changed(comm: Communicator, mode: str) -> None:
    """Values, shape, operation and counts may change between calls that look alike."""
    with in_mode(comm, mode) as group:
        n = group.size
        x, out = np.zeros(12), np.zeros(12)
        for turn in range(4):
            x[...] = turn + group.rank
            assert (group.all_reduce(x) == sum(turn + r for r in range(n))).all()
            assert group.all_reduce(x, out=out) is out
            assert (out == sum(turn + r for r in range(n))).all()
            assert (group.all_reduce(x, ReduceOp.MAX) == turn + n - 1).all()
        kept = group.all_reduce(x)
        before = kept.copy()
        x[...] = -1.0
        group.all_reduce(x)
        assert np.array_equal(kept, before), "an earlier result was overwritten"
        for shape in ((3, 4), (2, 6), (12,)):
            x.shape = out.shape = shape
            for _ in range(3):
                assert group.all_reduce(x, out=out).shape == shape
        counts = [12] + [0] * (n - 1)
        for _ in range(3):
            assert group.reduce_scatter(x, counts=counts).size == (12 if group.rank == 0 else 0)
        counts.reverse()
        for _ in range(3):
            assert group.reduce_scatter(x, counts=counts).size == 12 * (group.rank == n - 1)
        for k in range(50):
            fresh = np.full(12, float(k))
            assert (group.all_reduce(fresh) == k * n).all()


def test_what_the_root_makes_or_meets_is_everywhere(comm: Communicator) -> None:
    made: list[int] = []

    def make() -> dict[str, int]:
        made.append(comm.rank)
        return {"by": comm.rank}

    def fail() -> None:
        raise RecipeError(f"met by rank {comm.rank}")

    for root in range(comm.size):
        made.clear()
        assert comm.made_by_root(make, root) == {"by": root}
        assert made == [root] * (comm.rank == root)
        with pytest.raises(RecipeError, match=f"met by rank {root}"):
            comm.made_by_root(fail, root)
    assert comm.all_gather(np.array([comm.rank])).tolist() == list(range(comm.size))
