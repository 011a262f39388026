"""Text and CSV forms, the grid, and what is refused in them."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpipar.errors import ScheduleError
from mpipar.pipeline_parallel import (
    SCHEDULE_NAMES,
    Action,
    Kind,
    OverlappedPair,
    Schedule,
    build_schedule,
    defer_receives,
    find_fault,
    format_csv,
    format_schedule,
    lower,
    parse_action,
    parse_csv,
    parse_schedule,
    read_schedule,
)
from mpipar.pipeline_parallel.text import order_grid

DATA = Path(__file__).parent.parent / "data"


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    name = draw(st.sampled_from(SCHEDULE_NAMES))
    p, m = draw(st.integers(1, 4)), draw(st.integers(1, 7))
    m = max(m, 2 * p) if name == "dualpipe-v" else m
    schedule = build_schedule(name, p, m, n_chunks=draw(st.integers(1, 3)))
    form = draw(st.sampled_from(["plain", "lowered", "deferred"]))
    if form == "plain":
        return schedule
    return lower(schedule) if form == "lowered" else defer_receives(lower(schedule))


@settings(max_examples=100)
@given(schedules())
def test_round_trips(schedule: Schedule) -> None:
    again = parse_schedule(format_schedule(schedule))
    assert again == schedule
    assert hash(again) == hash(schedule)
    rows = parse_csv(format_csv(schedule), name=schedule.name)
    assert rows == schedule


def test_actions() -> None:
    assert parse_action(" 2F0 ") == Action(2, Kind.F, 0)
    assert str(Action(3, Kind.SEND_F, 1)) == "3SEND_F1"
    assert parse_action("1REDUCE_GRAD") == Action(1, Kind.REDUCE_GRAD)
    pair = parse_action("(0F7;7B3)OVERLAP_F_B")
    assert isinstance(pair, OverlappedPair)
    assert str(pair) == "(0F7;7B3)OVERLAP_F_B"


@pytest.mark.parametrize(
    "text",
    ["", "F0", "2X0", "2F", "2F0x", "-1F0", "1REDUCE_GRAD3", "(0B1;0F2)OVERLAP_F_B", "(0F1)"],
)
def test_no_action(text: str) -> None:
    with pytest.raises(ScheduleError, match=r"2F0|pair|microbatch"):
        parse_action(text)


def test_messages_have_one_key_at_both_ends() -> None:
    for sends, receives in (("3SEND_F1", "4RECV_F1"), ("4SEND_B1", "3RECV_B1")):
        ends = parse_action(sends), parse_action(receives)
        assert ends[0].message == ends[1].message
    assert parse_action("3SEND_F1").message == ("forward", 3, 1)
    assert parse_action("4SEND_B1").message == ("backward", 3, 1)
    with pytest.raises(ScheduleError, match="moves no message"):
        _ = Action(0, Kind.F, 0).message


def test_pytorch_lowered_csv() -> None:
    text = (DATA / "pipelining_interleaved_lowered.csv").read_text()
    schedule = parse_csv(text)
    assert find_fault(schedule) is None
    assert schedule.is_lowered
    assert schedule.stage_to_rank.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    kept = [
        [cell for cell in line.split(",") if not cell.endswith("SHARD")]
        for line in text.splitlines()
    ]
    assert format_csv(schedule).splitlines() == [",".join(row) for row in kept]


def test_pytorch_dualpipe_v_is_ours() -> None:
    text = (DATA / "pipelining_dualpipe_v.csv").read_text()
    assert format_csv(build_schedule("dualpipe-v", 4, 8)) == text


def test_files(tmp_path: Path) -> None:
    schedule = build_schedule("zb-v", 3, 4)
    path = tmp_path / "my schedule.txt"
    path.write_text("# mine\n" + format_schedule(schedule))
    assert read_schedule(path) == schedule
    path.write_text(format_csv(schedule))
    again = read_schedule(path)
    assert again.name == "my_schedule"
    assert list(again.actions(1)) == list(schedule.actions(1))
    with pytest.raises(ScheduleError, match="cannot read"):
        read_schedule(tmp_path / "absent")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "first line"),
        ("schedule x ranks=1", "placement=loop"),
        (
            "schedule x ranks=2 stages=2 microbatches=1 placement=loop\nrank 0: 0F0\n",
            "1 rank lines",
        ),
        (
            "schedule x ranks=1 stages=1 microbatches=1 placement=loop\nrank 1: 0F0\n",
            "expected a line 'rank 0",
        ),
        ("schedule x ranks=2 stages=3 microbatches=1 placement=loop\na\nb\n", "2 would"),
        (
            "schedule x ranks=1 stages=1 microbatches=1 placement=loop\nrank 0: 0F7\n",
            "microbatch 7",
        ),
        (
            "schedule x ranks=1 stages=1 microbatches=1 placement=4\nrank 0: 0F0\n",
            "rank of a stage",
        ),
    ],
)
def test_refused_texts(text: str, match: str) -> None:
    with pytest.raises(ScheduleError, match=match):
        parse_schedule(text)


def test_refused_csv_names_the_cell() -> None:
    with pytest.raises(ScheduleError, match="row 1, column 2: 'what'"):
        parse_csv("0F0,0B0\n1F0,,what\n")
    with pytest.raises(ScheduleError, match="no rank has an action of stage 1"):
        parse_csv("0F0,0B0\n2F0,2B0\n")


def test_grid_marks_the_cell_and_keeps_small() -> None:
    grid = order_grid(build_schedule("1f1b", 4, 8), 2, 3).splitlines()
    assert len(grid) == 4
    assert ">2F2<" in grid[2]
    assert (
        len(
            {
                line.index("1", 7)
                for line in order_grid(build_schedule("1f1b", 2, 2), 1, 0).splitlines()
                if " 1" in line
            }
        )
        == 1
    )
    large = order_grid(build_schedule("1f1b", 1000, 2000), 500, 3000)
    assert ">500" in large
    assert len(large) < 3000
    assert "more ranks" in large
