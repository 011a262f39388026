"""Layouts of the cache and what moves between two of them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpipar.distributed_cache.layout import CacheLayout, cache_layouts, head_range, plan_transfer
from mpipar.errors import LayoutError, UnevenSplit


def test_smollm2_in_numbers() -> None:
    """30 layers, 3 KV heads of 64 in float32: 2 * 30 * 3 * 64 * 4 = 46,080 bytes a token."""
    (whole,) = cache_layouts(30, 3, 64)
    assert whole.bytes_per_token == 46_080
    assert whole.n_bytes(10) == 7_372_800
    thirds = cache_layouts(30, 3, 64, tp=3, pp=2)
    assert [(c.layers, c.heads) for c in thirds] == [
        ((0, 15), (0, 1)), ((0, 15), (1, 2)), ((0, 15), (2, 3)),
        ((15, 30), (0, 1)), ((15, 30), (1, 2)), ((15, 30), (2, 3)),
    ]  # fmt: skip
    assert sum(c.bytes_per_token for c in thirds) == 46_080


@pytest.mark.parametrize(
    ("heads", "tp", "near"), [(3, 2, "tp=1 or 3 would do (6"), (2, 4, "tp=2 would do (4")]
)
def test_uneven_heads_are_refused_with_the_nearest_degrees(heads: int, tp: int, near: str) -> None:
    with pytest.raises(UnevenSplit) as info:
        head_range(heads, tp, 0)
    assert f"kv_heads={heads} cannot be split exactly over tp={tp}" in str(info.value)
    assert near in str(info.value)


def test_more_ranks_than_heads_replicate_by_choice() -> None:
    assert [head_range(2, 4, r, replicate=True) for r in range(4)] == [(0, 1)] * 2 + [(1, 2)] * 2
    with pytest.raises(UnevenSplit):
        head_range(3, 4, 0, replicate=True)
    with pytest.raises(LayoutError, match="pp=2"):
        cache_layouts(2, 1, 4, pp=3)


degrees = st.sampled_from([(1, False), (2, False), (4, False), (8, True)])


@given(degrees, degrees, st.integers(1, 5), st.integers(1, 5), st.integers(0, 20))
def test_each_element_comes_once_from_one_that_holds_it(
    here: tuple[int, bool], there: tuple[int, bool], pp: int, qq: int, n_tokens: int
) -> None:
    sources = cache_layouts(5, 4, 2, tp=here[0], pp=pp, replicate=here[1], block_size=4)
    targets = cache_layouts(5, 4, 2, tp=there[0], pp=qq, replicate=there[1], block_size=3)
    count = np.zeros((len(targets), 5, 4, 20), int)
    for piece in plan_transfer(sources, targets, (0, n_tokens)):
        source = sources[piece.source]
        assert source.layers[0] <= piece.layers[0] < piece.layers[1] <= source.layers[1]
        assert source.heads[0] <= piece.heads[0] < piece.heads[1] <= source.heads[1]
        box = count[piece.target, slice(*piece.layers), slice(*piece.heads), slice(*piece.tokens)]
        box += 1
        assert piece.n_bytes == 2 * 2 * 4 * box.size
    for index, target in enumerate(targets):
        expected = np.zeros((5, 4, 20), int)
        expected[slice(*target.layers), slice(*target.heads), :n_tokens] = 1
        np.testing.assert_array_equal(count[index], expected)


def test_replicated_sources_take_turns() -> None:
    sources = [CacheLayout((0, 2), (0, 2), 4)] * 3
    targets = [CacheLayout((0, 2), (0, 2), 4)] * 6
    plan = plan_transfer(sources, targets, (0, 16))
    assert [p.source for p in plan] == [0, 1, 2, 0, 1, 2]


def test_what_nobody_holds_or_of_another_kind_is_refused() -> None:
    whole, half = CacheLayout((0, 2), (0, 2), 4), CacheLayout((0, 2), (0, 1), 4)
    with pytest.raises(LayoutError, match=r"no source holds layers 0..2, KV heads 1..2"):
        plan_transfer([half], [whole], (0, 4))
    with pytest.raises(LayoutError, match="float16"):
        plan_transfer([whole], [CacheLayout((0, 2), (0, 2), 4, dtype="float16")], (0, 4))
