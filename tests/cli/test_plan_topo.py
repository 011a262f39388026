import json

import pytest

from mpipar.cli.main import main
from mpipar.cli.train import table


def run(capsys, *words):
    code = main(list(words))
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_plan_for_a_laptop(capsys, tmp_path):
    recipe = tmp_path / "r.toml"
    code, out, _ = run(
        capsys, "plan", "gpt-tiny", "--cluster", "laptop", "--batch", "8", "--recipe", str(recipe)
    )
    assert code == 0
    assert "run: dp=2 tp=2" in out
    assert "[mesh]" in recipe.read_text()


def test_plan_from_files_as_json(capsys, tmp_path):
    code, out, _ = run(capsys, "topo", "--cluster", "laptop", "--format", "toml")
    assert code == 0
    (tmp_path / "c.toml").write_text(out)
    (tmp_path / "m.toml").write_text(
        "[model]\nn_layers = 4\nwidth = 64\nn_heads = 4\nsequence = 32\nvocabulary = 256\n"
    )
    (tmp_path / "k.toml").write_text('matrix = 0.5\nsource = "measured: here"\n')
    code, out, _ = run(
        capsys, "plan", str(tmp_path / "m.toml"), "--cluster", str(tmp_path / "c.toml"),
        "--batch", "4", "--devices", "2", "--pp", "2", "--format", "json",
        "--calibration", str(tmp_path / "k.toml"),
    )  # fmt: skip
    plan = json.loads(out)
    assert code == 0
    assert plan["options"][0]["row"]["pp"] == 2
    assert plan["source"].startswith("measured: here; figures of laptop: ")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("gpt-nano", "--cluster", "laptop"), "neither a file nor one of gpt-tiny"),
        (("gpt-tiny", "--cluster", "mars"), "presets: dgx-a100"),
        (("gpt3-175b", "--cluster", "laptop"), "does not fit 4 devices"),
    ],
)
def test_what_cannot_be_planned_exits_with_three(capsys, words, why):
    code, _, err = run(capsys, "plan", *words, "--batch", "4")
    assert code == 3
    assert why in err


def test_topo_describes_this_node_and_a_text(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    code, out, _ = run(capsys, "topo")
    assert code == 0
    assert "NUMA node 0" in out
    (tmp_path / "t.txt").write_text(
        "\tGPU0\tGPU1\tCPU Affinity\nGPU0\tX\tNV2\t0-3\nGPU1\tNV2\tX\t0-3\n"
    )
    picture = tmp_path / "p.png"
    code, out, _ = run(capsys, "topo", "--smi", str(tmp_path / "t.txt"), "--plot", str(picture))
    assert code == 0
    assert "2 GPUs 0 1: 2" in out
    assert picture.stat().st_size > 1000
    code, out, _ = run(capsys, "topo", "--cluster", "frontier", "--format", "json")
    assert json.loads(out)["tiers.node.gb_s"]["origin"] == "published"


def test_a_run_shows_what_was_predicted_beside_what_it_measured():
    names = ("training loss", "bigram entropy", "tokens_per_s", "communication_share")
    names += ("largest peak GiB", "seconds")
    figures = {"steps": 3, "ranks": 2, "parameters": 10, **dict.fromkeys(names, 1.0)}
    measured = {"step s": 0.5, "predicted step s": 0.4}
    lines = table(figures | measured, "here").splitlines()
    assert [line for line in lines if line.startswith("time a step")] == [
        "time a step                 0.4 s predicted, 0.5 s measured (+25%)"
    ]
    assert "predicted" not in table(figures | measured | {"predicted step s": 0.0}, "here")
