"""Routing against hand-computed choices."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpipar.distributed_cache.router import Router
from mpipar.errors import CountOutOfRange


def test_cost_weighs_missing_blocks_against_load() -> None:
    router = Router(3, weight=1)
    router.load = [10, 5, 9]
    # 8 + 10, 5 + 5, 2 + 9: the middle one wins though the last lacks less
    assert router.choose([8, 5, 2]) == 1
    assert router.load == [10, 10, 9]
    assert router.work == [0, 5, 0]


def test_a_missing_block_weighs_a_hundred_units_of_load() -> None:
    router = Router(2)
    router.load = [100, 0]
    router.work = [0, 7]
    assert router.choose([3, 4]) == 0  # 400 = 400: the least work
    router = Router(2)
    router.load = [101, 0]
    assert router.choose([3, 4]) == 1  # 401 > 400


def test_ties_go_to_the_least_work_and_then_to_the_lowest_rank() -> None:
    router = Router(4)
    router.work = [5, 3, 3, 9]
    assert router.choose([0, 0, 0, 0]) == 1
    assert Router(4).choose([2, 2, 2, 2]) == 0


def test_load_halves_as_an_integer_at_each_boundary_that_was_passed() -> None:
    router = Router(2)
    router.load = [7, 9]
    router.choose([0, 0], 59_999)
    assert router.load == [7, 9]
    router.choose([0, 0], 60_000)
    assert router.load == [3, 4]
    router.choose([0, 0], 60_001)
    assert router.load == [3, 4]
    router.choose([0, 0], 185_000)  # two boundaries at once
    assert router.load == [0, 1]
    router.load = [1 << 40, 1]
    router.choose([0, 0], 10**12)  # a long pause
    assert router.load == [0, 0]


def test_round_robin_and_longest_prefix() -> None:
    turns = Router(3, "round robin")
    assert [turns.choose([9, 0, 9]) for _ in range(4)] == [0, 1, 2, 0]
    assert turns.work == [18, 0, 9]
    longest = Router(3, "longest prefix")
    longest.load = [50, 50, 0]
    assert [longest.choose(m) for m in ([4, 4, 5], [4, 3, 3])] == [0, 1]


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 50), min_size=4, max_size=4), st.integers(0, 10**6)),
        max_size=40,
    )
)
def test_every_rank_computes_the_same_and_no_work_is_lost(
    calls: list[tuple[list[int], int]],
) -> None:
    calls.sort(key=lambda call: call[1])
    one, other = Router(4), Router(4)
    chosen = [one.choose(*call) for call in calls]
    assert chosen == [other.choose(*call) for call in calls]
    assert sum(one.work) == sum(
        missing[rank] for (missing, _), rank in zip(calls, chosen, strict=True)
    )


def test_mistakes_are_named() -> None:
    with pytest.raises(CountOutOfRange, match="number of ranks"):
        Router(0)
    with pytest.raises(ValueError, match="round robin"):
        Router(2, "random")  # type: ignore[arg-type]
    with pytest.raises(CountOutOfRange, match="must be in range 2, got 3"):
        Router(2).choose([1, 2, 3])
