"""Passes: what they add, what they keep, and that the result still runs."""

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpipar.errors import ScheduleError
from mpipar.pipeline_parallel import (
    SCHEDULE_NAMES,
    Action,
    Kind,
    Schedule,
    add_gradient_reduction,
    add_sends_receives,
    build_schedule,
    compute_only,
    defer_receives,
    find_fault,
    format_csv,
    lower,
    merge_backward,
    parse_csv,
    simulate,
    split_backward,
    validate,
)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    name = draw(st.sampled_from(SCHEDULE_NAMES))
    p, m = draw(st.integers(1, 6)), draw(st.integers(1, 9))
    return build_schedule(name, p, max(m, 2 * p) if name == "dualpipe-v" else m)


def halves(schedule: Schedule) -> list[Counter[Action]]:
    return [
        Counter(schedule.action(i) for i in range(int(low), int(high)))
        for low, high in zip(schedule.offsets[:-1], schedule.offsets[1:], strict=True)
    ]


@settings(max_examples=100)
@given(schedules())
def test_lowering(schedule: Schedule) -> None:
    lowered = lower(schedule)
    assert find_fault(lowered) is None
    assert compute_only(lowered) == schedule
    owner = schedule.stage_to_rank
    far = sum(int(a != b) for a, b in itertools.pairwise(owner))
    counts = Counter(lowered.kind.tolist())
    for kind in (Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B):
        assert counts[kind] == far * schedule.n_microbatches
    assert counts[Kind.REDUCE_GRAD] == schedule.n_stages
    keys = [a.message for row in halves(lowered) for a in row if a.kind.is_communication]
    assert set(Counter(keys).values()) <= {2}


@settings(max_examples=100)
@given(schedules())
def test_deferring(schedule: Schedule) -> None:
    lowered = lower(schedule)
    late = defer_receives(lowered)
    assert find_fault(late) is None
    assert halves(late) == halves(lowered)
    for rank in range(late.n_ranks):
        kept = [
            [
                a
                for a in s.actions(rank)
                if getattr(a, "kind", None) not in (Kind.RECV_F, Kind.RECV_B)
            ]
            for s in (lowered, late)
        ]
        assert kept[0] == kept[1]


def test_a_send_directly_follows_its_computation() -> None:
    """All that may stand between them is what arrives at that moment."""
    lowered = lower(build_schedule("1f1b", 4, 8))
    between = 0
    for rank in range(4):
        row = list(lowered.actions(rank))
        for i, action in enumerate(row):
            if action.kind in (Kind.SEND_F, Kind.SEND_B):
                source = Kind.F if action.kind == Kind.SEND_F else Kind.B
                made = row.index(Action(action.stage, source, action.microbatch))
                assert all(a.kind in (Kind.RECV_F, Kind.RECV_B) for a in row[made + 1 : i])
                between += i - made - 1
    assert between == 0


def test_deferred_receive_stands_before_its_use() -> None:
    late = format_csv(defer_receives(lower(build_schedule("gpipe", 2, 3)))).splitlines()
    assert late[1].startswith("1RECV_F0,1F0,1RECV_F1,1F1,1RECV_F2,1F2,1B2,1SEND_B2")
    early = format_csv(lower(build_schedule("gpipe", 2, 3))).splitlines()
    assert early[1].startswith("1RECV_F0,1RECV_F1,1F0")


def test_merging() -> None:
    merged = merge_backward(parse_csv("0F0,0F1,0I0,0W0,0I1,0F2,0W1,0I2,0W2"))
    assert format_csv(merged).strip() == "0F0,0F1,0B0,0I1,0F2,0W1,0B2"
    assert find_fault(merged) is None
    split = parse_csv("0F0,0I0\n1F0,1I0,1W0\n")  # rank 0's W is missing: nothing to merge across
    assert format_csv(merge_backward(split)) == "0F0,0I0\n1F0,1B0\n"


def test_gradient_reduction_follows_the_last_gradient() -> None:
    rows = format_csv(add_gradient_reduction(build_schedule("zb-v", 2, 2))).splitlines()
    for rank, stages in ((0, (0, 3)), (1, (1, 2))):
        cells = rows[rank].split(",")
        for stage in stages:
            at = cells.index(f"{stage}REDUCE_GRAD")
            assert cells[at - 1] in (f"{stage}W1", f"{stage}B1")
            assert not any(cell.startswith(f"{stage}W") for cell in cells[at:])


def test_what_counts_as_lowered() -> None:
    plain = build_schedule("1f1b", 2, 2)
    assert not plain.is_lowered
    assert not add_gradient_reduction(plain).is_lowered
    assert lower(plain).is_lowered
    assert build_schedule("1f1b", 1, 2).is_lowered


def test_passes_refuse_what_they_did_already() -> None:
    lowered = lower(build_schedule("1f1b", 2, 2))
    with pytest.raises(ScheduleError, match="already"):
        add_sends_receives(lowered)
    with pytest.raises(ScheduleError, match="already"):
        add_gradient_reduction(lowered)
    stuck = parse_csv("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0")
    with pytest.raises(ScheduleError, match="cannot run"):
        add_sends_receives(stuck)
    stuck = parse_csv("0RECV_B0,0F0,0SEND_F0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0")
    assert find_fault(stuck) is not None


def test_backwards_whose_gradient_leaves_the_rank_are_cut_in_two():
    whole = build_schedule("1f1b", 2, 2)
    cut = split_backward(whole)
    assert format_csv(cut) == "0F0,0F1,0B0,0B1\n1F0,1I0,1W0,1F1,1I1,1W1\n"
    assert merge_backward(cut) == whole
    # The last gradient crosses three boundaries, and each time it leaves one W earlier.
    assert simulate(build_schedule("1f1b", 4, 8)).makespan == 33
    assert simulate(split_backward(build_schedule("1f1b", 4, 8))).makespan == 30
    for name in ("zb-h1", "dualpipe-v"):
        schedule = build_schedule(name, 2, 4)
        validate(split_backward(schedule))
    assert split_backward(build_schedule("zb-h1", 2, 4)) == build_schedule("zb-h1", 2, 4)
    inside = parse_csv("0F0,0F1,(0F2;1B0)OVERLAP_F_B,1B1,0B0\n")
    assert split_backward(inside) == inside
