"""Sharded arrays on threads: values, bytes counted in the transport, refusals."""

from __future__ import annotations

import functools
import gc
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpipar.comm import ReduceOp, ThreadWorld
from mpipar.errors import CountOutOfRange, EmptyInput, LayoutError
from mpipar.mesh import Mesh
from mpipar.sharding import ShardedArray, Sharding
from tests.spy import Spy

UFUNCS = {ReduceOp.SUM: np.add, ReduceOp.MAX: np.maximum}


def all_shardings() -> list[str]:
    """Every sharding of a matrix over dp and tp: each axis on a dim, partial, or replicas."""
    ways = ["", "_dp", "_tp", "_dp_tp", "_tp_dp"]
    ends = ["", "{sum_dp}", "{sum_tp}", "{max_dp_tp}"]
    texts = [f"A[I{a}, J{b}]{c}" for a, b, c in itertools.product(ways, ways, ends)]
    return [t for t in texts if t.count("dp") <= 1 and t.count("tp") <= 1]


def terms(shape, sharding, layout):
    """A global array for each index along the partial axes; whole numbers, so sums are exact."""
    n = layout.degree(*sharding.partial)
    rng = np.random.default_rng(len(shape) + n)
    return [rng.integers(-50, 50, shape).astype(np.float64) for _ in range(n)]


def term_of(rank, sharding, layout):
    place = layout.coordinate(rank)
    index = 0
    for axis in sharding.partial:
        index = index * layout.degree(axis) + place[axis]
    return index


def reduced(arrays, sharding):
    return functools.reduce(UFUNCS[sharding.op], arrays)


def source_array(shape, sharding, mesh):
    values = terms(shape, sharding, mesh.layout)[term_of(mesh.rank, sharding, mesh.layout)]
    local = values[ShardedArray.from_global(values, mesh, Sharding(sharding.dims)).slices]
    return ShardedArray(np.asfortranarray(local), mesh, sharding, shape)


def check(shape, sharding, target, layout, results):
    """The ranks' shards, put together term by term, are the reduced global array."""
    whole = reduced(terms(shape, sharding, layout), sharding)
    parts = [np.full(shape, np.nan) for _ in range(layout.degree(*target.partial))]
    for rank, (local, slices) in enumerate(results):
        assert local.shape == tuple(s.stop - s.start for s in slices)
        part = parts[term_of(rank, target, layout)][slices]
        assert ((part == local) | np.isnan(part)).all(), "replicas differ"
        part[...] = local
    np.testing.assert_array_equal(reduced(parts, target), whole)


def least_bytes(shape, before, after):
    """Elements that ranks want and do not have, by looking at each one."""
    missing = 0
    for have, want in zip(before, after, strict=True):
        held = np.zeros(shape, bool)
        held[have] = True
        missing += int((~held[want]).sum())
    return missing * 8


def spied_redistributions(pairs, shape, degrees, other=None):
    """On every rank and for every pair: shard and slices before and after, bytes, bytes planned."""

    def body(world):
        spy = Spy(world)
        mesh = Mesh(spy, **degrees)
        second = Mesh(spy, **other) if other else mesh
        for m in (mesh, second):
            m.comm("dp", "tp")
        found = []
        for source, target in pairs:
            array = source_array(shape, source, mesh)
            spy.reset()
            result = array.redistribute(target, second)
            sent = spy.n_bytes
            assert result.shape == shape
            assert result.dtype == np.float64
            found.append(
                (array.slices, (result.local, result.slices), sent, array.plan(target, second))
            )
        return found, second.layout

    ranks = ThreadWorld(degrees["dp"] * degrees["tp"]).run(body)
    return zip(pairs, zip(*[r[0] for r in ranks], strict=True), strict=True), ranks[0][1]


@pytest.mark.parametrize("shape", [(8, 4), (5, 3), (1, 0)], ids=str)
def test_all_pairs_of_shardings_move_the_least(shape):
    parsed = [Sharding.parse(text) for text in all_shardings()]
    assert len(parsed) == 18
    pairs = list(itertools.product(parsed, parsed))
    if shape == (5, 3):  # shares of a partial sum of 15 elements are not whole
        pairs = [(a, b) for a, b in pairs if not a.partial]
    results, layout = spied_redistributions(pairs, shape, {"dp": 2, "tp": 2})
    for (source, target), ranks in results:
        check(shape, source, target, layout, [r[1] for r in ranks])
        total = sum(r[2] for r in ranks)
        assert total == ranks[0][3].n_bytes, f"{source} -> {target}"
        if not source.partial:
            assert total == least_bytes(shape, [r[0] for r in ranks], [r[1][1] for r in ranks])


@pytest.mark.parametrize(
    ("degrees", "other"),
    [({"dp": 2, "tp": 2}, {"dp": 4, "tp": 1}), ({"dp": 3, "tp": 2}, {"dp": 2, "tp": 3}),
     ({"dp": 2, "tp": 2}, {"dp": 2, "tp": 2, "order": "tp pp dp cp"})],
    ids=str,
)  # fmt: skip
def test_between_two_meshes(degrees, other):
    parsed = [Sharding.parse(t) for t in all_shardings() if "{max" not in t and "_dp_tp" not in t]
    pairs = list(itertools.product(parsed, parsed))[::3]
    pairs = [(a, b) for a, b in pairs if not a.partial or degrees["tp"] == degrees["dp"]]
    results, layout = spied_redistributions(pairs, (8, 4), degrees, other)
    for (source, target), ranks in results:
        world = degrees["dp"] * degrees["tp"]
        assert layout.world_size == world
        if source.partial:
            assert sum(r[2] for r in ranks) == ranks[0][3].n_bytes
            continue
        check((8, 4), source, target, layout, [r[1] for r in ranks])
        total = sum(r[2] for r in ranks)
        assert total == least_bytes((8, 4), [r[0] for r in ranks], [r[1][1] for r in ranks])


@given(st.integers(1, 4), st.lists(st.integers(0, 5), max_size=3), st.data())
@settings(max_examples=40)
def test_a_round_trip_gives_every_rank_its_shard_again(n, shape, data):
    axes = [data.draw(st.sampled_from([(), ("tp",)])) for _ in shape]
    ways = [Sharding(tuple(a if d == k else () for k in range(len(shape))))
            for d, a in enumerate(axes)] or [Sharding()]  # fmt: skip
    dtype = data.draw(st.sampled_from(["i1", "f2", "f8", "c16", "?"]))
    whole = np.arange(int(np.prod(shape))).reshape(shape).astype(dtype)
    texts = data.draw(st.lists(st.sampled_from(ways), min_size=1, max_size=3))

    def body(world):
        mesh = Mesh(world, tp=n)
        start = array = ShardedArray.from_global(whole, mesh, ways[0])
        for way in texts:
            array = array.redistribute(way)
            np.testing.assert_array_equal(array.local, whole[array.slices])
        array = array.redistribute(ways[0])
        np.testing.assert_array_equal(array.local, start.local)
        np.testing.assert_array_equal(array.to_global(), whole)
        root = array.to_global(root=n - 1)
        assert (root is None) == (world.rank != n - 1)
        if root is not None:
            np.testing.assert_array_equal(root, whole)
            assert root.dtype == whole.dtype
        return True

    assert ThreadWorld(n).run(body) == [True] * n


def test_from_a_root_sends_every_element_once():
    whole = np.arange(35.0).reshape(5, 7)

    def body(world):
        mesh = Mesh(Spy(world), dp=2, tp=2)
        given = whole if world.rank == 1 else None
        result = []
        for text in ("A[I_dp, J_tp]", "A[I, J_tp]", "A[I, J]", "A[I_tp, J]{sum_dp}"):
            array = ShardedArray.from_global(given, mesh, text, root=1)
            np.testing.assert_array_equal(array.to_global(), whole)
            mesh.world.reset()
            array = ShardedArray.from_global(given, mesh, text, root=1)
            result.append(mesh.world.sent["all_to_all"])
        return result

    sent = ThreadWorld(4).run(body)
    # rank 1 is (dp 0, tp 1): it keeps 3x3 of 5x7; replicated over dp, three ranks get 20, 15, 20
    assert [s // 8 for s in sent[1]] == [35 - 9, 20 + 15 + 20, 0, 21 + 21 + 14]
    assert all(sum(s) == 0 for r, s in enumerate(sent) if r != 1)


def test_from_function_makes_only_the_own_shard():
    asked = {}

    def body(world):
        mesh = Mesh(Spy(world), dp=2, tp=2)

        def values(box):
            asked[world.rank] = box
            rows, columns = np.ogrid[box]
            return 100 * rows + columns

        mesh.world.reset()
        array = ShardedArray.from_function(values, (5, 3), mesh, "A[I_tp, J_dp]", np.int32)
        assert mesh.world.n_bytes == 0
        assert array.local.dtype == np.int32
        return array.local

    parts = ThreadWorld(4).run(body)
    rows, columns = np.indices((5, 3))
    for rank, part in enumerate(parts):
        np.testing.assert_array_equal(part, (100 * rows + columns)[asked[rank]])
    assert [p.shape for p in parts] == [(3, 2), (2, 2), (3, 1), (2, 1)]


def test_partial_from_one_global_array():
    whole = np.arange(1.0, 7.0).reshape(2, 3)

    def body(world):
        mesh = Mesh(world, tp=2)
        for op in ("sum", "product", "min", "max", "mean"):
            array = ShardedArray.from_global(whole, mesh, f"A[I, J]{{{op}_tp}}")
            np.testing.assert_array_equal(array.redistribute("A[I, J_tp]").to_global(), whole)
        scalar = ShardedArray(np.float64(3.0), mesh, "A[]{sum_tp}")
        return float(scalar.to_global())

    assert ThreadWorld(2).run(body) == [6.0, 6.0]


def test_indices_there_and_back():
    def body(world):
        mesh = Mesh(world, dp=2, tp=2)
        array = ShardedArray.from_global(np.arange(15).reshape(5, 3), mesh, "A[I_dp, J_tp]")
        for index in np.ndindex(5, 3):
            local = array.local_index(*index)
            if local is not None:
                assert array.local[local] == 3 * index[0] + index[1]
                assert array.global_index(*local) == index
        with pytest.raises(LayoutError):
            array.global_index(3, 0)
        return array.spec.owners(4, 2), array.local_index(4, 2)

    results = ThreadWorld(4).run(body)
    assert {owners for owners, _ in results} == {(3,)}
    assert [local for _, local in results] == [None, None, None, (1, 0)]


def test_shape_and_dtype_are_found_from_the_shards():
    def body(world):
        mesh = Mesh(world, dp=2, tp=2)
        shapes = [(3, 2), (3, 1), (2, 2), (2, 1)]
        array = ShardedArray(np.ones(shapes[world.rank], np.float32), mesh, "A[I_dp, J_tp]")
        assert (array.shape, array.dtype) == ((5, 3), np.float32)
        assert "float32[5, 3] as A[I_dp, J_tp] on dp=2 x tp=2" in repr(array)
        return True

    assert ThreadWorld(4).run(body) == [True] * 4


@pytest.mark.parametrize(
    ("shapes", "dtypes", "text", "message"),
    [
        ([(2,), (3,)], "dd", "A[I_tp]", r"rank 0 .* holds shape \(3,\), got \(2,\)"),
        ([(2,), (2,)], "df", "A[I_tp]", "different dims, dtypes or shardings"),
        ([(2,), (2, 1)], "dd", "A[I_tp]", "different dims"),
        ([(2,), (2,)], "dd", "A[I_tp, J]", "2 dims, the array of shape"),
    ],
)
def test_shards_that_do_not_fit_are_refused_on_every_rank(shapes, dtypes, text, message):
    def body(world):
        mesh = Mesh(world, tp=2)
        local = np.zeros(shapes[world.rank], dtypes[world.rank])
        with pytest.raises(LayoutError, match=message):
            ShardedArray(local, mesh, text)
        return world.all_reduce(1)  # the communicator still works

    assert ThreadWorld(2).run(body) == [2, 2]


def test_results_go_into_memory_that_is_there():
    whole = np.arange(15.0).reshape(5, 3)
    texts = ["A[I_dp, J_tp]", "A[I_tp, J_dp]", "A[I, J]", "A[I, J_tp]{sum_dp}", "A[I_dp_tp, J]"]

    def body(world):
        mesh = Mesh(world, dp=2, tp=2)
        for one, other in itertools.product(texts, texts):
            source = ShardedArray.from_global(whole, mesh, one)
            out = ShardedArray.from_function(lambda _: np.nan, whole.shape, mesh, other)
            memory = out.local
            assert source.redistribute(other, out=out) is out
            assert out.local is memory
            np.testing.assert_array_equal(out.to_global(), whole)
            if one != other:
                with pytest.raises(LayoutError, match="out is"):
                    source.redistribute(one, out=out)
        with pytest.raises(LayoutError, match="memory of its own"):
            source.redistribute(source.sharding, out=source)
        return world.all_reduce(1)

    assert ThreadWorld(4).run(body) == [4] * 4


def test_other_refusals():
    def body(world):
        mesh, other = Mesh(world, tp=2), Mesh(world.split(0), tp=2)
        array = ShardedArray.from_global(np.zeros(4), mesh, "A[I_tp]")
        with pytest.raises(LayoutError, match="same communicator"):
            array.redistribute("A[I]", other)
        with pytest.raises(LayoutError, match="holds shape"):
            ShardedArray(np.zeros(3), mesh, "A[I_tp]", (4,))
        with pytest.raises(CountOutOfRange):
            array.to_global(root=2)
        with pytest.raises(EmptyInput, match="rank 1 is the root"):
            ShardedArray.from_global(None, mesh, "A[I_tp]", root=1)
        with pytest.raises(LayoutError, match="2 dims"):
            ShardedArray.from_global(np.zeros(4), mesh, "A[I_tp, J]", root=1)
        return world.all_reduce(1)

    assert ThreadWorld(2).run(body) == [2, 2]


@pytest.mark.ranks(1, 2, 3, 4)
def test_moves_on_the_ranks_of_the_job(comm):
    degrees = {"tp": 2} if comm.size % 2 == 0 else {"tp": comm.size}
    whole = np.arange(7 * 6.0).reshape(7, 6)
    texts = ["A[I_dp, J_tp]", "A[I_tp_dp, J]", "A[I, J_dp_tp]", "A[I, J]", "A[I_tp, J]{sum_dp}"]
    with Mesh(comm, **degrees) as mesh:
        for one, other in itertools.product(texts, texts):
            moved = ShardedArray.from_global(whole, mesh, one).redistribute(other)
            np.testing.assert_array_equal(moved.to_global(), whole)
        # what a peer holds is what arrives here
        mine = ShardedArray.from_function(lambda box: comm.rank, (comm.size,), mesh, "A[I_dp_tp]")
        np.testing.assert_array_equal(mine.redistribute("A[I]").local, np.arange(comm.size))


def test_moves_through_node_memory():
    parsed = [Sharding.parse(text) for text in all_shardings()]
    whole = np.arange(8 * 5.0).reshape(8, 5)

    def body(world):
        mesh = Mesh(world, dp=2, tp=2)
        for one, other in itertools.product(parsed[::2], parsed):
            array = ShardedArray.from_global(whole, mesh, one).redistribute(other)
            np.testing.assert_array_equal(array.redistribute("A[I_dp, J_tp]").to_global(), whole)
        mesh.close()
        del array
        gc.collect()
        arena = world.host.arena
        before = arena.n_blocks
        array = ShardedArray.from_global(whole, Mesh(world, dp=4), "A[I_dp, J]")
        view = array.redistribute("A[I, J_dp]").local[:, :1]
        assert arena.n_blocks == before + 2
        del array
        gc.collect()
        world.barrier()
        assert arena.n_blocks == before + 1  # the view keeps its memory
        np.testing.assert_array_equal(view[:, 0], whole[:, world.rank + (world.rank > 0)])
        del view
        gc.collect()
        return arena.n_blocks == before

    assert ThreadWorld(4, node_size=4).run(body) == [True] * 4
