"""Every operator against its adjoint: <Ax, y> = <x, A'y> over all ranks."""

from __future__ import annotations

import numpy as np
import pytest

from mpipar import tensor_parallel as tp
from mpipar.errors import LayoutError

# For each operator whether input and output are one logical value (the same on every rank),
# copies that are used differently, or parts of one value.
KINDS = {
    "CopyAllReduce": ("one", "copies"),
    "AllReduceCopy": ("copies", "one"),
    "GatherSplit": ("parts", "one"),
    "SplitGather": ("one", "parts"),
    "AllGatherReduceScatter": ("parts", "copies"),
    "ReduceScatterAllGather": ("copies", "parts"),
}


def value(kind, seed, comm, shape, dim):
    """A random value of a kind, drawn alike on every rank but for copies."""
    rng = np.random.default_rng([seed, comm.rank if kind == "copies" else 99])
    whole = rng.normal(size=shape)
    return np.array_split(whole, comm.size, dim)[comm.rank] if kind == "parts" else whole


def product(kind, a, b, comm):
    """The inner product of the space: each logical value counts once."""
    assert a.shape == b.shape
    own = np.vdot(a, b)
    return float(own) if kind == "one" else float(comm.all_reduce(own))


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("size", [12, 5, 2], ids=["even", "uneven", "empty"])
def test_backward_is_the_adjoint(comm, name, dim, size):
    shape = [3, 4, 2]
    shape[dim] = size
    operator = getattr(tp, name)(comm, dim, size)
    before, after = KINDS[name]
    x = value(before, 1, comm, shape, dim)
    y = value(after, 2, comm, shape, dim)
    ax, aty = operator.forward(x), operator.backward(y)
    left, right = product(after, ax, y, comm), product(before, x, aty, comm)
    assert left == pytest.approx(right, rel=1e-13, abs=1e-13)
    assert left != 0
    for kind, result in ((after, ax), (before, aty)):
        if kind == "one":  # it really is the same everywhere
            np.testing.assert_array_equal(comm.broadcast(result), result)


@pytest.mark.ranks(2, 3)
def test_values(comm):
    n, r = comm.size, comm.rank
    mine = np.full((2, 1), float(r))
    joined = np.tile(np.arange(n, dtype=float), (2, 1))
    np.testing.assert_array_equal(tp.GatherSplit(comm).forward(mine), joined)
    np.testing.assert_array_equal(tp.SplitGather(comm).forward(joined), mine)
    np.testing.assert_array_equal(tp.AllReduceCopy(comm).forward(mine), mine * 0 + sum(range(n)))
    scattered = tp.ReduceScatterAllGather(comm).forward(joined)
    np.testing.assert_array_equal(scattered, n * mine)
    with pytest.raises(LayoutError):
        tp.SplitGather(comm, size=n + 1).forward(joined)
