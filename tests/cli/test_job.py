"""`mpipar job`: the script of a run; the files in jobs/ are what it prints."""

import subprocess
from pathlib import Path

import pytest

from mpipar.cli.main import main
from mpipar.launch.script import JobRequest, job_script, limit_seconds

JOBS = Path(__file__).resolve().parents[2] / "jobs"
FILES = {
    "train.sbatch": JobRequest(),
    "train_mpirun.sbatch": JobRequest(launcher="mpirun"),
    "array_restart.sbatch": JobRequest(n_pieces=10),
    "cpu.sbatch": JobRequest(gpus_per_node=0, ranks_per_node=8, cpus_per_task=4),
}
BASE = ["--nodes", "2", "--gpus-per-node", "4", "--time", "01:00:00"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my run.toml").write_text("[mesh]\npp = 2\ndp = 4\n[train]\nbatch = 16\n")
    return tmp_path


@pytest.mark.parametrize("name", FILES)
def test_the_files_are_what_is_printed(name: str) -> None:
    assert (JOBS / name).read_text() == job_script(FILES[name])


@pytest.mark.parametrize("path", sorted(JOBS.glob("*.sbatch")), ids=lambda path: path.name)
def test_what_every_script_keeps(path: Path) -> None:
    subprocess.run(["bash", "-n", str(path)], check=True)
    text = path.read_text()
    assert "--gpus-per-task" not in text  # they hide the GPUs of peers
    assert "--gpu-bind" not in text
    assert ("srun" in text) == ('-c "$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1' in text)
    if "--resume-if-any" in text:
        assert ("--array" in text) != ("scontrol requeue" in text)
        assert ("--signal=B:USR1" in text) == ("mpipar run" in text)


def test_a_script_for_the_users_recipe(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    options = ["--mpi", "mpich", "--cpus-per-task", "7", "--sbatch=--partition=gpu"]
    assert main(["job", "train", "my run.toml", *BASE, *options]) == 0
    text = capsys.readouterr().out
    wanted = "--nodes=2 --ntasks-per-node=4 --gpus-per-node=4 --cpus-per-task=7 --time=01:00:00"
    for line in [*wanted.split(), "--signal=USR1@300", "--partition=gpu", "--job-name=my_run"]:
        assert f"#SBATCH {line}\n" in text
    assert 'srun --mpi="${SRUN_MPI:-pmi2}"' in text
    shell = text.split("set -euo pipefail")[1].split("if [[ -f")[0].replace('cd "$SLURM_SUB', "#")
    done = subprocess.run(
        ["bash", "-c", f'{shell}\necho "$recipe"'],
        env={"SLURM_JOB_ID": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "my run.toml\n"  # quoted where needed


def test_a_short_limit_leaves_time_before_the_signal(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["job", "train", "my run.toml", "--nodes", "2", "--gpus-per-node", "4", "--time", "2"]
    assert main(words) == 0
    assert "--signal=USR1@30\n" in capsys.readouterr().out
    assert main([*words, "--checkpoint-before", "120"]) == 4
    assert "30 s would do" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--nodes", "3"], 3, "does not fill 3 nodes x 4 ranks: pp=2 x dp=4 makes 8 ranks"),
        (["--ranks-per-node", "2"], 3, "does not fill 2 nodes x 2 ranks"),
        (["--time", "2h"], 2, "no time limit"),
        (["--nodes", "0"], 2, "a whole number of at least 1 is needed"),
    ],
)
def test_what_is_refused(
    capsys: pytest.CaptureFixture[str], words: list[str], code: int, said: str
) -> None:
    assert main(["job", "train", "my run.toml", *BASE, *words]) == code
    told = capsys.readouterr()
    assert said in told.err
    assert told.out == ""


def test_a_batch_that_does_not_divide_is_refused(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    (folder / "odd.toml").write_text("[train]\nbatch = 12\n")
    assert main(["job", "train", "odd.toml", *BASE]) == 3
    assert "on 2 nodes x 4 ranks: train.batch=12" in capsys.readouterr().err


def test_fewer_ranks_than_devices_are_noted(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--gpus-per-node", "8", "--ranks-per-node", "4"]
    assert main(["job", "train", "my run.toml", *BASE, *words]) == 0
    assert "4 ranks on 8 GPUs of a node" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 1800),
        ("1:30", 90),
        ("02:00:00", 7200),
        ("1-12", 129600),
        ("1-0:30", 88200),
        ("0-1:2:3", 3723),
    ],
)
def test_time_limits(text: str, seconds: int) -> None:
    assert limit_seconds(text) == seconds
