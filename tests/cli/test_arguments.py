"""Wrong words of the verbs: one clear message, exit code 2, and nothing is computed or written."""

import time
from pathlib import Path
from typing import Any

import pytest

from mpipar.cli.main import main

PLAN = ["plan", "gpt3-175b", "--cluster", "dgx-a100", "--batch", "64", "--devices", "8"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([*PLAN, "--devices", "0"], "--devices: a whole number of at least 1 is needed, got '0'"),
        ([*PLAN, "--devices", "-4"], "--devices"),
        ([*PLAN, "--batch", "0"], "at least 1 is needed, got '0'"),
        ([*PLAN, "--recipe", "nowhere/r.toml"], "there is no folder nowhere"),
        (["schedule", "1f1b", "--plot", "nowhere/a.svg"], "there is no folder nowhere"),
        (["schedule", "1f1b", "--plot", "a.xyz"], "'a.xyz' must end in .png or .svg or .pdf"),
        (["schedule", "1f1b", "--trace", "."], "'.' is a folder; a file is needed"),
        (["schedule", "1f1b", "--stages", "100000"], "100000 is too large: 1024 at most"),
        (["schedule", "1f1b", "--stages", "0"], "at least 1 is needed, got '0'"),
        (["trace", "run", "--gantt", "nowhere/a.svg"], "there is no folder nowhere"),
        (["trace", "run", "--chrome", "."], "is a folder"),
        (["trace", "run", "--matrix", "a"], "must end in .png"),
        (["topo", "--plot", "a.jpg"], "must end in .png"),
        (["bench", "all_redcue"], "'all_redcue' is unknown; did you mean all_reduce?"),
        (["bench", "foo"], "'foo' is unknown; there are all_reduce, reduce_scatter"),
        (["bench", "--sizes", "abc"], "size 'abc' is no number of bytes such as 8, 64K or 16M"),
        (["bench", "--sizes", "64K,0"], "size 0: at least 1 byte is needed"),
        (["bench", "--rounds", "0"], "at least 1 is needed"),
    ],
)
def test_wrong_words_are_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, words: list[str], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    start = time.monotonic()
    assert main(words) == 2
    assert time.monotonic() - start < 5
    assert says in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("verb", ["trace", "report"])
def test_a_run_without_its_record_is_named_with_the_way_to_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, verb: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([verb, "absent"]) == 1
    assert "there is no folder" in capsys.readouterr().err or verb == "trace"
    Path("run").mkdir()
    for name in ("recipe.toml", "metrics.jsonl"):
        (Path("run") / name).touch()
    assert main([verb, "run"]) == 1
    said = capsys.readouterr().err
    assert (
        "run/trace.jsonl cannot be read: No such file or directory; `mpipar train --trace`" in said
    )
