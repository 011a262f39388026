"""Text form, boxes and plans: pure."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpipar.comm import ReduceOp
from mpipar.errors import CountOutOfRange, LayoutError
from mpipar.mesh import AXES, MeshLayout
from mpipar.sharding import ArraySpec, Kind, Sharding, plan_redistribution
from mpipar.sharding.plan import messages_between

OPS = [ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.MEAN]


@st.composite
def shardings(draw, n_dims=None):
    """Any sharding: each axis goes to a dim, to the partial ones, or nowhere."""
    n = draw(st.integers(0, 4)) if n_dims is None else n_dims
    dims, partial = [[] for _ in range(n)], []
    for axis in draw(st.permutations(AXES)):
        where = draw(st.integers(-2, n - 1))
        if where >= 0:
            dims[where].append(axis)
        elif where == -1:
            partial.append(axis)
    return Sharding(tuple(map(tuple, dims)), tuple(partial), draw(st.sampled_from(OPS)))


@st.composite
def layouts(draw):
    degrees = {axis: draw(st.integers(1, 3)) for axis in AXES}
    world = int(np.prod(list(degrees.values())))
    return MeshLayout(world, **degrees, order=tuple(draw(st.permutations(AXES))))


def spec(shape, text, layout, dtype=np.float64):
    return ArraySpec(shape, np.dtype(dtype), layout, Sharding.parse(text))


@given(shardings())
def test_text_parses_back(sharding):
    assert Sharding.parse(str(sharding)) == sharding


@pytest.mark.parametrize(
    ("text", "again"),
    [
        ("A[I_dp, J_tp]", "A[I_dp, J_tp]"),
        ("[X, Y]", "A[I, J]"),
        ("grad[K_tp_dp]{ max_pp_cp }", "A[I_tp_dp]{max_pp_cp}"),
        ("A[]", "A[]"),
        ("A[]{mean_tp}", "A[]{mean_tp}"),
    ],
)
def test_text_forms(text, again):
    assert str(Sharding.parse(text)) == again


@pytest.mark.parametrize(
    "text",
    ["", "A", "A[I_dp", "A[I_tpp]", "A[i]", "A[I_dp, J_dp]", "A[I_dp]{sum_dp}", "A[I]{sum}",
     "A[I]{xor_tp}", "A[I]{min_location_tp}", "A[I,,J]", "A[I_dp] x"],
)  # fmt: skip
def test_wrong_text_is_refused(text):
    with pytest.raises(LayoutError):
        Sharding.parse(text)


def test_a_refusal_says_what_would_do():
    with pytest.raises(LayoutError, match=r"no mesh axis 'tpp'.*tp\?"):
        Sharding.parse("A[I_tpp]")
    with pytest.raises(LayoutError, match=r"2 dims, the array of shape .* has 1"):
        spec((4,), "A[I, J]", MeshLayout(1))


def test_several_axes_on_one_dim_nest_in_the_stated_order():
    layout = MeshLayout(6, dp=2, tp=3)  # rank = 3 dp + tp
    major_dp = [spec((11,), "A[I_dp_tp]", layout).slices(r)[0] for r in range(6)]
    major_tp = [spec((11,), "A[I_tp_dp]", layout).slices(r)[0] for r in range(6)]
    # 11 over 2 is 6, 5; over 3 each 2, 2, 2 and 2, 2, 1
    assert [(s.start, s.stop) for s in major_dp] == [
        (0, 2), (2, 4), (4, 6), (6, 8), (8, 10), (10, 11)]  # fmt: skip
    # 11 over 3 is 4, 4, 3; over 2 each 2, 2 and 2, 2 and 2, 1; rank order is dp, then tp
    assert [(s.start, s.stop) for s in major_tp] == [
        (0, 2), (4, 6), (8, 10), (2, 4), (6, 8), (10, 11)]  # fmt: skip


@given(layouts(), shardings(), st.data())
@settings(max_examples=60)
def test_shards_cover_every_element_once_per_replica(layout, sharding, data):
    shape = tuple(data.draw(st.integers(0, 7)) for _ in sharding.dims)
    s = ArraySpec(shape, np.dtype(np.int8), layout, sharding)
    count = np.zeros(shape, int)
    for rank in range(layout.world_size):
        count[s.slices(rank)] += 1
        assert s.local_shape(rank) == count[s.slices(rank)].shape
    split = [axis for axes in sharding.dims for axis in axes]
    assert (count == layout.world_size // layout.degree(*split)).all()
    sizes = [s.local_shape(r) for r in range(layout.world_size)]
    for dim in range(len(shape)):
        extents = {size[dim] for size in sizes}
        assert max(extents) - min(extents) <= 1
    if count.size:
        index = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
        holds = [all(p.start <= i < p.stop for i, p in zip(index, s.slices(r), strict=True))
                 for r in range(layout.world_size)]  # fmt: skip
        assert s.owners(*index) == tuple(np.flatnonzero(holds))


def test_questions_outside_the_array_are_refused():
    s = spec((4, 4), "A[I_dp, J]", MeshLayout(2))
    for index in [(4, 0), (-1, 0), (0,)]:
        with pytest.raises(LayoutError):
            s.owners(*index)
    with pytest.raises(CountOutOfRange):
        s.slices(2)


@given(layouts(), st.data())
@settings(max_examples=60)
def test_messages_deliver_what_is_missing_and_no_more(layout, data):
    n_dims = data.draw(st.integers(1, 3))
    shape = tuple(data.draw(st.integers(0, 7)) for _ in range(n_dims))
    n = layout.world_size
    degrees = data.draw(st.permutations([layout.degrees[a] for a in AXES]))
    other = MeshLayout(n, *degrees)
    have = ArraySpec(shape, np.dtype("i8"), layout, data.draw(shardings(n_dims))).boxes
    want = ArraySpec(shape, np.dtype("i8"), other, data.draw(shardings(n_dims))).boxes
    masks = np.zeros((2, n, *shape), bool)
    for mask, boxes in zip(masks, (have, want), strict=True):
        for rank, box in enumerate(boxes):
            mask[(rank, *(slice(a, b) for a, b in box))] = True
    mesh = data.draw(st.sampled_from([None, layout]))
    moves = messages_between(have, want, mesh)
    missing = masks[1] & ~masks[0]
    for source, dest, box in zip(*moves, strict=True):
        part = tuple(slice(a, b) for a, b in box)
        assert masks[0, source][part].all()
        assert missing[dest][part].all()  # wanted, not held, not sent before
        assert missing[dest][part].size
        missing[dest][part] = False
        holders = [r for r in range(n) if masks[0, r][part].all()]
        if mesh is None:
            assert abs(source - dest) == min(abs(r - dest) for r in holders)
        else:
            n_axes = [sum(layout.coordinate(r)[a] != layout.coordinate(dest)[a] for a in AXES)
                      for r in [source, *holders]]  # fmt: skip
            assert n_axes[0] == min(n_axes)
    assert not missing.any()


DP2TP2 = MeshLayout(4, dp=2, tp=2)


@pytest.mark.parametrize(
    ("source", "target", "kinds", "n_elements"),
    [
        ("A[I_dp, J_tp]", "A[I_dp, J_tp]", "none", 0),
        ("A[I, J]", "A[I_dp, J_tp]", "slice", 0),
        ("A[I_dp, J]", "A[I_dp_tp, J]", "slice", 0),
        ("A[I_tp, J]", "A[I, J]", "all_gather", 4 * 32),
        ("A[I_dp, J_tp]", "A[I, J]", "all_gather", 4 * 48),
        ("A[I_dp_tp, J]", "A[I_dp, J]", "all_gather", 4 * 16),
        ("A[I_tp, J]", "A[I, J_tp]", "all_to_all", 4 * 16),
        ("A[I_dp, J_tp]", "A[I_tp, J_dp]", "exchange", 2 * 16),  # two ranks keep their box
        ("A[I_tp_dp, J]", "A[I_dp_tp, J]", "exchange", 2 * 16),
        ("A[I, J]{sum_tp}", "A[I, J]", "all_reduce", 4 * 64),
        ("A[I, J]{sum_tp}", "A[I_tp, J]", "reduce_scatter", 4 * 32),
        ("A[I, J]{sum_dp_tp}", "A[I, J_tp_dp]", "reduce_scatter reduce_scatter", 4 * (32 + 16)),
        ("A[I, J]{sum_tp}", "A[I_dp, J]", "slice all_reduce", 4 * 32),
        ("A[I, J]{sum_tp}", "A[I_dp_tp, J]", "slice reduce_scatter", 4 * 16),
        ("A[I_dp, J]{sum_tp}", "A[I, J_tp]", "reduce_scatter all_gather", 4 * (16 + 16)),
        ("A[I, J]", "A[I, J]{sum_tp}", "fill", 0),
        ("A[I_tp, J]", "A[I, J]{max_tp}", "all_gather fill", 4 * 32),
        ("A[I_dp, J]{sum_tp}", "A[I, J]{sum_tp}", "all_gather", 4 * 32),
        ("A[I, J]{sum_dp_tp}", "A[I, J]{sum_tp}", "all_reduce", 4 * 64),
    ],
)
def test_the_cheapest_fitting_collective(source, target, kinds, n_elements):
    plan = plan_redistribution(spec((8, 8), source, DP2TP2), spec((8, 8), target, DP2TP2))
    assert " ".join(step.kind for step in plan.steps) == kinds
    assert plan.n_bytes == n_elements * 8
    assert str(plan).count("\n") == len(plan.steps)


def test_between_meshes_of_the_same_ranks():
    a, b = MeshLayout(4, tp=4, dp=1), MeshLayout(4, dp=4)
    plan = plan_redistribution(spec((8,), "A[I_tp]", a), spec((8,), "A[I_dp]", b))
    assert [step.kind for step in plan.steps] == [Kind.NONE]
    plan = plan_redistribution(spec((8, 8), "A[I_tp, J]", a), spec((8, 8), "A[I, J_dp]", b))
    assert [step.kind for step in plan.steps] == [Kind.EXCHANGE]
    assert plan.n_bytes == 12 * 4 * 8
    with pytest.raises(LayoutError, match=r"4 ranks.*2 ranks"):
        plan_redistribution(spec((8,), "A[I_tp]", a), spec((8,), "A[I_dp]", MeshLayout(2)))
