"""Data parallelism of one's own arrays: agreement, ties, scale contract, clipping."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpipar import DataParallel, ThreadWorld
from mpipar.comm import IdentityCommunicator, Op
from mpipar.errors import (
    CollectiveMismatch,
    EmptyInput,
    NonFiniteValue,
    OutOfRange,
    UnsupportedArray,
)


def parameters_of(rank, dtype=np.float64):
    """Three arrays whose values differ between ranks before they meet."""
    rng = np.random.default_rng(rank)
    shapes = {"w": (3, 2), "b": (2,), "empty": (0, 4)}
    return {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()}


def linear_gradients(p, x, y, scale):
    """Gradients of ``scale * sum |x w + b - y|^2 / 2``."""
    residual = scale * (x @ p["w"] + p["b"] - y)
    return {"w": x.T @ residual, "b": residual.sum(axis=0), "empty": np.zeros((0, 4))}


# -- start -------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_all_ranks_start_with_the_values_of_rank_0_in_their_own_arrays(n):
    def body(comm):
        mine = parameters_of(comm.rank)
        mine["f"] = np.asfortranarray(np.full((3, 4), comm.rank, float))[::-1]
        dp = DataParallel(comm, mine)
        assert all(dp.parameters[name] is mine[name] for name in mine)
        return mine

    expected = {**parameters_of(0), "f": np.zeros((3, 4))}
    for mine in ThreadWorld(n).run(body):
        for name, array in expected.items():
            np.testing.assert_array_equal(mine[name], array)


def test_the_order_is_rank_0s_whatever_the_order_of_the_others():
    def body(comm):
        mine = parameters_of(comm.rank)
        names = list(mine) if comm.rank == 0 else sorted(mine, reverse=comm.rank == 1)
        dp = DataParallel(comm, {n: mine[n] for n in names}, bucket_bytes=1)
        return list(dp.parameters), dp.buckets

    results = ThreadWorld(3).run(body)
    assert results[0][0] == ["w", "b", "empty"]
    assert all(r == results[0] for r in results)


def refused(n, body):
    """The one error that all ranks raise; the communicator still works afterwards."""

    def guarded(comm):
        with pytest.raises(Exception) as caught:
            body(comm)
        assert int(comm.all_reduce(1)) == n
        return type(caught.value), str(caught.value)

    outcomes = ThreadWorld(n, deadline_s=20).run(guarded)
    assert len(set(outcomes)) == 1
    return outcomes[0]


def on_rank_1(comm, change):
    mine = parameters_of(0)
    if comm.rank == 1:
        change(mine)
    return mine


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda p: p.pop("b"), "'b' is (2,) float64 on rank 0 and missing on rank 1"),
        (lambda p: p.update(c=np.ones(1)), "'c' is missing on rank 0 and (1,) float64 on rank 1"),
        (lambda p: p.update(b=np.ones(3)), "'b' is (2,) float64 on rank 0 and (3,) float64 on"),
        (lambda p: p.update(b=np.ones(2, "f")), "(2,) float64 on rank 0 and (2,) float32 on rank"),
    ],
)
def test_other_names_shapes_or_dtypes_on_a_rank_are_refused_on_all(change, says):
    kind, message = refused(3, lambda comm: DataParallel(comm, on_rank_1(comm, change)))
    assert kind is CollectiveMismatch
    assert says in message


def read_only(p):
    p["w"].flags.writeable = False


@pytest.mark.parametrize(
    ("change", "kind", "says"),
    [
        (read_only, UnsupportedArray, "on rank 1: parameter 'w' is read-only"),
        (lambda p: p.update(w=np.ones((3, 2), int)), UnsupportedArray, "'w' has dtype dtype('int"),
        (lambda p: p.update(w=np.ones((3, 2), ">f8")), UnsupportedArray, "native byte order"),
        (lambda p: p.update(w=np.ones((3, 2), "f,f")), UnsupportedArray, "numbers are needed"),
        (lambda p: p.update(w=[1.0]), UnsupportedArray, "'w' (list) has no host memory"),
        (lambda p: p.clear(), EmptyInput, "no parameters"),
    ],
)
def test_what_one_rank_cannot_use_is_refused_on_all(change, kind, says):
    found, message = refused(3, lambda comm: DataParallel(comm, on_rank_1(comm, change)))
    assert found is kind
    assert says in message


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"frozen": ["q"]}, "frozen names q, which is no parameter; one of w, b, empty"),
        ({"tied": [("w", "q")]}, "tied names q, which is no parameter"),
        ({"tied": [("w", "b")]}, "tied parameters w, b differ: (2,) float64 and (3, 2) float64"),
        ({"frozen": ["b"]}, "'b' is trained on rank 0 and frozen on rank 1"),
        ({"bucket_bytes": 9}, "bucket_bytes is 4194304 on rank 0 and 9 on rank 1"),
    ],
)
def test_options_are_checked_and_compared(options, says):
    def body(comm):
        DataParallel(comm, parameters_of(0), **(options if comm.rank == 1 else {}))

    _, message = refused(2, body)
    assert says in message


def test_a_tie_on_one_rank_only_is_refused():
    def body(comm):
        a = np.ones(2)
        DataParallel(comm, {"a": a, "b": a if comm.rank else np.ones(2)})

    kind, message = refused(2, body)
    assert kind is CollectiveMismatch
    assert "'b' is trained on rank 0 and trained as a copy of 'a' in the array of 'a'" in message


def test_parameters_that_overlap_without_being_one_view_are_refused():
    table = np.ones((3, 2))
    with pytest.raises(UnsupportedArray, match="'head' and 'tok' share memory"):
        DataParallel(IdentityCommunicator(), {"tok": table, "head": table.T})
    DataParallel(IdentityCommunicator(), {"tok": table, "head": table.T}, frozen=["head"])
    fused = np.ones((4, 6))  # side by side in one array: no shared element
    DataParallel(IdentityCommunicator(), {"q": fused[:, :3], "k": fused[:, 3:], "r": fused[:0]})


# -- gradients -----------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    n=st.integers(1, 4),
    counts=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4), min_size=4, max_size=4),
    bucket_bytes=st.sampled_from([1, 40, 1 << 20]),
    seed=st.integers(0, 99),
)
def test_scale_contract(n, counts, bucket_bytes, seed):
    """Sums over ranks and microbatches, any uneven counts: the gradient of the global mean."""
    counts = counts[:n]
    counts[0][0] += 1  # at least one token in the world
    rng = np.random.default_rng(seed)
    data = [[(rng.normal(size=(c, 3)), rng.normal(size=(c, 2))) for c in row] for row in counts]
    start = parameters_of(0)
    x, y = (np.concatenate([m[k] for row in data for m in row]) for k in (0, 1))
    expected = linear_gradients(start, x, y, 1 / len(x))

    def body(comm):
        dp = DataParallel(comm, parameters_of(comm.rank), bucket_bytes=bucket_bytes)
        scale = dp.loss_scale(sum(counts[comm.rank]))
        for i, (xs, ys) in enumerate(data[comm.rank]):
            for name, part in linear_gradients(dp.parameters, xs, ys, scale).items():
                dp.gradients[name][...] = part + (dp.gradients[name] if i else 0)
                if i == len(data[comm.rank]) - 1:
                    dp.ready(name)
        dp.finish()
        return {n: g.copy() for n, g in dp.gradients.items()}, dp.gradient_norm()

    norm = np.sqrt(sum((g**2).sum() for g in expected.values()))
    for gradients, found in ThreadWorld(n, seed=seed).run(body):
        for name, reference in expected.items():
            np.testing.assert_allclose(gradients[name], reference, rtol=1e-12, atol=1e-13)
        assert found == pytest.approx(norm, rel=1e-12)


def test_ranks_may_produce_gradients_in_different_orders():
    """HAZARD: sums of different tensors, when each rank reduces in its own order."""
    names = [f"p{i}" for i in range(6)]

    def body(comm):
        dp = DataParallel(comm, {n: np.zeros(i + 1) for i, n in enumerate(names)}, bucket_bytes=24)
        assert len(dp.buckets) > 2
        for step in range(3):
            for name in np.random.default_rng(10 * comm.rank + step).permutation(names):
                dp.gradients[name][...] = 10 ** names.index(name) * (comm.rank + 1) + step
                dp.ready(name)
            dp.finish()
            for i, name in enumerate(names):
                np.testing.assert_array_equal(dp.gradients[name], 10**i * 6 + 3 * step)

    for seed in range(5):
        ThreadWorld(3, seed=seed).run(body)


def test_bucket_of_the_last_layer_travels_before_the_first_layer_is_done():
    seen = []

    def body(comm):
        dp = DataParallel(comm, {"first": np.zeros(4), "last": np.zeros(4)}, bucket_bytes=8)
        seen.clear()
        dp.ready("first")
        assert not seen  # the agreed order begins with the last layer
        dp.ready("last")
        assert len(seen) == 2
        dp.finish()

    def note(rank, call):
        if call.op is Op.ALL_REDUCE:
            seen.append(rank)

    ThreadWorld(1, on_call=note).run(body)


def test_frozen_parameters_have_no_gradient_and_are_left_out_of_the_norm():
    def body(comm):
        dp = DataParallel(comm, parameters_of(comm.rank), frozen=["w"])
        assert dp.trainable == ("b", "empty")
        assert set(dp.gradients) == {"b", "empty"}
        np.testing.assert_array_equal(dp.parameters["w"], parameters_of(0)["w"])  # still equal
        dp.ready("w")  # ignored
        dp.gradients["b"][...] = [3.0, 4.0]
        dp.finish()
        assert dp.gradient_norm() == 5.0 * comm.size
        assert dp.communicates == (Op.ALL_REDUCE, 16)

    ThreadWorld(2).run(body)
    everything = DataParallel(IdentityCommunicator(), parameters_of(0), frozen=parameters_of(0))
    everything.finish()
    assert everything.trainable == ()
    assert everything.gradient_norm() == 0.0


def tie(kind):
    table = np.arange(6.0).reshape(2, 3)
    head = table if kind == "memory" else table + 100
    return {"tok": table, "mid": np.ones(2), "head": head}, [("tok", "head")] * (kind == "copies")


@pytest.mark.parametrize("kind", ["memory", "copies"])
def test_tied_parameters_sum_their_gradients_and_count_once(kind):
    def body(comm):
        mine, tied = tie(kind)
        dp = DataParallel(comm, mine, tied=tied, bucket_bytes=1)
        np.testing.assert_array_equal(mine["head"], np.arange(6.0).reshape(2, 3))
        assert dp.trainable == (("tok", "mid") if kind == "memory" else ("tok", "mid", "head"))
        for step in range(2):
            dp.gradients["head"][...] = 1.0 + step
            dp.ready("head")
            dp.gradients["mid"][...] = 0.0
            dp.ready("mid")
            dp.gradients["tok"][...] = 2.0 * comm.rank
            dp.ready("tok")
            dp.finish()
            # (1 + step) on both ranks and 0 + 2
            for name in ("tok", "head"):
                np.testing.assert_array_equal(dp.gradients[name], 2 * (1 + step) + 2)
        norm = np.sqrt(6 * 6.0**2)
        assert dp.clip(1.0) == pytest.approx(norm, rel=1e-15)
        np.testing.assert_allclose(dp.gradients["head"], 6.0 / norm, rtol=1e-15)
        assert dp.gradient_norm() == pytest.approx(1.0, rel=1e-15)
        for name in dp.trainable:
            dp.parameters[name] -= dp.gradients[name]
        np.testing.assert_allclose(mine["tok"], np.arange(6).reshape(2, 3) - 6 / norm, rtol=1e-15)
        np.testing.assert_array_equal(mine["tok"], mine["head"])
        # The bytes of one copy travel.
        assert dp.communicates == (Op.ALL_REDUCE, (6 + 2) * 8)

    ThreadWorld(2).run(body)


def test_three_names_of_which_two_share_memory_and_one_is_a_copy():
    def body(comm):
        shared = np.ones(2)
        mine = {"a": np.zeros(2), "b": shared, "c": shared}
        dp = DataParallel(comm, mine, tied=[("a", "b")])
        assert dp.trainable == ("a", "b")
        for name in mine:
            dp.gradients[name][...] = 1.0
            dp.ready(name)
        dp.finish()
        for name in mine:
            np.testing.assert_array_equal(dp.gradients[name], 3.0 * comm.size)

    ThreadWorld(2).run(body)


def test_freezing_one_of_the_tied_names_freezes_all():
    mine, tied = tie("copies")
    dp = DataParallel(IdentityCommunicator(), mine, tied=tied, frozen=["head"])
    assert dp.trainable == ("mid",)


def test_missing_gradients_count_as_zero_after_zero_gradients():
    def body(comm):
        dp = DataParallel(comm, parameters_of(comm.rank))
        for step in range(2):
            dp.zero_gradients()
            if comm.rank == 0:  # the other ranks' backward never comes to b
                dp.gradients["b"][...] = 7.0 + step
                dp.ready("b")
            dp.ready("w")
            dp.finish()
            np.testing.assert_array_equal(dp.gradients["b"], 7.0 + step)
            np.testing.assert_array_equal(dp.gradients["w"], 0.0)

    ThreadWorld(3).run(body)


def test_ready_twice_in_a_step_is_refused():
    """It would mean that a later microbatch writes into a bucket that is under way."""
    dp = DataParallel(IdentityCommunicator(), parameters_of(0))
    dp.ready("w")
    with pytest.raises(CollectiveMismatch, match=r"ready\('w'\) for the second time"):
        dp.ready("w")
    dp.finish()
    dp.ready("w")  # a new step
    with pytest.raises(CollectiveMismatch, match="no parameter 'q'"):
        dp.ready("q")


@pytest.mark.parametrize(
    ("dtype", "values", "total"),
    [
        (np.float16, [30000, 30000, -30000, -28000], 2000),  # 60000 + 30000 would overflow
        (ml_dtypes.bfloat16, [256, 1, 1, 2], 260),  # 256 + 1 is 256 in bfloat16
        (np.complex128, [1 + 1j, 1 + 1j, 1 + 1j, 2j], 3 + 5j),
    ],
)
def test_other_dtypes(dtype, values, total):
    def body(comm):
        dp = DataParallel(comm, parameters_of(comm.rank, dtype))
        dp.gradients["w"][...] = np.asarray(values[comm.rank]).astype(dtype)
        dp.finish()
        np.testing.assert_array_equal(dp.gradients["w"], np.full((3, 2), total, dtype))
        assert dp.gradient_norm() == pytest.approx(np.sqrt(6) * abs(total), rel=1e-12)
        dp.clip(1.0)
        assert dp.gradients["w"].dtype == dtype
        assert dp.gradient_norm() == pytest.approx(1.0, rel=1e-2)

    ThreadWorld(4).run(body)


# -- clipping and scale --------------------------------------------------------------------


@given(st.floats(0.1, 20.0), st.integers(1, 3))
def test_clip(max_norm, n):
    def body(comm):
        dp = DataParallel(comm, {"a": np.zeros(1), "b": np.zeros(1)}, bucket_bytes=1)
        dp.gradients["a"][...], dp.gradients["b"][...] = 3.0, 4.0
        dp.finish()
        assert dp.clip(max_norm) == 5.0 * n
        factor = min(1.0, max_norm / (5.0 * n))
        np.testing.assert_allclose(dp.gradients["a"], 3.0 * n * factor, rtol=1e-14)
        np.testing.assert_allclose(dp.gradients["b"], 4.0 * n * factor, rtol=1e-14)

    ThreadWorld(n).run(body)


def test_parameters_need_names():
    with pytest.raises(UnsupportedArray, match="parameters are a list; a mapping of names"):
        DataParallel(IdentityCommunicator(), [np.ones(3)])


def test_wrong_numbers_are_refused():
    dp = DataParallel(IdentityCommunicator(), parameters_of(0))
    with pytest.raises(OutOfRange, match="max_norm must be in range above 0, got 0"):
        dp.clip(0.0)
    with pytest.raises(EmptyInput, match="0 items here and 0 on all ranks"):
        dp.loss_scale(0)
    dp.gradients["b"][1] = np.nan
    with pytest.raises(NonFiniteValue, match="gradient of b must be finite"):
        dp.gradient_norm()


def test_a_rank_without_items_takes_part_in_the_scale():
    def body(comm):
        dp = DataParallel(comm, parameters_of(comm.rank))
        return dp.loss_scale(8 if comm.rank == 1 else 0)

    assert ThreadWorld(3).run(body) == [0.125] * 3


@pytest.mark.parametrize("n", [2, 3])
def test_buckets_lie_in_the_nodes_memory_and_are_given_back(n):
    def body(comm):
        arena = comm.host.arena
        before = arena.n_blocks
        dp = DataParallel(comm, parameters_of(comm.rank))
        buckets = arena.n_blocks - before
        place = arena.memory.locate(dp.gradients["empty"].base)
        dp.gradients["b"][...] = comm.rank + 1
        dp.finish()
        total = dp.gradients["b"].copy()
        dp.close()
        assert not dp.gradients
        return total, buckets, place, arena.n_blocks - before

    for total, buckets, place, left in ThreadWorld(n, node_size=n).run(body):
        np.testing.assert_array_equal(total, np.full(2, n * (n + 1) / 2))
        assert buckets == 1
        assert place >= 0
        assert left == 0
