"""Calls made again with new arrays: at old places, at others, shared, overlapping, reshaped."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mpipar.comm import Communicator, ReduceOp
from mpipar.comm.node.communicator import NodeCommunicator
from mpipar.errors import LayoutError, RankFailed, UnsupportedArray
from tests.comm.test_node import _threads_share_memory, group_of  # noqa: F401  (a fixture)

pytestmark = pytest.mark.ranks(2, 3, 4)
Rows = list[Any]
TURNS = 5


def verbs(group: Communicator) -> dict[str, tuple[Callable[..., Any], Callable[[Rows], Any]]]:
    """By name: the verb on `x` and `out`, and the result of this rank out of all ranks' inputs."""
    n, me = group.size, group.rank
    last = n - 1
    return {
        "all_reduce": (lambda x, out: group.all_reduce(x, out=out), lambda xs: sum(xs)),
        "largest": (
            lambda x, out: group.all_reduce(x, ReduceOp.MAX, out),
            lambda xs: np.maximum.reduce(xs),
        ),
        "reduce": (
            lambda x, out: group.reduce(x, root=last, out=out),
            lambda xs: sum(xs) if me == last else None,
        ),
        "reduce_scatter": (
            lambda x, out: group.reduce_scatter(x, out=out),
            lambda xs: np.array_split(sum(xs), n)[me],
        ),
        "all_gather": (
            lambda x, out: group.all_gather(x, out=out),
            lambda xs: np.concatenate(xs),
        ),
        "all_gather along 1": (
            lambda x, out: group.all_gather(x.reshape(1, -1), 1, out=out),
            lambda xs: np.concatenate(xs).reshape(1, -1),
        ),
        "gather": (
            lambda x, out: group.gather(x, root=0, out=out),
            lambda xs: np.concatenate(xs) if me == 0 else None,
        ),
        "all_to_all": (
            lambda x, out: group.all_to_all(x.reshape(n, -1), out=out),
            lambda xs: np.stack([x.reshape(n, -1)[me] for x in xs]),
        ),
        "broadcast": (lambda x, out: group.broadcast(x, last, out), lambda xs: xs[last]),
    }


def inputs(group: Communicator, size: int, turn: int) -> Rows:
    rng = np.random.default_rng([size, turn])
    return [rng.integers(0, 99, size).astype(np.float64) for _ in range(group.size)]


def check(got: Any, want: Any) -> None:
    if want is None:
        assert got is None
        return
    assert got.shape == want.shape
    assert np.array_equal(got, want)


@pytest.mark.parametrize("size", [12, 12_000])
def test_new_arrays_each_time(comm: Communicator, size: int) -> None:
    group = group_of(comm)
    for name, (verb, wanted) in verbs(group).items():
        kept = []
        for turn in range(TURNS):
            xs = inputs(group, size, turn)
            want = wanted(xs)
            got = verb(xs[group.rank].copy(), None)
            check(got, want)
            kept.append((got, want))
            out = None if want is None else np.full(want.shape, np.nan)
            assert verb(xs[group.rank], out) is out, name
            check(out, want)
        for got, want in kept:  # results are the caller's own, whatever came after
            check(got, want)
    group.close()


@pytest.mark.parametrize("size", [24, 24_000])
def test_one_place_in_many_guises(comm: Communicator, size: int) -> None:
    """The same memory as another shape, type, layout or object is another call."""
    group = group_of(comm)
    n, me = group.size, group.rank
    memory, room = np.empty(size), np.empty(size)
    for turn in range(TURNS):
        xs = inputs(group, size, turn)
        memory[...] = xs[me]
        check(group.all_reduce(memory[:], out=room[:]), sum(xs))
        square = group.all_reduce(memory.reshape(4, -1), out=room.reshape(4, -1))
        check(square, sum(xs).reshape(4, -1))
        check(group.all_reduce(memory[::2]), sum(xs)[::2])
        check(group.all_reduce(memory[::2], out=room[1::2]), sum(xs)[::2])
        check(group.all_reduce(memory.reshape(4, -1).T), sum(xs).reshape(4, -1).T)
        ints = memory.view(np.int64)
        want = sum(x.view(np.int64) for x in xs)
        assert np.array_equal(group.all_reduce(ints), want)
        swapped = memory.astype(">f8")
        check(group.all_reduce(swapped), sum(xs))
        with pytest.raises(LayoutError, match="out has shape"):
            group.all_reduce(memory, out=room.reshape(4, -1))
        with pytest.raises(LayoutError, match="int64"):
            group.all_reduce(memory, out=room.view(np.int64))
        sealed = room.view()
        sealed.flags.writeable = False
        with pytest.raises(UnsupportedArray, match="read-only"):
            group.all_reduce(memory, out=sealed)
        check(group.all_reduce(memory), sum(xs))
    assert n == group.size
    group.close()


@pytest.mark.parametrize("size", [24, 24_000])
def test_in_place_and_overlapping(comm: Communicator, size: int) -> None:
    group = group_of(comm)
    me = group.rank
    for turn in range(TURNS):
        xs = inputs(group, size, turn)
        x = xs[me].copy()
        assert group.all_reduce(x, out=x) is x
        check(x, sum(xs))
        x = xs[me].copy()
        assert group.broadcast(x, 1, out=x) is x
        check(x, xs[1])
        both = np.append(xs[me], 0.0)
        check(group.all_reduce(both[:-1], out=both[1:]), sum(xs))
        both = np.append(0.0, xs[me])
        check(group.broadcast(both[1:], 0, out=both[:-1]), xs[0])
    group.close()


@pytest.mark.parametrize("size", [24, 24_000])
def test_shared_results_of_fresh_inputs(comm: Communicator, size: int) -> None:
    """The read-only result is written where it is the group's own, and refused elsewhere."""
    group = group_of(comm)
    shared = [group.empty_shared(size, np.float64) for _ in range(2)]
    joined = group.empty_shared((1, size * group.size), np.float64)
    for turn in range(TURNS):
        for out in shared:
            xs = inputs(group, size, turn)
            assert group.all_reduce(xs[group.rank].copy(), out=out) is out
            check(out, sum(xs))
            group.barrier()
            assert group.broadcast(xs[group.rank].copy(), 0, out=out) is out
            check(out, xs[0])
            group.barrier()
        got = group.all_gather(xs[group.rank].reshape(1, -1).copy(), 1, out=joined)
        assert got is joined
        check(joined, np.concatenate(xs).reshape(1, -1))
        with pytest.raises(UnsupportedArray, match="read-only"):
            group.all_reduce(xs[group.rank], out=shared[0][:])
    for array in (*shared, joined):
        group.free(array)
    group.close()


def test_ranks_may_take_different_ways_to_the_same_call(comm: Communicator) -> None:
    """One rank repeats its arrays, another makes new ones, a third uses node memory."""
    group = group_of(comm)
    me = group.rank
    for size in (16, 16_000):
        x, out = np.empty(size), np.empty(size)
        own = group.empty(size, np.float64)
        for turn in range(3 * TURNS):
            xs = inputs(group, size, turn)
            x[...] = own[...] = xs[me]
            kind = (me + turn // TURNS) % 3
            if kind == 0:
                got = group.all_reduce(x, out=out)
            elif kind == 1:
                got = group.all_reduce(x.copy())
            else:
                got = group.all_reduce(own, out=own)
            check(got, sum(xs))
        group.barrier()
        group.free(own)
    group.close()


def test_what_is_kept_of_peers_that_move_is_bounded(comm: Communicator) -> None:
    """One rank repeats its arrays in node memory; the others' lie elsewhere every time."""
    group = group_of(comm)
    if group.size > 2:
        group.close()
        return
    size = 9_000
    pool = [group.empty(size) for _ in range(40 if group.rank else 1)]
    for turn in range(120):
        x = pool[turn % len(pool)]
        x[...] = turn
        assert (group.all_reduce(x, out=x) == 2 * turn).all()
        assert [view[0] for view in group.views(x)] == [2 * turn] * 2
        group.barrier()
    kept = [plan for plan in group._plans.known.values() if plan.path != "flags"]
    assert kept
    assert all(len(plan.scripts) + len(plan.views) <= 32 for plan in kept)
    for array in pool:
        group.free(array)
    group.close()


def test_node_memory_taken_and_given_back(comm: Communicator) -> None:
    """Arrays of the pool come back at old places, for other ranks at other ones."""
    group = group_of(comm)
    me = group.rank
    for size in (16, 9_000, 40_000):
        for turn in range(2 * TURNS):
            xs = inputs(group, size, turn)
            spacer = [group.empty(100 * (1 + (turn + me) % 2)) for _ in range(me % 2)]
            x, out = group.empty(size, np.float64), group.empty(size, np.float64)
            x[...] = xs[me]
            check(group.all_reduce(x, out=out), sum(xs))
            views = group.views(x)
            for view, want in zip(views, xs, strict=True):
                assert np.array_equal(view, want)
            group.barrier()
            for array in (x, out, *spacer):
                group.free(array)
    group.close()


def test_known_forms_end_with_the_group(comm: Communicator) -> None:
    group = group_of(comm)
    for _ in range(3):
        group.all_reduce(np.ones(3))
        group.all_reduce(np.ones(30_000))
    assert isinstance(group, NodeCommunicator)
    group.force("stage")
    assert (group.all_reduce(np.ones(3)) == group.size).all()
    group.close()
    for size in (3, 30_000):
        with pytest.raises(RankFailed, match="closed"):
            group.all_reduce(np.ones(size))
