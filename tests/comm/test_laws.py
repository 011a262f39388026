"""Laws of the collectives on threads at any size: adjoints, round trips, orders of running."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpipar.comm import Communicator, ThreadWorld
from tests.comm.cases import partition, random_case, run_case, spread

sizes = st.integers(1, 6)
seeds = st.integers(0, 2**32 - 1)
shapes = st.lists(st.integers(0, 4), min_size=1, max_size=3).map(tuple)
law = settings(max_examples=40)


def draw(seed: int, rank: int, shape: tuple[int, ...]) -> Any:
    return np.random.default_rng([seed, rank]).standard_normal(shape)


def dot(xs: list[Any], ys: list[Any]) -> float:
    return float(sum(np.vdot(x, y) for x, y in zip(xs, ys, strict=True)))


def adjoint(n: int, forward: Any, backward: Any, xs: list[Any], ys: list[Any]) -> None:
    """<A x, y> = <x, A' y>, the inner products taken over all ranks."""
    world = ThreadWorld(n)
    ax = world.run(lambda c: forward(c, xs[c.rank]))
    aty = world.run(lambda c: backward(c, ys[c.rank]))
    assert [a.shape for a in ax] == [y.shape for y in ys]
    assert [a.shape for a in aty] == [x.shape for x in xs]
    left, right = dot(ax, ys), dot(xs, aty)
    scale = max(1.0, sum(np.abs(x).sum() for x in xs))
    assert abs(left - right) <= 1e-12 * scale * max(1.0, sum(np.abs(y).sum() for y in ys))


@law
@given(n=sizes, shape=shapes, seed=seeds)
def test_a_sum_to_all_is_its_own_adjoint(n: int, shape: tuple[int, ...], seed: int) -> None:
    xs = [draw(seed, r, shape) for r in range(n)]
    ys = [draw(seed + 1, r, shape) for r in range(n)]
    adjoint(n, Communicator.all_reduce, Communicator.all_reduce, xs, ys)


@law
@given(n=sizes, shape=shapes, seed=seeds, data=st.data())
def test_joining_and_summed_cutting_are_adjoint(
    n: int, shape: tuple[int, ...], seed: int, data: st.DataObject
) -> None:
    dim = data.draw(st.integers(0, len(shape) - 1))
    counts = data.draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))
    whole = (*shape[:dim], sum(counts), *shape[dim + 1 :])
    blocks = [(*shape[:dim], c, *shape[dim + 1 :]) for c in counts]
    adjoint(
        n,
        lambda c, x: c.all_gather(x, dim=dim, counts=counts),
        lambda c, y: c.reduce_scatter(y, dim=dim, counts=counts),
        [draw(seed, r, blocks[r]) for r in range(n)],
        [draw(seed + 1, r, whole) for r in range(n)],
    )


@law
@given(n=sizes, seed=seeds, data=st.data())
def test_an_exchange_is_the_adjoint_of_the_exchange_back(
    n: int, seed: int, data: st.DataObject
) -> None:
    row = st.lists(st.integers(0, 3), min_size=n, max_size=n)
    table = data.draw(st.lists(row, min_size=n, max_size=n))
    back = [[table[s][d] for s in range(n)] for d in range(n)]
    adjoint(
        n,
        lambda c, x: c.all_to_all(x, send_counts=table[c.rank], recv_counts=back[c.rank]),
        lambda c, y: c.all_to_all(y, send_counts=back[c.rank], recv_counts=table[c.rank]),
        [draw(seed, r, (sum(table[r]), 2)) for r in range(n)],
        [draw(seed + 1, r, (sum(back[r]), 2)) for r in range(n)],
    )


@law
@given(n=sizes, shape=shapes, seed=seeds, data=st.data())
def test_broadcast_and_reduce_are_adjoint(
    n: int, shape: tuple[int, ...], seed: int, data: st.DataObject
) -> None:
    root = data.draw(st.integers(0, n - 1))

    def backward(c: Communicator, y: Any) -> Any:
        total = c.reduce(y, root=root)
        return np.zeros(shape) if total is None else total

    xs = [draw(seed, r, shape) if r == root else np.zeros(shape) for r in range(n)]
    ys = [draw(seed + 1, r, shape) for r in range(n)]
    adjoint(n, lambda c, x: c.broadcast(x, root), backward, xs, ys)


@law
@given(n=sizes, extent=st.integers(0, 7), seed=seeds, data=st.data())
def test_scatter_and_gather_undo_each_other(
    n: int, extent: int, seed: int, data: st.DataObject
) -> None:
    root = data.draw(st.integers(0, n - 1))
    whole = draw(seed, 0, (extent, 3))
    counts = spread(extent, n)

    def body(c: Communicator) -> Any:
        mine = c.scatter(whole if c.rank == root else None, root)
        assert mine.shape == (counts[c.rank], 3)
        return c.gather(mine, root, counts=counts)

    for rank, got in enumerate(ThreadWorld(n).run(body)):
        assert (got is None) == (rank != root)
        assert got is None or np.array_equal(got, whole)


def test_a_wrong_adjoint_is_seen() -> None:
    """The planted fault: a mean is not the adjoint of a sum."""
    xs, ys = ([draw(s, r, (3,)) for r in range(3)] for s in (1, 2))
    with pytest.raises(AssertionError):
        adjoint(3, Communicator.all_reduce, lambda c, y: c.all_reduce(y) / 3, xs, ys)


@law
@given(n=sizes, seed=seeds, order=st.none() | seeds, synchronous=st.booleans())
def test_any_program_gives_numpys_results_in_any_order_of_running(
    n: int, seed: int, order: int | None, synchronous: bool
) -> None:
    import random

    def body(c: Communicator) -> None:
        rng = random.Random(seed)
        for _ in range(4):
            run_case(c, random_case(rng, n))

    ThreadWorld(n, seed=order, synchronous_sends=synchronous).run(body)


@given(total=st.integers(0, 50), n=sizes, seed=seeds)
def test_partitions_of_the_cases_are_partitions(total: int, n: int, seed: int) -> None:
    import random

    sizes = partition(random.Random(seed), total, n)
    assert len(sizes) == n
    assert min(sizes) >= 0
    assert sum(sizes) == total
