"""Node memory behind the verbs: one result a node, views, plans, forced ways, refusals."""

import functools
import time
import warnings
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mpipar.comm import Communicator, Op, ReduceOp, ThreadWorld
from mpipar.comm.node.communicator import NodeCommunicator
from mpipar.errors import CollectiveMismatch, LayoutError, RankFailed, UnsupportedArray

pytestmark = pytest.mark.ranks(2, 3, 4)
WAYS = ("", "flags", "stage", "copy", "mpi")
SIZES = (1, 5, 100, 8193, 70_001)


@pytest.fixture(autouse=True)
def _threads_share_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPIPAR_NODE_SIZE", "8")


def group_of(comm: Communicator, way: str = "") -> Any:
    """A group in node memory whatever `comm` is made of, or a skip where there is none."""
    group = comm.split(0, purpose=f"node memory {way}")
    if not isinstance(group, NodeCommunicator):
        pytest.skip("these ranks share no memory")
    group.force(way)
    return group


def rows(n: int, size: int, dtype: Any = np.float32) -> list[Any]:
    rng = np.random.default_rng([n, size])
    return [(rng.random(size) * 8 - 4).astype(dtype) for _ in range(n)]


def bodies(comm: Communicator) -> None:
    """What every way must do, in every form of result, bitwise in the order of ranks."""
    for way in WAYS:
        group = group_of(comm, way)
        for size in SIZES:
            xs = rows(group.size, size)
            mine, want = xs[group.rank], functools.reduce(np.add, xs)
            own, out, shared = group.empty(size), group.empty(size), group.empty_shared(size)
            own[...] = mine
            for turn in range(3):  # the third call is planned
                for x in (mine, own):
                    for target in (out, shared, np.empty_like(mine)):
                        got = group.all_reduce(x, out=target)
                        assert got is target
                        if way != "mpi":
                            assert np.array_equal(got, want), (way, size, turn)
                        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
            with pytest.raises(ValueError, match="read-only"):
                shared[0] = 1
            again = own.copy()
            assert group.all_reduce(again, out=again) is again
            np.testing.assert_allclose(again, want, rtol=1e-4, atol=1e-5)
            whole = group.empty_shared(size * group.size)
            assert np.array_equal(group.all_gather(own, out=whole), np.concatenate(xs))
            for root in range(group.size):
                own[...] = mine
                group.barrier()
                assert np.array_equal(group.broadcast(own, root, out=shared), xs[root])
                assert np.array_equal(group.broadcast(own, root, out=own), xs[root])
            for array in (own, out, shared, whole):
                group.free(array)
        group.close()


def test_every_way_and_form_of_result(comm: Communicator) -> None:
    bodies(comm)


def test_views_are_the_arrays_of_the_peers(comm: Communicator) -> None:
    group = group_of(comm)
    for size in (0, 3, 50_000):
        own = group.empty((size, 2), np.int64)
        own[...] = group.rank + 1
        for x in (own, own.copy()):
            views = group.views(x)
            assert [v.shape for v in views] == [(size, 2)] * group.size
            assert all((v == r + 1).all() for r, v in enumerate(views))
            assert not any(v.flags.writeable for v in views)
            group.barrier()
    own = group.empty(4)
    own[...] = 0
    view = group.views(own)[(group.rank + 1) % group.size]
    group.barrier()
    own[...] = group.rank + 5
    group.barrier()
    assert (view == (group.rank + 1) % group.size + 5).all()
    group.close()


def test_small_floats_and_means_are_accumulated_wide(comm: Communicator) -> None:
    for way in ("flags", "stage", "copy"):
        group = group_of(comm, way)
        big = np.full(20_000 if way != "flags" else 20, 30_000, np.float16)
        assert (group.all_reduce(big, ReduceOp.MEAN) == 30_000).all()
        x = np.full(9, 256 if group.rank == 0 else 1, ml_dtypes.bfloat16)
        assert (group.all_reduce(x) == 256 + group.size - 1).all() or group.size == 2
        ints = np.arange(9000) + group.rank
        mean = group.all_reduce(ints, ReduceOp.MEAN)
        assert mean.dtype == np.float64
        assert np.array_equal(mean, np.arange(9000) + (group.size - 1) / 2)
        nan = np.where(np.arange(9000) % group.size == group.rank, np.nan, 1.0)
        assert np.isnan(group.all_reduce(nan, ReduceOp.MIN)).all()
        value, where = group.all_reduce(np.arange(9000) * (group.rank + 1), ReduceOp.MAX_LOCATION)
        assert value[-1] == 8999 * group.size
        assert where[-1] == group.size - 1
        group.close()


def test_calls_that_differ_are_refused_on_all_ranks_and_work_goes_on(comm: Communicator) -> None:
    for way in WAYS:
        group = group_of(comm, way)
        last = group.rank == group.size - 1
        wrong: list[Any] = [
            lambda g, odd: g.all_reduce(np.zeros(6 if odd else 5)),
            lambda g, odd: g.all_reduce(np.zeros(9000, np.float32 if odd else np.float64)),
            lambda g, odd: g.all_reduce(np.zeros(9000), ReduceOp.MAX if odd else ReduceOp.SUM),
            lambda g, odd: g.broadcast(np.zeros(9000), 1 if odd else 0),
            lambda g, odd: g.barrier() if odd else g.all_reduce(np.zeros(10**5)),
            lambda g, odd: g.views(np.zeros(3)) if odd else g.all_gather(np.zeros(3)),
            lambda g, odd: g.begin_all_reduce(np.zeros(4 + odd)).wait(),
        ]
        for call in wrong:
            with pytest.raises(CollectiveMismatch, match=f"rank {group.size - 1}:"):
                call(group, last)
            assert group.all_reduce(1) == group.size
        with pytest.raises(UnsupportedArray, match="bool"):
            group.all_reduce(np.ones(3, bool))
        with pytest.raises(UnsupportedArray, match=f"rank {group.size - 1}"):
            group.all_reduce(np.ones(3, bool if last else np.int8))
        assert group.all_reduce(2) == 2 * group.size
        group.close()


def test_ranks_with_different_ways_are_told_so(comm: Communicator) -> None:
    group = group_of(comm)
    group.force("stage" if comm.rank else "mpi")
    with pytest.raises(CollectiveMismatch, match="algorithms"):
        group.all_reduce(np.zeros(10**5))
    group.force("")
    assert group.all_reduce(1) == group.size
    group.close()


def test_plans_follow_arrays_that_change_and_die(comm: Communicator) -> None:
    group = group_of(comm)
    n = group.size
    x, out = np.ones(8), np.zeros(8)
    for turn in range(5):
        x[...] = turn
        assert (group.all_reduce(x, out=out) == n * turn).all()
    x.shape = (2, 4)
    assert group.all_reduce(x).shape == (2, 4)
    assert len({id(group.all_reduce(x)) for _ in range(4)} | {0}) > 1
    kept = group.all_reduce(x)
    group.all_reduce(x * 2)
    assert (kept == 4 * n).all()
    for size in (8, 20_000):
        for turn in range(20):  # new arrays at old addresses
            y = np.full(size, float(turn))
            assert (group.all_reduce(y, out=y) == n * turn).all()
            assert (group.all_reduce(y, out=y) == n * n * turn).all()
    check_changes_in_place(group)
    prepared = group.prepare(Op.ALL_REDUCE, out, out=out)
    out[...] = 1
    assert (prepared() == n).all()
    assert (prepared() == n * n).all()
    group.close()
    with pytest.raises(RankFailed, match="closed"):
        prepared()


def check_changes_in_place(group: Communicator) -> None:
    """A known array of another shape or type is another array."""
    n, m = group.size, group.size + 1
    x, out = np.arange(2.0 * m) + group.rank, np.zeros(2 * m * n)
    for _ in range(4):
        group.all_gather(x, out=out)
        assert group.all_reduce(x).shape == x.shape
    x.shape = (2, m)
    assert group.all_reduce(x).shape == (2, m)
    with pytest.raises(LayoutError, match="out has shape"):
        group.all_gather(x, out=out)
    out.shape = (2, m * n)
    want = np.concatenate([(np.arange(2.0 * m) + r).reshape(2, m) for r in range(n)], 1)
    for _ in range(4):
        np.testing.assert_array_equal(group.all_gather(x, dim=1, out=out), want)
    y, total = np.ones(8, np.int32), np.zeros(8, np.int32)
    for _ in range(4):
        group.all_reduce(y, out=total)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        y.dtype = np.dtype(np.float32)
    with pytest.raises(LayoutError, match="float32"):
        group.all_reduce(y, out=total)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("n_elements", [4, 40_000])
def test_overflow_is_silent_and_infinite(comm: Communicator, dtype, n_elements: int) -> None:
    group = group_of(comm)  # a warning is an error here, and would leave the others waiting
    x = np.full(n_elements, np.finfo(dtype).max)
    for _ in range(4):
        assert np.isinf(group.all_reduce(x)).all() == (group.size > 1)
    group.close()


def test_pending_calls_go_on_in_waits_of_other_groups(comm: Communicator) -> None:
    one, two = group_of(comm), group_of(comm, "stage")
    x = np.full(100_000, one.rank + 1.0)
    want = one.size * (one.size + 1) / 2
    request = one.begin_all_reduce(x)
    if one.rank == 0:  # waits for the pending call before it comes to the other group
        assert (request.wait() == want).all()
    two.barrier()
    assert (request.wait() == want).all()
    ring = np.zeros(1)
    request = one.begin_all_reduce(x)
    if one.rank == 0:
        assert (request.wait() == want).all()
        for peer in range(1, one.size):
            one.send(np.ones(1), peer)
    else:
        one.recv(ring, 0)
    assert (request.wait() == want).all()
    one.close()
    two.close()


def test_a_late_rank_is_waited_for_only_in_wait(comm: Communicator) -> None:
    if not hasattr(comm, "mpi"):
        pytest.skip("threads take turns: nobody is late")
    group = group_of(comm)
    x = np.ones(200_000, np.float32)
    for _ in range(3):
        group.all_reduce(x)
    began = []
    for turn in range(6):
        group.barrier()
        if group.rank == turn % group.size:
            time.sleep(0.02)
        start = time.perf_counter()
        request = group.begin_all_reduce(x)
        began.append(time.perf_counter() - start)
        assert (request.wait() == group.size).all()
    assert sorted(began)[1] < 0.01, began
    group.close()


def test_thread_worlds_use_node_memory_where_asked() -> None:
    def kind(comm: Communicator) -> str:
        return type(comm).__name__

    assert ThreadWorld(2, node_size=2).run(kind) == ["NodeCommunicator"] * 2
    assert ThreadWorld(2, node_size=0).run(kind) == ["ThreadCommunicator"] * 2
    for seed in range(3):
        ThreadWorld(3, node_size=3, seed=seed).run(bodies)
