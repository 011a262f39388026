"""What `mpipar train` refuses before anything is lost, and how runs go on; one rank, in process."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mpipar.cli.main import main
from mpipar.comm import IdentityCommunicator, ThreadWorld
from mpipar.errors import RecipeError
from mpipar.train import load_recipe
from mpipar.train.run_folder import choose_folder, discard, holding
from tests.cli.test_train import TINY


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, caplog: Any) -> Any:
    """Runs the verb; gives the exit code and what it printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("mpipar.cli.train.init", IdentityCommunicator)
    Path("text").write_text("the rain in spain falls mainly " * 200)

    def run(*words: str) -> tuple[int, str]:
        capsys.readouterr()
        caplog.clear()
        code = main(["train", *words])
        out, err = capsys.readouterr()
        return code, out + err + caplog.text

    return run


@pytest.fixture
def run(train: Any) -> Path:
    """A run of four steps with checkpoints at two and four."""
    words = [*TINY, "--data", "text", "--steps", "4", "--set=run.checkpoint_every=2"]
    code, text = train(*words, "--run", "run", "--quiet")
    assert code == 0, text
    return Path("run")


@pytest.mark.parametrize(
    ("words", "says", "code"),
    [
        (["--mesh", "dp=1,dp=1"], "names dp twice", 2),
        (["--mesh", "pp2"], "must read axis=degree", 2),
        (["--mesh", "pp="], "must read axis=degree", 2),
        (["--mesh", "foo=2"], "no key mesh.foo", 2),
        (["--mesh", "pp=3"], "pp=1 would do", 3),
        (["--schedule", "1f2b"], "no schedule is called '1f2b'; did you mean 1f1b", 3),
        (["--schedule", "x/y.txt"], "cannot read the schedule x/y.txt", 3),
        (["--schedul", "1f1b"], "unrecognized arguments: --schedul", 2),
        (["--set", "train.batch=0"], "batch must be in range 1 or more, got 0", 2),
    ],
)
def test_wrong_words_leave_no_folder(train: Any, words: list[str], says: str, code: int) -> None:
    found, text = train(*TINY, "--data", "text", "--run", "run", *words)
    assert (found, says in text) == (code, True), text
    assert not Path("run").exists()


def test_a_finished_run_says_so(train: Any, run: Path) -> None:
    before = (run / "metrics.jsonl").read_text()
    code, text = train("--resume", "--run", "run")
    assert code == 0
    assert "the run has all its 4 steps; --steps 5 or more goes on" in text
    assert "tokens/s" not in text
    assert (run / "metrics.jsonl").read_text() == before


def test_a_run_keeps_its_text_and_its_model(train: Any, run: Path) -> None:
    Path("other").write_text("something else entirely " * 300)
    for words, says in (
        (["--data", "other"], "it has changed: set data.digest=''"),
        (["--set", "model.width=32"], "the run in run has model.width=16, not 32"),
        (["--set", "train.batch=6"], "would leave its place in the data"),
    ):
        code, text = train("--resume", "--run", "run", "--steps", "6", *words)
        assert code != 0
        assert says in text
    Path("moved").write_bytes(Path("text").read_bytes())
    code, text = train("--resume", "--run", "run", "--steps", "5", "--data", "moved")
    assert (code, "going on after step 4" in text) == (0, True), text
    words = ["--data", "other", "--set", "data.digest=''"]
    code, text = train("--resume", "--run", "run", "--steps", "6", *words)
    assert (code, "going on after step 5" in text) == (0, True), text


def test_mesh_names_the_whole_mesh() -> None:
    from mpipar.cli.train import _degrees

    assert _degrees("pp=2, tp=4") == {"pp": "2", "tp": "4"}
    assert _degrees(None) == {}
    with pytest.raises(RecipeError, match="axis=degree"):
        _degrees("")


def test_given_degrees_take_the_place_of_all_of_the_recipe(train: Any, run: Path) -> None:
    text = (run / "recipe.toml").read_text().replace("pp = 1", "pp = 7")
    (run / "recipe.toml").write_text(text)
    code, said = train("--resume", "--run", "run", "--steps", "5")
    assert code == 3
    assert "pp=7" in said
    code, said = train("--resume", "--run", "run", "--steps", "5", "--mesh", "tp=1")
    assert code == 0, said
    assert load_recipe(run / "recipe.toml").mesh.pp == 1


def cut(file: Path) -> None:
    os.truncate(file, 100)


def alter(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "name", "says"),
    [
        (cut, "arrays-0.safetensors", "has 100 bytes instead of"),
        (alter, "arrays-0.safetensors", "was altered"),
        (cut, "index.json", "cannot be read"),
    ],
)
def test_damaged_checkpoints_are_passed_over_and_named(
    train: Any, run: Path, damage: Any, name: str, says: str
) -> None:
    places = sorted((run / "checkpoints").iterdir())
    damage(places[1] / name)
    code, text = train("--resume", "--run", "run", "--steps", "5")
    assert (code, "going on after step 2" in text) == (0, True), text
    assert f"passed over: {places[1] / name} {says}" in text
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(steps)  # what came after step 2 was written anew
    assert steps[-1] == 5
    for place in (run / "checkpoints").iterdir():
        damage(place / name)
    code, text = train("--resume", "--run", "run", "--steps", "6")
    assert code != 0
    assert "no complete checkpoint in run/checkpoints; " in text
    assert text.count(says) == 2


def test_a_folder_is_held_by_one_job_at_a_time(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib; from mpipar.comm import IdentityCommunicator\n"
        "from mpipar.train.run_folder import holding\n"
        "with holding(IdentityCommunicator(), pathlib.Path(sys.argv[1])):\n"
        "    print('held', flush=True); sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"

        def body(comm: Any) -> None:
            with pytest.raises(RecipeError, match="another job is at work"):  # noqa: SIM117
                with holding(comm, tmp_path):
                    raise AssertionError

        ThreadWorld(3).run(body)
        other.kill()
        other.wait()
        with holding(IdentityCommunicator(), tmp_path):  # a killed job holds nothing
            pass


def test_only_an_empty_new_folder_is_discarded(tmp_path: Path) -> None:
    folder = choose_folder(IdentityCommunicator(), str(tmp_path / "new"), False)
    with holding(IdentityCommunicator(), folder):
        discard(folder)
    assert not folder.exists()
    folder.mkdir()
    (folder / "mine").touch()
    discard(folder)
    assert (folder / "mine").exists()
