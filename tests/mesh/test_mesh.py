"""The acting half of a mesh: each communicator holds exactly the ranks of its axes."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpipar import Mesh, ThreadWorld
from mpipar.errors import CollectiveMismatch, LayoutError
from mpipar.mesh import AXES

SUBSETS = [axes for k in range(5) for axes in itertools.combinations(AXES, k)]


def check_all_groups(comm, degrees, order):
    """Sums over every set of axes equal NumPy's over the grid of ranks."""
    grid = 3.0 ** np.arange(comm.size).reshape([degrees[a] for a in order])  # digits: who is in
    with Mesh(comm, **degrees, order=order) as mesh:
        place = tuple(mesh.coordinate[a] for a in order)
        assert grid[place] == 3.0**comm.rank
        for axes in SUBSETS:
            group = mesh.comm(*axes)
            dims = tuple(order.index(a) for a in axes)
            sums = np.broadcast_to(grid.sum(axis=dims, keepdims=True), grid.shape)
            assert group.all_reduce(np.array(3.0**comm.rank)) == sums[place]
            assert group.size == mesh.degree(*axes)
            # Rank order in the group is mesh order.
            line = group.all_gather(np.array([comm.rank]))
            assert line.tolist() == list(mesh.layout.ranks(comm.rank, *axes))
            assert line[group.rank] == comm.rank
            assert mesh.comm(*axes[::-1]) is group


@settings(max_examples=40)
@given(
    degrees=st.sampled_from([d for d in itertools.product(*[(1, 2, 3)] * 4) if math.prod(d) <= 8]),
    order=st.permutations(AXES),
)
def test_every_axis_and_every_merged_axes(degrees, order):
    named = dict(zip(AXES, degrees, strict=True))
    ThreadWorld(math.prod(degrees)).run(check_all_groups, named, tuple(order))


@pytest.mark.ranks(1, 2, 3, 4)
def test_groups_on_any_transport_and_closing_frees_them(comm):
    groups = getattr(comm, "_groups", None)  # the MPI's own communicators, counted
    before = len(groups.live) if groups else 0
    shapes = {4: [(2, 2, 1, 1), (1, 2, 1, 2), (1, 1, 4, 1)]}.get(comm.size, [(1, comm.size, 1, 1)])
    for degrees in shapes:
        named = dict(zip(AXES, degrees, strict=True))
        for order in (AXES, AXES[::-1]):
            check_all_groups(comm, named, order)
            comm.barrier()
            assert (len(groups.live) if groups else 0) == before


def test_a_mesh_passes_on_how_sums_are_made():
    def body(comm):
        comm.deterministic = True
        with Mesh(comm, tp=2) as mesh:
            return [mesh.comm(*axes).deterministic for axes in SUBSETS]

    assert ThreadWorld(4).run(body) == [[True] * len(SUBSETS)] * 4


def test_closing_closes_the_groups_once_and_leaves_the_world():
    closed = []

    def body(comm):
        mesh = Mesh(comm, tp=2)
        groups = {id(g): g for g in (mesh.comm(*axes) for axes in SUBSETS)}
        for key, group in groups.items():
            group.close = lambda key=key, rank=comm.rank: closed.append((rank, key))
        mesh.close()
        mesh.close()
        return {k for k, g in groups.items() if g is not comm}

    results = ThreadWorld(4).run(body)
    for rank, keys in enumerate(results):
        assert sorted(k for r, k in closed if r == rank) == sorted(keys)
        assert len(keys) == 3  # dp, tp and the group of one, which all other sets share


def test_all_ranks_refuse_what_does_not_fit():
    def body(comm):
        with pytest.raises(LayoutError, match="tp=3 makes 3 ranks, which does not fit 4"):
            Mesh(comm, tp=3)
        return str(Mesh(comm, tp=2))

    assert ThreadWorld(4).run(body) == ["pp=1 x dp=2 x cp=1 x tp=2\ndp0 tp: 0 1\ndp1 tp: 2 3"] * 4


def test_ranks_must_agree_on_the_degrees():
    def body(world):
        with pytest.raises(CollectiveMismatch, match=r"rank 0: pp=1, dp=2.*rank 1: pp=1, dp=None"):
            Mesh(world, **({"dp": 2} if world.rank == 0 else {"tp": 2}))
        with pytest.raises(LayoutError, match="dp='a' is no whole number"):
            Mesh(world, dp="a")
        with Mesh(world, tp=2) as mesh:
            return int(mesh.comm("tp").all_reduce(1))

    assert ThreadWorld(2).run(body) == [2, 2]
