"""The simulator against a plain event loop, its two walks against each other, and its speed."""

import time
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpipar.errors import NonFiniteValue, OutOfRange, ScheduleError
from mpipar.pipeline_parallel import (
    SCHEDULE_NAMES,
    Costs,
    Kind,
    OverlappedPair,
    Schedule,
    Timeline,
    build_schedule,
    graph,
    lower,
    peak_memory,
    simulate,
    validate,
)

TIME = st.fractions(0, 20, max_denominator=6)


def replay(schedule: Schedule, times: dict[str, list[Any]], lag: list[Any]) -> dict[Any, Any]:
    """End of every computation, by trying every rank's next cell again and again."""
    rows = [list(schedule.actions(rank)) for rank in range(schedule.n_ranks)]
    owner, last = schedule.stage_to_rank.tolist(), schedule.n_stages - 1
    end: dict[Any, Any] = {}
    clock = [Fraction(0)] * schedule.n_ranks
    while any(rows):
        for rank, row in enumerate(rows):
            while row:
                parts = row[0] if isinstance(row[0], OverlappedPair) else (row[0],)
                ready, length = clock[rank], Fraction(0)
                for stage, kind, number in parts:
                    if kind == Kind.F:
                        source, boundary = ("F", stage - 1, number), stage - 1
                        outside = stage > 0
                    elif kind == Kind.W:
                        outside = False
                    else:
                        source, boundary = ("B", stage + 1, number), stage
                        outside = stage < last
                    if outside:
                        if source not in end:
                            ready = None
                            break
                        far = owner[boundary] != owner[boundary + 1]
                        ready = max(ready, end[source] + (lag[boundary] if far else 0))
                    length += times[kind.name][stage]
                if ready is None:
                    break
                clock[rank] = ready + length
                for stage, kind, number in parts:
                    if kind != Kind.W:
                        end["F" if kind == Kind.F else "B", stage, number] = clock[rank]
                row.pop(0)
    return {"end": end, "clock": clock}


@st.composite
def problems(draw: st.DrawFn) -> tuple[Schedule, Costs, dict[str, list[Any]], list[Any]]:
    name = draw(st.sampled_from(SCHEDULE_NAMES))
    p, m = draw(st.integers(1, 5)), draw(st.integers(1, 8))
    m = max(m, 2 * p) if name == "dualpipe-v" else m
    schedule = build_schedule(name, p, m)
    n = schedule.n_stages
    times = {kind: draw(st.lists(TIME, min_size=n, max_size=n)) for kind in "FIW"}
    lag = draw(st.lists(TIME, min_size=n - 1, max_size=n - 1))
    costs = Costs(times["F"], times["I"], times["W"], latency_us=lag)
    times["B"] = [i + w for i, w in zip(times["I"], times["W"], strict=True)]
    return schedule, costs, times, lag


@settings(max_examples=150)
@given(problems())
def test_equals_an_event_loop(problem: Any) -> None:
    schedule, costs, times, lag = problem
    timeline = simulate(schedule, costs)
    want = replay(schedule, times, lag)
    assert timeline.makespan == max(want["clock"])
    for index in range(len(schedule)):
        stage, kind, number = schedule.action(index)
        if kind != Kind.W:
            key = ("F" if kind == Kind.F else "B", stage, number)
            assert timeline.end_us(index) == want["end"][key]
    assert simulate(lower(schedule), costs).makespan == timeline.makespan


@settings(max_examples=60)
@given(problems())
def test_both_walks_agree(problem: Any) -> None:
    schedule, costs, _, _ = problem
    narrow = simulate(schedule, costs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph, "_WIDE", 1)
        wide = simulate(schedule, costs)
    assert np.array_equal(narrow.start, wide.start)
    assert np.array_equal(narrow.end, wide.end)


def test_floats_and_exact_numbers_agree() -> None:
    schedule = build_schedule("zb-v", 4, 9)
    exact = simulate(schedule, Costs(Fraction(5, 4), 2, 1, latency_us=Fraction(1, 2)))
    near = simulate(schedule, Costs(1.25, 2, 1, latency_us=0.5))
    assert isinstance(near.makespan, float)
    assert near.makespan == float(exact.makespan)  # all of them are binary fractions
    huge = simulate(schedule, Costs(10**30, 2, 1))
    assert huge.makespan > 9 * 10**30
    assert huge.makespan % 10 != 0  # the small times are still in it


def test_bandwidth_and_latency() -> None:
    schedule = build_schedule("gpipe", 2, 1)
    costs = Costs(1, 1, 1, latency_us=3, message_bytes=100, bandwidth_bytes_per_us=8)
    assert simulate(schedule, costs).makespan == 2 * (1 + 2) + 2 * (3 + Fraction(100, 8))


def test_arrays_as_costs() -> None:
    schedule = build_schedule("1f1b", 2, 3)
    array, listed = (Costs(times, 1, 1) for times in (np.array([2, 5]), [2, 5]))
    assert array == listed
    assert simulate(schedule, array).makespan == simulate(schedule, listed).makespan


def test_memory_by_hand() -> None:
    schedule = build_schedule("zb-h1", 2, 3)  # rank 1: F I F I W F I W W
    held = [Costs(activation=[1, 10], held_for_weight=h) for h in (0, Fraction(1, 2), 1)]
    assert [peak_memory(schedule, costs)[1] for costs in held] == [10, 15, 20]
    assert peak_memory(schedule)[0] == 2


def test_lowered_messages_carry_their_travel() -> None:
    schedule = lower(build_schedule("1f1b", 2, 1))
    timeline = simulate(schedule, Costs(1, 1, 1, latency_us=5))
    shown = {str(schedule.action(i)): i for i in range(len(schedule))}
    for name, start, end in (
        ("0SEND_F0", 1, 6),
        ("1RECV_F0", 1, 6),
        ("1F0", 6, 7),
        ("1SEND_B0", 9, 14),
        ("0B0", 14, 16),
    ):
        assert (timeline.start_us(shown[name]), timeline.end_us(shown[name])) == (start, end)


def test_refusals() -> None:
    with pytest.raises(NonFiniteValue):
        Costs(float("nan"))
    with pytest.raises(OutOfRange, match="forward_us"):
        Costs(-1)
    with pytest.raises(OutOfRange):
        Costs(held_for_weight=2)
    schedule = build_schedule("1f1b", 3, 4)
    with pytest.raises(ScheduleError, match=r"2 numbers for 3 stages; give 1 or 3"):
        simulate(schedule, Costs([1, 2]))
    with pytest.raises(ScheduleError, match="first_of_group_only"):
        simulate(schedule, wrap_transfers="none")  # type: ignore[arg-type]
    with pytest.raises(ScheduleError, match="3 starts"):
        Timeline(schedule, np.zeros(3), np.zeros(3))


@pytest.mark.parametrize(("p", "m"), [(4, 100_000), (256, 1024)])
def test_a_million_actions_a_second(p: int, m: int) -> None:
    schedule = build_schedule("1f1b", p, m)
    start = time.process_time()
    timeline = simulate(schedule, Costs(3, 4, 2, latency_us=1))
    assert len(schedule) / (time.process_time() - start) > 1_000_000
    assert max(timeline.peak_memory) == min(p, m)


@pytest.mark.slow
def test_eight_million_actions() -> None:
    p, m = 1024, 4096
    start = time.process_time()
    schedule = validate(build_schedule("1f1b", p, m))
    timeline = simulate(schedule, Costs(3, 4, 2))
    assert len(schedule) == 2 * p * m
    assert time.process_time() - start < len(schedule) / 1_000_000
    assert timeline.makespan == (m + p - 1) * 9
