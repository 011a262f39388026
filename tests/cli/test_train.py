"""`mpipar train` as a user runs it: real ranks, a small text, a deadline for every job."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mpipar import checkpoint
from mpipar.comm import IdentityCommunicator
from mpipar.models import GPT
from mpipar.train import load_recipe

pytestmark = pytest.mark.kill

TINY = [
    f"--set=model.{key}={value}"
    for key, value in {"n_layers": 1, "width": 16, "n_heads": 2, "sequence": 16}.items()
]
TINY += ["--set=train.batch=12", "--set=run.held_out_sequences=8", "--set=train.warmup_steps=2"]
Train = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def train(tmp_path: Path) -> Train:
    """Starts a job in a folder of its own, with a text in it."""
    rng = np.random.default_rng(0)
    words = ["the", "rain", "in", "spain", "falls", "mainly"]
    (tmp_path / "text").write_text(" ".join(rng.choice(words, 2000)))

    def start(*words: str, n: int = 2) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "mpipar", "run", "-n", str(n), "--deadline", "60"]
        return subprocess.run(
            [*command, "train", *words],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
            capture_output=True,
            text=True,
            timeout=80,
        )

    return start


def curve(folder: Path) -> list[tuple[float, ...]]:
    """Loss, norm and learning rate of each step."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in rows] == list(range(1, len(rows) + 1))
    return [(r["loss"], r["gradient_norm"], r["learning_rate"]) for r in rows]


def test_a_run_its_folder_its_repetition_and_its_continuation(train: Train, tmp_path: Path):
    done = train(*TINY, "--data", "text", "--steps", "8", "--run", "first")
    assert done.returncode == 0, done.stderr
    assert [line.split(" | ")[0] for line in done.stdout.splitlines() if line[:5] == "step "] == [
        "step 1/8", "step 8/8", "step 8/8",
    ]  # fmt: skip
    assert "held-out loss" in done.stdout
    assert "bigram conditional entropy" in done.stdout
    first = tmp_path / "first"
    recipe = load_recipe(first / "recipe.toml")
    assert recipe.train.steps == 8
    assert recipe.data.digest
    losses = curve(first)
    assert len(losses) == 8
    assert losses[-1][0] < losses[0][0]
    place = checkpoint.newest(IdentityCommunicator(), first / "checkpoints")
    arrays, state = checkpoint.load(place)
    assert state["step"] == 8
    assert {n: arrays[n].shape for n in GPT(recipe.model).shapes()} == GPT(recipe.model).shapes()

    again = train("first/recipe.toml", "--run", "again", "--quiet")
    assert again.returncode == 0, again.stderr
    assert curve(tmp_path / "again") == losses  # equal to the bit

    refused = train(*TINY, "--data", "text", "--run", "first")
    assert refused.returncode == 2
    assert "holds a run already; --resume goes on with it" in refused.stderr

    # On with three ranks, to where one run of twelve steps comes.
    longer = train("--resume", "--run", "first", "--steps", "12", n=3)
    assert longer.returncode == 0, longer.stderr
    assert "going on after step 8" in longer.stdout
    assert curve(first)[:8] == losses
    assert len(curve(first)) == 12
    assert load_recipe(first / "recipe.toml").train.steps == 12


@pytest.mark.parametrize("background", ["false", "true"])
def test_a_run_killed_after_a_checkpoint_goes_on_to_the_same_end(
    train: Train, tmp_path: Path, background: str
):
    words = [*TINY, "--data", "text", "--set=run.checkpoint_every=4"]
    words.append(f"--set=run.background_saves={background}")
    whole = train(*words, "--steps", "12", "--run", "whole", "--set=run.keep=0")
    assert whole.returncode == 0, whole.stderr
    # What a kill during step 12 leaves: no last checkpoint, and half a line.
    steps = sorted((tmp_path / "whole" / "checkpoints").iterdir())
    assert [p.name for p in steps] == [f"step-{s:09d}" for s in (4, 8, 12)]
    expected = curve(tmp_path / "whole")
    (steps[2] / "index.json").unlink()
    file = tmp_path / "whole" / "metrics.jsonl"
    file.write_bytes(file.read_bytes()[:-30])
    resumed = train("--resume", "--run", "whole")
    assert "going on after step 8" in resumed.stdout, resumed.stderr
    assert curve(tmp_path / "whole") == expected


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--set", "train.stepz=3"], 2, "no key train.stepz in a recipe; did you mean steps?"),
        (["--set", "train.steps=0"], 2, "steps must be in range 1 or more, got 0"),
        (["--data", "absent"], 2, "absent' is neither a file nor a folder"),
        (["absent.toml"], 2, "recipe absent.toml cannot be read: No such file"),
        (["--resume"], 1, "no run under 'runs'"),
        (["--data", "text", "--set", "train.batch=3"], 3, "train.batch=3 cannot be split exactly"),
        (["--steps", "few"], 2, "invalid int value: 'few'"),
    ],
)
def test_mistakes_end_all_ranks_and_are_told_once(train: Train, words, code, says, tmp_path: Path):
    done = train(*words, n=1 if words[0] == "--steps" else 2)
    assert done.returncode == code, done.stderr
    assert done.stderr.count(says) == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
