"""Stage assignment against trying every cut."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpipar.errors import CountOutOfRange, NonFiniteValue, OutOfRange, ScheduleError
from mpipar.pipeline_parallel import StageAssignment


def parts(values: list[int], bounds: tuple[int, ...], first: int, last: int) -> list[int]:
    edges = [0, *bounds, len(values)]
    sums = [sum(values[a:b]) for a, b in pairwise(edges)]
    sums[0] += first
    sums[-1] += last
    return sums


def sums_of(values: list[int], found: StageAssignment, first: int, last: int) -> list[int]:
    edges = [min(found.layers_in_stage(s)) for s in range(1, found.num_stages)]
    return parts(values, tuple(edges), first, last)


@settings(max_examples=200)
@given(st.data())
def test_optimal_equals_trying_every_cut(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 8))
    stages = data.draw(st.integers(1, n))
    numbers = st.lists(st.integers(0, 9), min_size=n, max_size=n)
    costs, memory = data.draw(numbers), data.draw(numbers)
    first, last, limit = (data.draw(st.integers(0, 20)) for _ in range(3))
    cuts = [
        (max(parts(costs, cut, first, last)), max(parts(memory, cut, 1, 2)))
        for cut in combinations(range(1, n), stages - 1)
    ]
    fitting = [work for work, held in cuts if held <= limit]
    arguments = {"embedding": first, "head": last, "memory": memory, "memory_limit": limit}
    arguments |= {"embedding_memory": 1, "head_memory": 2}
    if not fitting:
        least = min(held for _, held in cuts)
        with pytest.raises(ScheduleError, match=f"a limit of {least} for every stage would do"):
            StageAssignment.optimal(costs, stages, **arguments)
        return
    found = StageAssignment.optimal(costs, stages, **arguments)
    assert list(found.assignments) == sorted(found.assignments)
    assert max(sums_of(costs, found, first, last)) == min(fitting)
    assert max(sums_of(memory, found, 1, 2)) <= limit


def test_uniform() -> None:
    found = StageAssignment.uniform(10, 4)
    assert found.layers_per_stage() == (3, 3, 2, 2)
    assert found.layers_in_stage(1) == (3, 4, 5)
    assert (found.stage_of(9), found.stage_of(10), found.stage_of(-1)) == (3, None, None)


def test_ties_go_to_the_most_even_cut() -> None:
    assert sorted(StageAssignment.optimal([1] * 10, 4).layers_per_stage()) == [2, 2, 3, 3]
    assert StageAssignment.optimal([1] * 10, 4, head=2, embedding=1).layers_per_stage() == (
        2,
        3,
        3,
        2,
    )


def test_limits_per_stage() -> None:
    found = StageAssignment.optimal([1] * 6, 2, memory=[1] * 6, memory_limit=[2, 9])
    assert found.layers_per_stage() == (2, 4)


def test_refusals() -> None:
    with pytest.raises(CountOutOfRange, match=r"1\.\.3 \(layers\), got 4"):
        StageAssignment.uniform(3, 4)
    with pytest.raises(CountOutOfRange):
        StageAssignment.optimal([], 1)
    with pytest.raises(OutOfRange):
        StageAssignment.optimal([1, -1], 1)
    with pytest.raises(NonFiniteValue):
        StageAssignment.optimal([1, float("nan")], 1)
    with pytest.raises(ScheduleError, match="1 numbers for 2 layers"):
        StageAssignment.optimal([1, 2], 1, memory=[1])
