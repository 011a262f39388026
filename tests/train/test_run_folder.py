"""Run folders: which one is taken, what is never overwritten, and metrics that survive a cut."""

import json

import pytest

from mpipar import ThreadWorld
from mpipar.comm import IdentityCommunicator
from mpipar.errors import CheckpointError, RecipeError
from mpipar.train.run_folder import Metrics, choose_folder, plot_loss, read_metrics

ONE = IdentityCommunicator()


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def a_run(folder, metrics=True):
    folder.mkdir(parents=True)
    (folder / "recipe.toml").touch()
    if metrics:
        (folder / "metrics.jsonl").touch()
    return folder


def on_all_ranks(*arguments):
    results = ThreadWorld(3).run(lambda comm: choose_folder(comm, *arguments))
    assert len(set(results)) == 1
    return results[0]


def test_without_a_name_each_run_gets_its_own(here):
    folders = {on_all_ranks("", False) for _ in range(3)}
    assert len(folders) == 3
    assert all(f.is_dir() and f.parent.name == "runs" for f in folders)


def test_a_named_folder_is_made_but_no_run_is_overwritten(here):
    assert on_all_ranks("deep/mine", False).is_dir()
    a_run(here / "old")

    def body(comm):
        with pytest.raises(RecipeError, match="run folder old holds a run already; --resume"):
            choose_folder(comm, "old", False)

    ThreadWorld(3).run(body)
    (here / "file").touch()
    with pytest.raises(RecipeError, match=r"run folder file.* cannot be made"):
        choose_folder(ONE, "file/inside", False)


def test_resuming_takes_the_newest_or_the_named_one(here):
    for name in ("20260101-000000", "20260301-000000", "20260201-000000"):
        a_run(here / "runs" / name)
    (here / "runs" / "99990101-000000").mkdir()  # no run in it
    assert on_all_ranks("", True).name == "20260301-000000"
    assert on_all_ranks("runs/20260101-000000", True).name == "20260101-000000"


@pytest.mark.parametrize(
    ("folder", "says"), [("", "no run under 'runs'"), ("x", "holds no recipe")]
)
def test_no_run_to_resume(here, folder, says):
    (here / "x").mkdir()

    def body(comm):
        with pytest.raises(CheckpointError, match=says):
            choose_folder(comm, folder, True)

    ThreadWorld(2).run(body)


# -- metrics -----------------------------------------------------------------------------------


def test_metrics_read_back_and_only_the_writer_writes(tmp_path):
    for is_writer in (True, False):
        metrics = Metrics(tmp_path, is_writer)
        metrics.write({"step": 1, "loss": 0.1 + 0.2, "note": "é"})
    assert read_metrics(tmp_path) == [{"step": 1, "loss": 0.1 + 0.2, "note": "é"}]


def test_a_line_that_was_cut_short_is_left_out_and_going_on_removes_later_steps(tmp_path):
    metrics = Metrics(tmp_path, True)
    for step in range(1, 7):
        metrics.write({"step": step, "loss": 1 / step})
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(file.read_bytes()[:-4])
    assert [r["step"] for r in read_metrics(tmp_path)] == [1, 2, 3, 4, 5]
    again = Metrics(tmp_path, True, from_step=3)
    again.write({"step": 4, "loss": 9.0})
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(r["step"], r["loss"]) for r in lines] == [(1, 1.0), (2, 0.5), (3, 1 / 3), (4, 9.0)]


def test_the_curve_is_a_png(tmp_path):
    metrics = Metrics(tmp_path, True)
    for step in (1, 2):
        metrics.write(
            {"step": step, "loss": 2.0 / step, **({"held_out_loss": 1.0} if step > 1 else {})}
        )
    path = plot_loss(tmp_path, 1.5)
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
