"""Several nodes simulated in one: the path over them, with equal and unequal nodes."""

import functools
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mpipar.comm import Communicator, ReduceOp, ThreadWorld
from mpipar.comm.hierarchy import HierarchicalCommunicator
from mpipar.errors import CollectiveMismatch

SHAPES = [(4, 2), (5, 2), (3, 2), (6, 3), (7, 4)]  # ranks, ranks on a node


def inputs(n: int, size: int, dtype: Any) -> list[Any]:
    rng = np.random.default_rng(n * 1000 + size)
    return [rng.integers(1, 4, size).astype(dtype) for _ in range(n)]


@pytest.mark.parametrize(("n", "node_size"), SHAPES)
@pytest.mark.parametrize("size", [1, 7, 5000, 40_001])
def test_all_reduce_and_broadcast_over_nodes(n: int, node_size: int, size: int) -> None:
    def body(comm: Communicator) -> None:
        assert isinstance(comm, HierarchicalCommunicator)
        xs = inputs(n, size, np.float64)
        total = functools.reduce(np.add, xs)
        assert np.array_equal(comm.all_reduce(xs[comm.rank]), total)
        assert np.array_equal(comm.all_reduce(xs[comm.rank], ReduceOp.MEAN), total / n)
        assert np.array_equal(
            comm.all_reduce(xs[comm.rank], ReduceOp.MAX), functools.reduce(np.maximum, xs)
        )
        for root in range(n):
            assert np.array_equal(comm.broadcast(xs[comm.rank], root), xs[root])
        assert np.array_equal(comm.all_gather(xs[comm.rank]), np.concatenate(xs))

    ThreadWorld(n, node_size=node_size, seed=n).run(body)


def test_small_floats_accumulate_in_float32_over_nodes() -> None:
    def body(comm: Communicator) -> None:
        x = np.full(9, 30000, np.float16)
        assert (comm.all_reduce(x, ReduceOp.MEAN) == 30000).all()
        ones = np.ones(3, ml_dtypes.bfloat16)
        assert (comm.all_reduce(ones * (1 if comm.rank else 256)) == 260).all()

    ThreadWorld(5, node_size=2).run(body)


def test_one_result_a_node_and_pending_calls() -> None:
    def body(comm: Communicator) -> Any:
        xs = inputs(4, 30_000, np.float32)
        out = comm.empty_shared(30_000, np.float32)
        requests = [comm.begin_all_reduce(xs[comm.rank]) for _ in range(3)]
        assert comm.all_reduce(xs[comm.rank], out=out) is out
        want = functools.reduce(np.add, xs)
        assert np.array_equal(out, want)
        assert all(np.array_equal(r.wait(), want) for r in requests)
        place = comm.node.host.arena.memory.locate(out)  # type: ignore[attr-defined]
        comm.free(out)
        return place >= 0

    assert all(ThreadWorld(4, node_size=2).run(body))


def test_deterministic_sums_keep_the_order_of_ranks() -> None:
    def body(comm: Communicator) -> None:
        xs = [np.random.default_rng(r).random(999) * 10.0 ** (r * 3) for r in range(5)]
        got = comm.all_reduce(xs[comm.rank], deterministic=True)
        assert np.array_equal(got, functools.reduce(np.add, xs))

    ThreadWorld(5, node_size=2).run(body)


def test_ranks_that_differ_are_told_on_every_node_and_the_group_still_works() -> None:
    def body(comm: Communicator) -> None:
        with pytest.raises(CollectiveMismatch, match="rank 4"):
            comm.all_reduce(np.zeros(5 if comm.rank == 4 else 6))
        assert comm.all_reduce(1) == 5

    ThreadWorld(5, node_size=2).run(body)


def test_subgroups_find_their_place() -> None:
    def body(comm: Communicator) -> list[str]:
        pairs = comm.split(comm.rank // 2, purpose="pairs")
        apart = comm.split(comm.rank % 2, purpose="apart")
        assert pairs is not None
        assert apart is not None
        kinds = [type(pairs).__name__, type(apart).__name__]
        assert pairs.all_reduce(1) == apart.all_reduce(1) == 2
        pairs.close()
        apart.close()
        return kinds

    assert ThreadWorld(4, node_size=2).run(body) == [["NodeCommunicator", "ThreadCommunicator"]] * 4
