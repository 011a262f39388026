"""The Chrome trace, the Gantt picture, the comparison table and what they cost to import."""

import itertools
import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from mpipar.errors import ScheduleError
from mpipar.pipeline_parallel import (
    SCHEDULE_NAMES,
    Costs,
    build_schedule,
    chrome_trace,
    compare_schedules,
    draw_gantt,
    lower,
    save_gantt,
    simulate,
    slot_grid,
    write_chrome_trace,
)


@pytest.mark.parametrize("latency", [0, 3, 50])
@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_trace(name: str, latency: int) -> None:
    schedule = lower(build_schedule(name, 3, 7))
    timeline = simulate(schedule, Costs(3, 2, 1, latency_us=latency))
    events = json.loads(json.dumps(chrome_trace(timeline)))["traceEvents"]
    lanes: dict[Any, list[Any]] = defaultdict(list)
    boxes = [event for event in events if event["ph"] == "X"]
    for event in boxes:
        lanes[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in lanes.values():
        spans.sort()
        for (_, end), (start, _) in itertools.pairwise(spans):
            assert start >= end
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert set(lanes) <= set(named)
    assert all(name == "compute" for (_, lane), name in named.items() if lane == 0)
    assert sum(e["dur"] for e in boxes if e["cat"] == "compute") == sum(timeline.busy)
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert set(starts) == set(ends)
    assert len(starts) == sum(e["name"].count("SEND") for e in boxes)
    for key, start in starts.items():
        assert ends[key]["ts"] - start["ts"] == latency
        assert ends[key]["pid"] != start["pid"]


def test_trace_file(tmp_path: Path) -> None:
    timeline = simulate(build_schedule("dualpipe-v", 2, 4))
    write_chrome_trace(timeline, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = [event["name"] for event in events if event["ph"] == "X"]
    assert any("+" in name for name in names)
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {
        "rank 0 (stage 0, 3)",
        "rank 1 (stage 1, 2)",
    }


def test_gantt_has_one_row_per_rank_and_one_box_per_action(tmp_path: Path) -> None:
    matplotlib_figure = pytest.importorskip("matplotlib.figure")
    schedule = build_schedule("dualpipe-v", 3, 7)
    timeline = simulate(schedule)
    figure = matplotlib_figure.Figure()
    axes = figure.add_subplot()
    draw_gantt(timeline, axes)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["rank 0", "rank 1", "rank 2"]
    assert len(axes.patches) == len(schedule)
    widths = sum(box.get_width() * box.get_height() for box in axes.patches)
    assert widths == pytest.approx(0.84 * float(sum(timeline.busy)))
    for form in ("png", "svg"):
        path = tmp_path / f"picture.{form}"
        save_gantt(timeline, path)
        assert path.stat().st_size > 5_000
    save_gantt([timeline, simulate(schedule, Costs(2, 1, 1))], tmp_path / "two.svg")
    assert (tmp_path / "two.svg").read_text().count("dualpipe-v: makespan") == 2


def test_gantt_refuses_what_cannot_be_read() -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(ScheduleError, match="up to 20000"):
        draw_gantt(simulate(build_schedule("1f1b", 100, 101)), None)  # type: ignore[arg-type]


def test_comparison() -> None:
    figures, refused = compare_schedules(4, 8)
    assert not refused
    assert [row.name for row in figures] == list(SCHEDULE_NAMES)
    rates = {row.name: row.bubble_over_total for row in figures}
    assert rates["1f1b"] == rates["gpipe"] == pytest.approx(3 / 11)
    assert {row.name: row.span_bubble_over_total for row in figures}["zb-v"] == 0
    figures, refused = compare_schedules(2, 100_000, names=("1f1b", "auto"))
    assert [row.name for row in figures] == ["1f1b"]
    assert "ask for it by name" in refused[0]
    figures, refused = compare_schedules(2, 3, Costs([1, 2]), names=("1f1b", "zb-v"))
    assert [row.name for row in figures] == ["1f1b"]
    assert "give the chunks' own" in refused[0]
    _, refused = compare_schedules(4, 3)
    assert refused == ["dualpipe-v over 4 ranks is not defined for 3 microbatches; 8 is the least"]


def test_slot_grid() -> None:
    lines = slot_grid(build_schedule("1f1b", 2, 2)).splitlines()
    assert lines == [
        "rank 0  0F0 0F1 .   0B0 .   0B1",
        "rank 1  .   1F0 1B0 1F1 1B1 .",
    ]
    assert "(984 more ranks)" in slot_grid(build_schedule("1f1b", 1000, 2))
    assert "+" in slot_grid(build_schedule("dualpipe-v", 2, 4))


def test_no_picture_library_is_imported_before_it_is_needed() -> None:
    code = (
        "import sys, mpipar.pipeline_parallel\n"
        "heavy = {'matplotlib', 'networkx', 'mpi4py', 'safetensors'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
