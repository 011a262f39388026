"""The record of real calls: bytes against hand-computed values, and what the views make of it."""

import json
from pathlib import Path

import numpy as np
import pytest

from mpipar.comm.traced import TracedCommunicator, Tracer
from mpipar.errors import CheckpointError, EmptyInput
from mpipar.report.trace import load_trace
from mpipar.report.views import (
    chrome_records,
    predicted_table,
    save_gantt,
    save_matrix,
    trace_table,
)
from mpipar.topology import PRESETS, Cluster, Figure, Origin, Tier
from mpipar.train.tracing import write_trace

MEASURED = Origin.MEASURED
ONE_GB, TEN_US = Figure(1.0, MEASURED), Figure(10.0, MEASURED)

LINE = {"op": "all_reduce", "rank": 0, "start_s": 1.0, "duration_s": 0.5, "group": "dp",
        "members": [0, 1], "bytes": 80, "dtype": "float64", "algorithm": "node"}  # fmt: skip


def written(tmp_path, *lines):
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


@pytest.mark.ranks(2)
def test_a_run_of_calls_becomes_typed_traces_with_exact_bytes(comm, tmp_path):
    folder = Path(comm.made_by_root(lambda: str(tmp_path)))
    tracer = Tracer(comm.rank)
    traced = TracedCommunicator(comm, tracer, "dp")
    traced.all_reduce(np.ones(10))
    traced.reduce_scatter(np.ones(6))
    traced.all_gather(np.ones(3))
    traced.all_to_all(np.ones(4))
    if comm.rank == 0:
        traced.send(np.ones(5), 1)
    else:
        traced.recv(np.empty(5), 0)
    traced.begin_all_reduce(np.ones(2)).wait()
    write_trace(comm, tracer, folder)
    records = load_trace(folder)
    first = [r for r in records if r.rank == 0]
    sent = [[int(n) for n in r.typed().exact_bytes_per_rank] for r in first]
    # 80 bytes in halves: 40 out and 40 on; 48 in halves; 2 x 24 gathered; 32 in halves; 40; 16.
    assert sent == [[80, 80], [24, 24], [24, 24], [16, 16], [40, 0], [16, 16]]
    assert [str(r.typed().kind) for r in first] == [
        "all-reduce", "reduce-scatter", "all-gather", "all-to-all", "point-to-point", "all-reduce",
    ]  # fmt: skip
    assert {r.rank for r in records} == {0, 1}
    events = chrome_records(records)["traceEvents"]
    starts = [e["id"] for e in events if e["ph"] == "s"]
    assert starts == [e["id"] for e in events if e["ph"] == "f"]
    assert len(starts) == 1


def test_the_table_says_for_whom_was_waited_and_the_bandwidth(tmp_path):
    late = {**LINE, "rank": 1, "start_s": 1.4, "duration_s": 0.1}
    table = trace_table(load_trace(written(tmp_path, LINE, late)))
    row = next(line for line in table.splitlines() if line.startswith("all_reduce")).split()
    # 160 bytes, 0.6 s in all, of which rank 0 stood 0.4 s for rank 1.
    assert row[1:6] == ["dp", "2", "0.000", "0.600", "0.400"]
    assert row[-2:] == ["rank", "1"]


def test_events_of_one_lane_never_overlap(tmp_path):
    twice = {**LINE, "start_s": 1.2, "sequence": 1}
    events = chrome_records(load_trace(written(tmp_path, LINE, twice)))["traceEvents"]
    lanes = {e["tid"] for e in events if e["ph"] == "X"}
    assert len(lanes) == 2


def test_the_prediction_stands_beside_what_was_measured(tmp_path):
    cluster = Cluster(
        "two", PRESETS["laptop"].nodes, (Tier("node", 4, ONE_GB, TEN_US, Figure(1.0, MEASURED)),)
    )
    late = {**LINE, "rank": 1, "start_s": 1.4, "duration_s": 0.1}
    send = {**LINE, "op": "send", "peer": 1, "bytes": 10**9, "duration_s": 2.0}
    rows = predicted_table(load_trace(written(tmp_path, LINE, late, send)), cluster).splitlines()
    # One message of 1 GB: 10 us and 1 s. All-reduce: one round of 10 us and 80 bytes on each rank.
    assert rows[1].split() == ["send", "dp", "1.0000", "2.0000", "2.00"]
    assert rows[2].split()[:4] == ["all_reduce", "dp", "0.0000", "0.2000"]


def test_a_step_is_drawn_and_a_missing_one_refused(tmp_path):
    pytest.importorskip("matplotlib")
    event = {k: LINE[k] for k in ("rank", "start_s", "duration_s")} | {"op": "forward", "step": 1}
    records = load_trace(written(tmp_path, LINE, event, {**event, "step": 2}))
    save_gantt(records, tmp_path / "g.svg")
    text = (tmp_path / "g.svg").read_text()
    assert text.count("<!-- forward -->") == 1
    assert "communication" not in text  # it was in step 0
    with pytest.raises(EmptyInput, match="no records"):
        save_gantt(records, tmp_path / "h.svg", 7)
    assert not (tmp_path / "h.svg").exists()


def test_the_matrix_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    save_matrix(load_trace(written(tmp_path, LINE)), tmp_path / "m.png")
    assert (tmp_path / "m.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "line",
    [
        b'{"op": "all_reduce"',
        b"[" * 60_000,
        b"[1]\n",
        json.dumps({**LINE, "start_s": float("nan")}).encode(),
        json.dumps({**LINE, "bytes": "<script>"}).encode(),
        json.dumps({**LINE, "rank": True}).encode(),
        json.dumps({**LINE, "members": {}}).encode(),
        json.dumps({**LINE, "rank": 7}).encode(),
        json.dumps({**LINE, "members": [0, 2**61]}).encode(),
        json.dumps({**LINE, "op": "send", "peer": 2**61}).encode(),
        json.dumps({**LINE, "op": "x" * 70_000}).encode(),
        b"\xff\xfe\n",
    ],
)
def test_a_hostile_trace_is_refused_by_file_and_line(tmp_path, line):
    file = tmp_path / "trace.jsonl"
    file.write_bytes(line)
    with pytest.raises(CheckpointError, match="line 1"):
        load_trace(file)
