"""`mpipar schedule`: text, JSON, CSV, files, and its refusals."""

import json
from pathlib import Path

import pytest

from mpipar.cli.main import load_verb, main
from mpipar.pipeline_parallel import (
    Costs,
    Timeline,
    build_schedule,
    format_csv,
    format_schedule,
    lower,
    save_measured,
    simulate,
)


def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "1f1b", "--stages", "4", "--microbatches", "8"]) == 0
    out = capsys.readouterr().out
    assert "rank 3  .   .   .   3F0 3B0" in out
    table = {line.split()[0]: line.split() for line in out.splitlines() if "%" in line}
    assert table["1f1b"][2] == "33"
    assert table["1f1b"][4:6] == ["37.50%", "27.27%"]
    assert table["zb-v"][6] == "0.00%"
    assert len(table) == 8


def test_csv_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["schedule", "zb-h1", "--stages", "2", "--microbatches", "3", "--format", "csv"]) == 0
    )
    assert capsys.readouterr().out == format_csv(build_schedule("zb-h1", 2, 3))
    times = ["--times", "0.5,1.5,1", "--transfer", "0.25"]
    assert main(["schedule", "gpipe", "--stages", "2", "--format", "json", *times]) == 0
    out = json.loads(capsys.readouterr().out)
    assert out["schedule"]["actions"][1][0] == "1F0"
    assert out["figures"][0]["makespan_us"] == 9 * 3 + 2 * 0.25


def test_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    schedule = build_schedule("interleaved", 2, 3)
    for text in (format_schedule(schedule), format_csv(schedule), format_csv(lower(schedule))):
        path = tmp_path / "mine"
        path.write_text(text)
        trace = tmp_path / "trace.json"
        assert main(["schedule", "--file", str(path), "--trace", str(trace)]) == 0
        assert "2 ranks, 4 stages, 3 microbatches" in capsys.readouterr().out
        assert any(event["ph"] == "s" for event in json.loads(trace.read_text())["traceEvents"])


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert main(["schedule", "zb-v", "--plot", str(tmp_path / "a.svg")]) == 0
    assert "<svg" in (tmp_path / "a.svg").read_text()


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["1fb"], 3, "did you mean 1f1b?"),
        (["dualpipe-v", "--microbatches", "3"], 3, "8 is the least"),
        ([], 3, "give a NAME or a --file"),
        (["1f1b", "--file", "x"], 3, "not both"),
        (["--file", "absent"], 3, "cannot read"),
        (["1f1b", "--times", "1,2"], 2, "three numbers"),
        (["1f1b", "--times", "1,x,2"], 2, "--times"),
        (["1f1b", "--stages", "0"], 2, "at least 1 is needed"),
    ],
)
def test_refusals(
    words: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["schedule", *words]) == code
    assert said in capsys.readouterr().err


def test_a_bad_file_shows_the_grid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bad.csv"
    path.write_text("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0")
    assert main(["schedule", "--file", str(path)]) == 3
    err = capsys.readouterr().err
    assert "deadlock at rank 0" in err
    assert "rank 0: 0F0 >0B0<" in err


def test_at_most_ten_options() -> None:
    _, parser = load_verb("schedule")
    flags = [a for a in parser._actions if a.option_strings and a.dest not in ("help", "verbose")]
    assert len(flags) <= 10


def test_a_measured_timeline_stands_beside_its_simulation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    schedule = lower(build_schedule("1f1b", 2, 3))
    exact = simulate(schedule, Costs(1000, 2000, 3000))
    late = Timeline(schedule, exact.start * 1.0, exact.end * 1.0, 1, (2, 1))
    save_measured(late, tmp_path / "timeline.json")
    assert main(["schedule", "--file", str(tmp_path / "timeline.json")]) == 0
    out = capsys.readouterr().out
    # Three microbatches and one more slot of 6 ms each.
    assert "simulated, 24.00 ms" in out
    assert "measured, 24.00 ms" in out
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    names = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names >= {"rank 0 (stage 0)", "simulated rank 1 (stage 1)"}
    assert (
        main(["schedule", "--file", str(tmp_path / "none.json")]) == 3
    )  # exit code of a wrong schedule
