"""The one remainder rule: exact, spread, pad."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpipar.errors import CountOutOfRange, UnevenSplit
from mpipar.units import remainder

totals = st.integers(0, 5000)
parts = st.integers(1, 60)


@pytest.mark.parametrize(
    ("total", "n_parts", "sizes"),
    [
        (10, 3, (4, 3, 3)),
        (10, 4, (3, 3, 2, 2)),
        (2, 4, (1, 1, 0, 0)),
        (7, 5, (2, 2, 1, 1, 1)),
        (0, 2, (0, 0)),
        (6, 1, (6,)),
    ],
)
def test_spread_known_values(total, n_parts, sizes):
    assert remainder.spread_sizes(total, n_parts) == sizes


@pytest.mark.parametrize(
    ("total", "n_parts", "ranges"),
    [
        (10, 3, [(0, 3), (3, 6), (6, 10)]),
        (2, 4, [(0, 0), (0, 0), (0, 0), (0, 2)]),
        (7, 5, [(0, 1), (1, 2), (2, 3), (3, 4), (4, 7)]),
    ],
)
def test_last_takes_rest_known_values(total, n_parts, ranges):
    found = [remainder.last_takes_rest_range(total, n_parts, i) for i in range(n_parts)]
    assert found == ranges


@given(totals, parts)
def test_both_rules_tile_the_total(total, n_parts):
    for rule in (remainder.spread_range, remainder.last_takes_rest_range):
        ranges = [rule(total, n_parts, i) for i in range(n_parts)]
        assert [i for start, stop in ranges for i in range(start, stop)] == list(range(total))
    sizes = remainder.spread_sizes(total, n_parts)
    ranges = [remainder.spread_range(total, n_parts, i) for i in range(n_parts)]
    assert [stop - start for start, stop in ranges] == list(sizes)
    assert list(sizes) == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(1, 3000), parts)
def test_exact_divides_or_names_what_would(total, n_parts):
    if total % n_parts == 0:
        assert remainder.exact_size(total, n_parts) * n_parts == total
        return
    with pytest.raises(UnevenSplit) as caught:
        remainder.exact_size(total, n_parts, "width", "tp")
    text = str(caught.value)
    below = max(d for d in range(1, n_parts) if total % d == 0)
    assert f"width={total} cannot be split exactly over tp={n_parts}; tp={below}" in text


@given(totals, parts)
def test_padding_is_the_smallest_multiple(total, n_parts):
    padded = remainder.padded_size(total, n_parts)
    assert padded % n_parts == 0
    assert 0 <= padded - total < n_parts


@given(st.integers(1, 4000))
def test_divisors_against_trial(total):
    assert remainder.divisors(total) == tuple(d for d in range(1, total + 1) if total % d == 0)


def test_bad_requests_are_refused():
    for rule in (remainder.exact_size, remainder.spread_sizes, remainder.padded_size):
        with pytest.raises(CountOutOfRange, match="number of parts"):
            rule(4, 0)
        with pytest.raises(CountOutOfRange, match="total to split"):
            rule(-1, 2)
    for rule in (remainder.spread_range, remainder.last_takes_rest_range):
        with pytest.raises(CountOutOfRange, match=r"range 0\.\.2, got 2"):
            rule(4, 2, 2)
