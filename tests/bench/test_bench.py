"""The bench: its arithmetic, its formats, and a short run of everything on real ranks."""

import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpipar.bench import report
from mpipar.bench.methods import FORMS, expected, last_level_cache, n_sets, pattern
from mpipar.bench.tune import steps_of
from mpipar.comm import Op
from mpipar.comm.call import Call
from mpipar.comm.node.paths import Paths, as_toml
from mpipar.errors import UnsupportedArray

ROOT = Path(__file__).resolve().parents[2]


def bench(*words: str, n: int = 2, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "mpipar", "run", "-n", str(n), "bench", *words],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_sizes_are_read_as_powers_of_1024() -> None:
    assert [report.parsed_size(t) for t in ("8", "64K", "2m", "1G")] == [8, 65536, 2**21, 2**30]
    for wrong in ("0", "K", "-1", "1.5M"):
        with pytest.raises(ValueError):
            report.parsed_size(wrong)


def test_buffers_rotate_over_more_than_the_last_level_cache() -> None:
    assert n_sets(4096) == 1
    assert n_sets(2**22) * 2**22 > last_level_cache()
    assert n_sets(2**30) == 2


def test_right_answers_by_hand() -> None:
    assert pattern(1, 6).tolist() == [2, 3, 4, 5, 6, 2]
    assert expected("all_reduce", 0, 2, 4) is not None
    rows = {op: expected(op, 1, 2, 4) for op in FORMS}
    assert {op: None if row is None else row.tolist() for op, row in rows.items()} == {
        "all_reduce": [3, 5, 7, 9],
        "reduce_scatter": [7, 9],
        "broadcast": [1, 2, 3, 4],
        "all_gather": [1, 2, 3, 4, 2, 3, 4, 5],
        "all_to_all": [3, 4, 4, 5],
        "send_recv": [1, 2, 3, 4],
    }


def test_steps_take_another_way_only_for_a_clear_gain() -> None:
    measured = [
        (8, {"flags": 1.0, "mpi": 0.99}),
        (64, {"flags": 1.0, "mpi": 0.97}),
        (512, {"flags": 2.0, "mpi": 1.0, "stage": 1.5}),
        (4096, {"mpi": 1.0, "stage": 0.96}),
        (32768, {"mpi": 1.0, "stage": 0.5}),
    ]
    assert steps_of(measured) == ((0, "mpi"), (32768, "stage"))
    assert steps_of(measured[2:3]) == ((0, "mpi"),)


def call_of(n_bytes: int) -> Call:
    x = np.zeros(n_bytes, np.uint8)
    return Call(Op.ALL_REDUCE, x, x)


def test_a_measured_table_is_read_for_its_number_of_ranks_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "paths.toml"
    file.write_text(as_toml({"all_reduce": ((0, "stage"), (1000, "mpi"))}, 3))
    monkeypatch.setenv("MPIPAR_PATHS", str(file))
    monkeypatch.delenv("MPIPAR_ALGORITHM", raising=False)
    paths = Paths.from_environment(3)
    assert [paths.ordinary(call_of(n)) for n in (10, 999, 1000, 10**6)] == [
        "stage", "stage", "mpi", "mpi",
    ]  # fmt: skip
    assert paths.choose(call_of(10)) == "node"
    shipped = Paths.from_environment(4)
    assert [shipped.choose(call_of(n)) for n in (10, 32768, 32769)] == ["flags", "flags", "node"]
    assert paths.fingerprint != shipped.fingerprint
    for n_ranks, way in ((2, "copy"), (4, "stage")):
        assert Paths.from_environment(n_ranks).ordinary(call_of(2**22)) == way


def test_forced_algorithms_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPIPAR_ALGORITHM", "magic")
    with pytest.raises(UnsupportedArray, match="flags, stage, copy, mpi"):
        Paths.from_environment(2)


def test_a_short_run_of_every_operation_has_no_wrong_element() -> None:
    done = bench("--sizes", "8,100K", "--rounds", "5", "--format", "json")
    assert done.returncode == 0, done.stdout + done.stderr
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    seen = {(row["op"], row["form"]) for row in rows}
    assert seen >= {(op, form) for op, forms in FORMS.items() for form in (*forms, "raw")}
    assert all(row["n_wrong"] == 0 and row["time_s"] > 0 for row in rows)
    assert all(row["low_s"] <= row["time_s"] <= row["high_s"] for row in rows)
    two = next(r for r in rows if r["op"] == "all_gather" and r["n_bytes"] > 1000)
    assert two["busbw"] == pytest.approx(two["algbw"] / 2)


def test_text_and_csv_have_the_same_rows() -> None:
    text = bench("all_reduce", "--sizes", "8", "--rounds", "5")
    table = bench("all_reduce", "--sizes", "8", "--rounds", "5", "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(table.stdout)))
    assert [row["form"] for row in rows] == ["raw", *FORMS["all_reduce"]]
    assert len(text.stdout.splitlines()) == 1 + len(rows)
    assert "#wrong" in text.stdout


def test_wrong_operations_and_one_rank_are_refused() -> None:
    assert "all_to_all" in bench("nonsense").stderr
    assert "mpipar run -n 2 bench" in bench("all_reduce", n=1).stderr
