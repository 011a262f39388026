"""Every generator is valid at every size, and keeps the memory it promises."""

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpipar.errors import CountOutOfRange, ScheduleError
from mpipar.pipeline_parallel import (
    SCHEDULE_NAMES,
    Costs,
    build_schedule,
    find_fault,
    placement,
    simulate,
)

HELD = Costs(held_for_weight=1)
ODD = Costs(Fraction(7, 3), 5, Fraction(1, 2), latency_us=4)


@settings(max_examples=200)
@given(st.data())
def test_valid_at_every_size(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(SCHEDULE_NAMES))
    p, m = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 20))
    options: dict[str, Any] = {
        "n_chunks": data.draw(st.integers(1, 4)),
        "group_size": data.draw(st.integers(1, 11)),
        "costs": data.draw(st.sampled_from([Costs(), HELD, ODD, Costs(0.1, 2.5, 0.7)])),
        "memory_limit": data.draw(st.integers(1, 2 * p)),
    }
    if name == "dualpipe-v" and m < 2 * p:
        with pytest.raises(ScheduleError, match=f"{2 * p} is the least"):
            build_schedule(name, p, m)
        return
    schedule = build_schedule(name, p, m, **options)
    assert find_fault(schedule) is None
    assert (schedule.n_ranks, schedule.n_microbatches) == (p, m)
    peak = max(simulate(schedule, options["costs"]).peak_memory)
    chunks = options["n_chunks"]
    group = min(options["group_size"], m)
    limits = {
        "gpipe": m,
        "1f1b": min(p, m),
        "interleaved": Fraction((chunks - 1) * group + 2 * (p - 1) + 1, chunks),
        "zb-h1": p,
        "zb-h2": 2 * p - 1,
        "zb-v": p,
        "dualpipe-v": p + 1,
        "auto": options["memory_limit"],
    }
    assert peak <= limits[name]


@settings(max_examples=60)
@given(st.integers(1, 8), st.integers(1, 24), st.integers(1, 4), st.integers(1, 9))
def test_small_groups_are_no_slower_than_groups_of_one_rank(p: int, m: int, v: int, g: int) -> None:
    """Whatever the group, interleaving never takes longer than running one after another."""
    schedule = build_schedule("interleaved", p, m, n_chunks=v, group_size=g)
    timeline = simulate(schedule, Costs().per_chunk(v))
    assert m * 3 <= timeline.makespan <= m * 3 * p


def test_automatic_obeys_tight_memory() -> None:
    for limit in (1, 2, 3, Fraction(7, 2)):
        schedule = build_schedule("auto", 4, 9, costs=HELD, memory_limit=limit)
        assert max(simulate(schedule, HELD).peak_memory) <= limit
    loose = simulate(build_schedule("auto", 4, 9, memory_limit=8))
    tight = simulate(build_schedule("auto", 4, 9, memory_limit=1))
    assert loose.longest_span < tight.longest_span
    uneven = Costs(activation=[3, 1, 2], held_for_weight=1)
    schedule = build_schedule("auto", 3, 5, costs=uneven, memory_limit=4)
    assert max(simulate(schedule, uneven).peak_memory) <= 4
    with pytest.raises(ScheduleError, match="holds no microbatch of stage 0, which needs 3"):
        build_schedule("auto", 3, 5, costs=uneven, memory_limit=2)


def test_automatic_is_no_worse_than_the_schedules_it_knows() -> None:
    for p, m in ((2, 3), (4, 8), (5, 11)):
        found = simulate(build_schedule("auto", p, m, costs=ODD, memory_limit=2 * p), ODD)
        for name in ("zb-h1", "zb-h2", "1f1b"):
            known = simulate(build_schedule(name, p, m), ODD)
            assert found.longest_span <= known.longest_span


def test_refusals() -> None:
    with pytest.raises(ScheduleError, match="did you mean zb-h1"):
        build_schedule("zbh1", 2, 2)
    assert build_schedule("ZB_H1", 2, 2).name == "zb-h1"
    for arguments in (("1f1b", 0, 1), ("gpipe", 1, 0), ("zb-v", -1, 4), ("auto", 2, 0)):
        with pytest.raises(CountOutOfRange):
            build_schedule(*arguments)
    with pytest.raises(CountOutOfRange, match="group size"):
        build_schedule("interleaved", 2, 2, group_size=0)


def test_placement() -> None:
    assert placement("loop", 3, 6) == (0, 1, 2, 0, 1, 2)
    assert placement("v", 3, 6) == (0, 1, 2, 2, 1, 0)
    with pytest.raises(ScheduleError, match="6 would"):
        placement("v", 3, 7)
    with pytest.raises(ScheduleError, match="unknown"):
        placement("w", 3, 6)
