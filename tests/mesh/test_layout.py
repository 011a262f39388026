"""Laws of the pure half of a mesh: degrees, order, ranks and coordinates."""

import itertools
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpipar.errors import CountOutOfRange, LayoutError
from mpipar.mesh import AXES, MeshLayout

DEGREES = st.tuples(*[st.integers(1, 4)] * 4)
ORDERS = st.permutations(AXES).map(tuple)


@st.composite
def layouts(draw):
    degrees = dict(zip(AXES, draw(DEGREES), strict=True))
    size = math.prod(degrees.values())
    if draw(st.booleans()):
        degrees[draw(st.sampled_from(AXES))] = None
    return MeshLayout(size, **degrees, order=draw(ORDERS))


@given(layouts())
def test_ranks_and_coordinates_are_one_to_one(layout):
    places = [layout.coordinate(r) for r in range(layout.world_size)]
    grid = itertools.product(*(range(layout.degrees[a]) for a in layout.order))
    # Counting through the grid with the innermost axis fastest is the mesh order.
    assert [tuple(p[a] for a in layout.order) for p in places] == list(grid)
    assert [layout.rank(**p) for p in places] == list(range(layout.world_size))
    assert math.prod(layout.degrees.values()) == layout.world_size


@given(layouts(), st.sets(st.sampled_from(AXES)), st.data())
def test_groups_partition_the_world(layout, axes, data):
    groups = {layout.ranks(r, *axes) for r in range(layout.world_size)}
    assert sorted(r for g in groups for r in g) == list(range(layout.world_size))
    assert {len(g) for g in groups} == {layout.degree(*axes)}
    rank = data.draw(st.integers(0, layout.world_size - 1))
    group, place = layout.ranks(rank, *axes), layout.coordinate(rank)
    assert rank in group
    assert list(group) == sorted(group)
    others = [a for a in AXES if a not in axes]
    same = [
        r
        for r in range(layout.world_size)
        if all(layout.coordinate(r)[a] == place[a] for a in others)
    ]
    assert list(group) == same


@given(layouts(), st.sampled_from(AXES), st.data())
def test_neighbours_are_each_others(layout, axis, data):
    rank = data.draw(st.integers(0, layout.world_size - 1))
    before, after = layout.neighbours(rank, axis)
    here = layout.coordinate(rank)
    assert (before is None) == (here[axis] == 0)
    assert (after is None) == (here[axis] == layout.degrees[axis] - 1)
    if before is not None:
        assert layout.neighbours(before, axis)[1] == rank
    if after is not None:
        assert layout.coordinate(after) == {**here, axis: here[axis] + 1}


def test_by_default_tensor_parallel_neighbours_are_nearest():
    layout = MeshLayout(16, pp=2, tp=2)
    assert layout.degrees == {"pp": 2, "dp": 4, "cp": 1, "tp": 2}
    assert layout.ranks(5, "tp") == (4, 5)
    assert layout.ranks(5, "dp") == (1, 3, 5, 7)
    assert layout.ranks(5, "pp") == (5, 13)
    assert layout.ranks(5, "dp", "tp") == tuple(range(8))
    inside_out = MeshLayout(16, pp=2, tp=2, order="tp cp dp pp")
    assert inside_out.ranks(5, "tp") == (5, 13)
    assert inside_out.ranks(5, "pp") == (4, 5)


def test_the_picture():
    assert str(MeshLayout(12, pp=2, tp=3)) == (
        "pp=2 x dp=2 x cp=1 x tp=3\n"
        "pp0 dp0 tp:  0  1  2\n"
        "pp0 dp1 tp:  3  4  5\n"
        "pp1 dp0 tp:  6  7  8\n"
        "pp1 dp1 tp:  9 10 11"
    )
    assert str(MeshLayout(1)) == "pp=1 x dp=1 x cp=1 x tp=1\ntp: 0"
    assert str(MeshLayout(2, order="tp dp cp pp")) == "tp=1 x dp=2 x cp=1 x pp=1\ndp: 0 1"


@given(layouts())
def test_the_picture_shows_every_rank_once(layout):
    rows = str(layout).splitlines()[1:]
    ranks = [int(word) for row in rows for word in row.partition(":")[2].split()]
    assert sorted(ranks) == list(range(layout.world_size))


# -- refusals --------------------------------------------------------------------------------


@given(st.integers(1, 40), DEGREES, st.sampled_from([None, *AXES]))
def test_degrees_that_do_not_fit_name_degrees_that_do(size, degrees, open_axis):
    given_ = dict(zip(AXES, degrees, strict=True))
    if open_axis:
        given_[open_axis] = None
    known = math.prod(d for d in given_.values() if d)
    fits = size % known == 0 if open_axis else size == known
    if fits:
        assert MeshLayout(size, **given_).world_size == size
        return
    with pytest.raises(LayoutError, match=f"makes {known} ranks, which does not fit {size}") as e:
        MeshLayout(size, **given_)
    named = re.findall(r"(pp|dp|cp|tp)=((?:\d+ or )*\d+)", str(e.value).partition(";")[2])
    for axis, choices in named:
        for choice in map(int, choices.split(" or ")):
            assert MeshLayout(size, **{**given_, axis: choice}).degrees[axis] == choice
    if not named:  # no single degree mends it
        for axis in [a for a in AXES if given_[a]]:
            for degree in range(1, size + 1):
                with pytest.raises(LayoutError):
                    MeshLayout(size, **{**given_, axis: degree})
        assert f"multiply to {size}, whose divisors are 1" in str(e.value)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"tp": 3}, "tp=3 makes 3 ranks, which does not fit 8; tp=1 or 2 or 4 would do"),
        ({"dp": 3, "tp": 2}, "dp=3 x tp=2 makes 6 ranks, which does not fit 8; dp=4 would do"),
        ({"tp": None}, "dp and tp are both left open"),
        ({"order": "pp dp tp"}, "order 'pp dp tp' must name each of pp, dp, cp, tp once"),
        ({"order": "pp dp tp xp"}, "order 'pp dp tp xp' must name each"),
    ],
)
def test_messages(arguments, says):
    with pytest.raises(LayoutError) as e:
        MeshLayout(8, **arguments)
    assert says in str(e.value)


def test_wrong_axes_ranks_and_indices_are_refused():
    layout = MeshLayout(8, tp=2)
    for call in (
        lambda: layout.ranks(0, "pd"),
        lambda: layout.degree("pd"),
        lambda: layout.rank(pd=0),
        lambda: layout.neighbours(0, "pd"),
    ):
        with pytest.raises(LayoutError, match=r"no mesh axis 'pd'; the axes are pp, dp, cp, tp; "):
            call()
    for call in (
        lambda: layout.coordinate(8),
        lambda: layout.coordinate(-1),
        lambda: layout.rank(dp=4),
        lambda: MeshLayout(0),
        lambda: MeshLayout(8, tp=0),
        lambda: MeshLayout(8, tp=-1),
    ):
        with pytest.raises(CountOutOfRange):
            call()


def test_a_hundred_thousand_ranks_are_only_numbers():
    layout = MeshLayout(100_000, pp=10, tp=8, cp=5)
    assert layout.dp == 250
    assert layout.rank(**layout.coordinate(98_765)) == 98_765
    assert len(layout.ranks(98_765, "dp", "pp")) == 2500
