"""Reports of runs: who may see them, and that nothing private gets into a public one."""

import copy
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpipar.cli.main import main
from mpipar.comm.trace_types import ParallelTraceVisibility as Visibility
from mpipar.errors import CheckpointError, InvalidPublicReport
from mpipar.report import run_report
from mpipar.report.page import markdown, page
from mpipar.report.run_report import INPUTS, report_record, write_review

SECRETS = (
    "node-0421.cluster.local", "jdoe_private", "/home/jdoe/secret/run", "10.77.3.201",
    "fe80::9a03:9bff:fe11", "GPU-8f2c1d3e-55aa-4b1e-9c0f-aa00bb11cc22", "SLURM_JOB_ID=48151623",
    "<script>alert(1)</script>",
)  # fmt: skip
TRACE = [
    {"op": "all_reduce", "rank": r, "start_s": 1.0 + r, "duration_s": 0.5, "group": "dp",
     "members": [0, 1], "bytes": 80, "dtype": "float64", "algorithm": "node",
     "coordinate": {"dp": r, "pp": 0}} for r in (0, 1)
] + [{"op": "forward", "rank": 0, "start_s": 0.0, "duration_s": 0.25}]  # fmt: skip
RUN = {
    "recipe": {
        "model": {"kind": "gpt", "width": 128, "sequence": 8},
        "train": {"batch": 16, "dtype": "float32", "schedule": "1f1b"},
        "plan": {"step_s": 0.5, "cluster": "x"},
        "data": {"path": ""},
    },
    "metrics": [{"step": n, "loss": 5.0 - n, "tokens_per_s": 256.0} for n in (1, 2, 3)],
    "trace": TRACE,
    "environment": {"python": [3, 11, 2], "mpi": "MPICH", "mpi_version": [5, 0, 2], "cores": 2},
}


def toml(tables):
    """Enough TOML for text, numbers; JSON strings are TOML strings."""
    lines = []
    for name, table in tables.items():
        lines += [f"[{name}]", *(f"{json.dumps(k)} = {json.dumps(v)}" for k, v in table.items())]
    return "\n".join(lines)


def written(folder, run=RUN):
    folder.mkdir(exist_ok=True)
    (folder / "recipe.toml").write_text(toml(run["recipe"]))
    for name in ("metrics", "trace"):
        lines = "".join(json.dumps(line) + "\n" for line in run[name])
        (folder / f"{name}.jsonl").write_text(lines)
    (folder / "environment.json").write_text(json.dumps(run["environment"]))
    return folder


@st.composite
def planted(draw):
    """A run with secrets in some fields, known and unknown, as values and as names."""
    run = copy.deepcopy(RUN)
    records = [*run["recipe"].values(), *run["metrics"], *run["trace"], run["environment"]]
    for _ in range(draw(st.integers(1, 8))):
        record, secret = draw(st.sampled_from(records)), draw(st.sampled_from(SECRETS))
        name = draw(st.sampled_from([*record, "hostname", secret]))
        record[name] = secret
    return run


def leaks(folder):
    """Secrets in the public forms of a run; an input that is refused publishes nothing."""
    try:
        write_review(folder, "jdoe_private", Visibility.PUBLIC)
        record = report_record(folder, Visibility.PUBLIC)
    except CheckpointError:
        return None
    text = json.dumps(record) + markdown(record) + page(record)
    return [s for s in (*SECRETS, "alert(1)") if s in text]


def test_nothing_planted_in_any_field_reaches_a_public_report(tmp_path_factory):
    outcomes = []

    @settings(max_examples=150)
    @given(planted())
    def holds(run):
        found = leaks(written(tmp_path_factory.mktemp("run"), run))
        outcomes.append(found)
        assert not found

    holds()
    assert outcomes.count([]) > len(outcomes) / 4  # that many were published; the rest refused


def test_the_property_catches_a_list_that_lets_text_through(tmp_path, monkeypatch):
    run = copy.deepcopy(RUN)
    run["recipe"]["model"]["kind"] = SECRETS[0]
    assert leaks(written(tmp_path / "a", run)) == []
    loose = {**run_report.FIELDS, "model": lambda model: model}
    monkeypatch.setattr(run_report, "FIELDS", loose)
    assert leaks(written(tmp_path / "b", run)) == [SECRETS[0]]


def test_the_report_shows_the_run(tmp_path):
    record = report_record(written(tmp_path / "run"), Visibility.PRIVATE)
    assert record["n_ranks"] == 2
    assert record["layout"] == {"pp": 1, "dp": 2, "cp": 1, "tp": 1, "ep": 1}
    assert record["losses"] == [4.0, 3.0, 2.0]
    assert record["step_s"] == {"predicted": 0.5, "measured": 0.5}  # 16 x 8 tokens at 256 a second
    assert record["time_by_kind"] == {"forward": 0.25}
    assert record["environment"] == RUN["environment"]
    assert record["communication"][0]["bytes"] == 160
    html = page(record)
    assert "<polyline" in html
    assert "http" not in html


@pytest.mark.parametrize("name", INPUTS)
def test_a_change_of_any_input_voids_the_review(tmp_path, name):
    folder = written(tmp_path / "run")
    write_review(folder, "somebody", Visibility.PUBLIC)
    report_record(folder, Visibility.PUBLIC)
    with (folder / name).open("a") as file:
        file.write("\n")
    with pytest.raises(InvalidPublicReport, match=f"{name} has changed"):
        report_record(folder, Visibility.PUBLIC)


@pytest.mark.parametrize(
    "review",
    [None, "", "[]", '{"inputs": {}}', "[" * 50_000,
     '{"reviewer": "x", "reviewed_at": "y", "visibility": "private", "inputs": {}}',
     '{"reviewer": "", "reviewed_at": "y", "visibility": "public", "inputs": {}}'],
)  # fmt: skip
def test_a_blocked_report_says_why_and_writes_nothing(tmp_path, capsys, review):
    folder = written(tmp_path / "run")
    if review is not None:
        (folder / "review.json").write_text(review)
    out = tmp_path / "out"
    assert main(["report", str(folder), "--visibility", "public", "--out", str(out)]) == 4
    assert "blocked: " in capsys.readouterr().err
    assert not out.exists()


def test_the_command_reviews_and_writes_both_forms(tmp_path, capsys):
    folder = written(tmp_path / "run")
    assert main(["report", str(folder), "--visibility", "public", "--review", "somebody"]) == 0
    assert not list(folder.glob("report.*"))  # to review is not to publish
    assert main(["report", str(folder), "--visibility", "public"]) == 0
    assert {p.name for p in folder.glob("report.*")} == {"report.md", "report.html"}
    review = json.loads((folder / "review.json").read_text())
    assert review["reviewer"] == "somebody"
    assert set(review["inputs"]) == set(INPUTS)
    assert main(["report", str(folder), "--visibility", "public", "--review", " "]) == 4


@pytest.mark.parametrize("text", ["{", "[1]\n", '{"loss": NaN}\n', "[" * 50_000])
def test_hostile_metrics_are_refused(tmp_path, text):
    folder = written(tmp_path / "run")
    (folder / "metrics.jsonl").write_text(text)
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl, line 1"):
        report_record(folder, Visibility.PRIVATE)


def test_html_escapes_even_what_the_list_would_not_let_through():
    record = {"model": {"<b>": "<script>"}, "visibility": "<i>"}
    assert "<script>" not in page(record) + markdown(record)
    assert "<b>" not in page(record) + markdown(record)
    assert "<i>" not in page(record) + markdown(record)
