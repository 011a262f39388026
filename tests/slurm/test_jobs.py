"""The scripts in ``jobs/`` and their programs on a real Slurm: 2 nodes x 4 pretend GPUs."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from mpipar.launch.library import choose_library
from tests.slurm.cluster import Cluster, cluster

pytestmark = pytest.mark.slurm

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(path.name for path in (ROOT / "jobs").glob("*.sbatch"))
MPICH = ROOT / ".mpich"
LIBRARY = {"openmpi": "openmpi", "mpich": str(MPICH) if MPICH.is_dir() else "mpich"}
PLUGIN = {"openmpi": "pmix", "mpich": "pmi2"}
N_STEPS = 6
RECIPE = f"""\
[model]
n_layers = 1
width = 16
n_heads = 2
sequence = 16
[train]
batch = 8
steps = {N_STEPS}
warmup_steps = 2
dtype = "float64"
[data]
path = "text.txt"
[run]
held_out_sequences = 8
"""


@pytest.fixture(scope="module")
def slurm() -> Iterator[Cluster]:
    with cluster() as found:
        yield found


@pytest.fixture
def place(slurm: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to submit from: recipe, text, and a site.env that names this Python."""
    (tmp_path / "recipe.toml").write_text(RECIPE)
    (tmp_path / "text.txt").write_text((ROOT / "README.md").read_text() * 20)
    for script in SCRIPTS:
        shutil.copy(ROOT / "jobs" / script, tmp_path)
    monkeypatch.chdir(tmp_path)
    site(tmp_path, "openmpi")
    return tmp_path


def site(folder: Path, mpi: str) -> None:
    """Write a site.env for one MPI."""
    lines = [f'export PATH="{Path(sys.executable).parent}:$PATH" PYTHONPATH="{ROOT}"']
    lines += [f"export {name}='{value}'" for name, value in choose_library(LIBRARY[mpi]).items()]
    (folder / "site.env").write_text("\n".join([*lines, f"export SRUN_MPI={PLUGIN[mpi]}", ""]))


def submit(slurm: Cluster, *words: str, options: Sequence[str] = ()) -> str:
    """Submit a script with its arguments; the job's id."""
    return slurm.run("sbatch", "--parsable", *options, *words).stdout.strip()


def until(slurm: Cluster, job: str, is_true: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait for something about a job, else fail with all that it has printed."""
    end = time.monotonic() + seconds
    while not is_true():
        if time.monotonic() > end:
            said = "\n".join(path.read_text() for path in Path().glob(f"*{job}*.out"))
            state = slurm.run("scontrol", "show", "job", job, check=False).stdout
            slurm.run("scancel", job, check=False)
            pytest.fail(f"job {job} did not get there within {seconds:g} s: {state}\n{said}")
        time.sleep(0.1)


def finish(slurm: Cluster, job: str, seconds: float = 60.0) -> str:
    """Wait for the end of a job that must succeed; what it printed."""
    until(slurm, job, lambda: not slurm.run("squeue", "-h", "-j", job, check=False).stdout, seconds)
    said = "\n".join(path.read_text() for path in Path().glob(f"*{job}*.out"))
    assert "JobState=COMPLETED" in slurm.run("scontrol", "show", "job", job).stdout, said
    return said


def losses(folder: str) -> list[float]:
    """Loss of every step of a run."""
    lines = Path(folder, "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def alone(steps: int = N_STEPS) -> list[float]:
    """The same run on one rank of this machine."""
    words = ["-m", "mpipar", "train", "recipe.toml", "--run", "alone", "--steps", str(steps)]
    environment = {**os.environ, "MPIPAR_SINGLETON": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, *words, "--quiet"], env=environment, check=True, timeout=60)
    return losses("alone")


def places(folder: str) -> list[tuple[str, ...]]:
    """Rank, node and GPU of the table in a run folder."""
    table = Path(folder, "ranks.txt").read_text()
    return re.findall(r"^(\d+) +(n\d) +\S+ +\S+ +\S+ +(\d of \d|-) ", table, re.MULTILINE)


EIGHT_RANKS = [(str(i), f"n{1 + i // 4}", f"{i % 4} of 4") for i in range(8)]


@pytest.mark.parametrize("script", SCRIPTS)
def test_slurm_accepts_the_script(slurm: Cluster, place: Path, script: str) -> None:
    said = slurm.run("sbatch", "--test-only", script).stdout
    assert "to start at" in said
    refused = slurm.run("sbatch", "--test-only", "--gpus-per-node=5", script, check=False)
    assert refused.returncode != 0  # the check itself can fail


RUNS = [
    ("train.sbatch", "openmpi"),
    pytest.param("train.sbatch", "mpich", marks=pytest.mark.slow),
    pytest.param("train_mpirun.sbatch", "openmpi", marks=pytest.mark.slow),
    pytest.param("train_mpirun.sbatch", "mpich", marks=pytest.mark.slow),
]


def by_device(rows: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Nodes and devices without the ranks, in order."""
    return sorted(row[1:] for row in rows)


@pytest.mark.parametrize(("script", "mpi"), RUNS)
def test_the_script_trains_with_one_device_a_rank(
    slurm: Cluster, place: Path, script: str, mpi: str
) -> None:
    site(place, mpi)
    said = finish(slurm, submit(slurm, script, options=["--export=ALL,RUN=run"]))
    # the local ranks of Open MPI's mpirun are in an order of their own
    order = (lambda rows: rows) if script == "train.sbatch" else by_device
    assert order(places("run")) == order(EIGHT_RANKS), said
    assert "share one device" not in said
    assert losses("run") == pytest.approx(alone(), rel=1e-9)


@pytest.mark.slow
def test_the_cpu_script_trains(slurm: Cluster, place: Path) -> None:
    finish(
        slurm, submit(slurm, "cpu.sbatch", options=["--export=ALL,RUN=run", "--ntasks-per-node=2"])
    )
    assert places("run") == [(str(i), f"n{1 + i // 2}", "-") for i in range(4)]
    assert losses("run") == pytest.approx(alone(), rel=1e-9)


@pytest.mark.slow
def test_the_planning_script_trains_on_what_it_planned(slurm: Cluster, place: Path) -> None:
    Path("model.toml").write_text(
        '[model]\nname = "small"\nvocabulary = 256\nn_layers = 2\nwidth = 32\nn_heads = 2\n'
        "sequence = 32\n"
    )
    words = ["plan_then_train.sbatch", "model.toml", "dgx-a100", "8", "4"]
    finish(slurm, submit(slurm, *words, options=["--export=ALL,RUN=run"]), 120)
    planned = tomllib.loads(Path("run/planned.toml").read_text())["mesh"]
    assert math.prod(planned[axis] for axis in ("pp", "dp", "cp", "tp")) == 8
    assert planned == tomllib.loads(Path("run/recipe.toml").read_text())["mesh"]
    assert len(losses("run")) == 4


@pytest.mark.slow
def test_the_bench_script_finds_two_nodes_and_measures(slurm: Cluster, place: Path) -> None:
    words = ["bench.sbatch", "all_reduce", "--sizes", "8,4K", "--rounds", "5"]
    said = finish(slurm, submit(slurm, *words, options=["--ntasks-per-node=2"]), 180)
    assert "right over 2 nodes" in said
    assert "4 ranks on 2 nodes" in said
    assert "all_reduce" in said


def test_the_generating_script_continues_the_prompts_of_a_file(slurm: Cluster, place: Path) -> None:
    alone()
    Path("prompts.txt").write_text("one\ntwo\nthree\n")
    words = ["generate.sbatch", "alone", "prompts.txt", "--tp", "2", "--max-tokens", "4"]
    said = finish(slurm, submit(slurm, *words))
    assert [said.count(f"--- {i}\n") for i in range(4)] == [1, 1, 1, 0]
    assert "prompt tokens" in said


def progress(folder: str) -> int:
    """Steps that a run has written down."""
    return len(losses(folder)) if Path(folder, "metrics.jsonl").exists() else 0


STOPS = [
    pytest.param("train.sbatch", "openmpi", marks=pytest.mark.slow),
    pytest.param("train.sbatch", "mpich", marks=pytest.mark.slow),
    pytest.param("train_mpirun.sbatch", "openmpi", marks=pytest.mark.slow),
    pytest.param("train_mpirun.sbatch", "mpich", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("script", "mpi"), STOPS)
def test_a_job_that_is_told_to_stop_goes_on_and_ends_with_the_same_loss(
    slurm: Cluster, place: Path, script: str, mpi: str
) -> None:
    n_steps = 400
    site(place, mpi)
    text = RECIPE.replace(f"steps = {N_STEPS}", f"steps = {n_steps}")
    Path("recipe.toml").write_text(text)
    job = submit(slurm, script, options=["--export=ALL,RUN=run", "-N1", "--ntasks-per-node=2"])
    until(slurm, job, lambda: progress("run") > 20)
    where = ["--batch"] if script == "train_mpirun.sbatch" else []
    slurm.run("scancel", "--signal=USR1", *where, job)
    until(slurm, job, Path("run/stopped").exists, 20)
    stopped_at = progress("run")
    said = finish(slurm, job, 120)
    assert stopped_at < n_steps
    assert f"stopped by a signal after step {stopped_at}/{n_steps}" in said
    assert f"going on after step {stopped_at}" in said
    assert "Restarts=1" in slurm.run("scontrol", "show", "job", job).stdout
    assert not Path("run/stopped").exists()
    assert losses("run") == pytest.approx(alone(n_steps), rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("script", ["train.sbatch", "train_mpirun.sbatch"])
def test_slurm_itself_stops_the_run_before_its_limit_and_restarts_are_counted(
    slurm: Cluster, place: Path, script: str
) -> None:
    Path("recipe.toml").write_text(RECIPE.replace(f"steps = {N_STEPS}", "steps = 1000000"))
    receiver = "B:" if script == "train_mpirun.sbatch" else ""
    options = ["-N1", "--ntasks-per-node=2", "--time=1", f"--signal={receiver}USR1@45"]
    job = submit(slurm, script, options=["--export=ALL,RUN=run,MAX_RESTARTS=1", *options])
    said = finish(slurm, job, 150)
    steps = [int(n) for n in re.findall(r"stopped by a signal after step (\d+)/", said)]
    assert len(steps) == 2
    assert steps[0] < steps[1] == progress("run")
    assert f"going on after step {steps[0]}" in said
    assert "Restarts=1" in slurm.run("scontrol", "show", "job", job).stdout
    assert Path("run/stopped").exists()  # twice was the bound


@pytest.mark.slow
def test_pieces_of_an_array_follow_one_another(slurm: Cluster, place: Path) -> None:
    Path("recipe.toml").write_text(RECIPE.replace(f"steps = {N_STEPS}", "steps = 400"))
    options = ["--export=ALL,RUN=run", "-N1", "--ntasks-per-node=2"]
    job = submit(slurm, "array_restart.sbatch", options=options)
    until(slurm, job, lambda: progress("run") > 20)
    slurm.run("scancel", "--signal=USR1", f"{job}_1", check=False)  # sent, but it reports an error
    until(slurm, job, lambda: not slurm.run("squeue", "-h", "-j", job, check=False).stdout, 120)
    said = Path(f"recipe-{job}.out").read_text()
    assert said.count("going on after step") == 1
    assert len(losses("run")) == 400
    assert not Path("run/stopped").exists()


PROGRAM = """
import os, signal, sys
import numpy as np, mpipar
from mpipar.comm.placement import places
comm = mpipar.init()
total = comm.all_reduce(np.arange(5) + comm.rank)
if comm.rank == 0:
    nodes = {place.node for place in places(comm)}
    print("nodes", len(nodes), "sum", total.tolist(), flush=True)
else:
    places(comm)
comm.barrier()
if "die" in sys.argv and comm.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
comm.all_reduce(np.ones(3))
"""


def step(
    slurm: Cluster, mpi: str, *options: str, words: tuple[str, ...] = (), n: int = 4
) -> tuple[subprocess.CompletedProcess[str], float]:
    """Run the program above in a step of its own; the result and its seconds."""
    Path("program.py").write_text(PROGRAM)
    environment = {**slurm.environment, **choose_library(LIBRARY[mpi]), "PYTHONPATH": str(ROOT)}
    command = [
        "srun",
        "-N2",
        f"-n{n}",
        f"--ntasks-per-node={n // 2}",
        *options,
        sys.executable,
        "program.py",
        *words,
    ]
    start = time.monotonic()
    done = subprocess.run(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=60,
    )
    return done, time.monotonic() - start


@pytest.mark.parametrize("mpi", ["openmpi", "mpich"])
def test_ranks_of_two_nodes_add_up(slurm: Cluster, place: Path, mpi: str) -> None:
    done, _ = step(slurm, mpi, f"--mpi={PLUGIN[mpi]}")
    assert done.returncode == 0, done.stdout
    assert "nodes 2 sum [6, 10, 14, 18, 22]" in done.stdout  # 0+1+2+3 and four more each


@pytest.mark.parametrize("kill", ["--kill-on-bad-exit=0", "--kill-on-bad-exit=1"])
@pytest.mark.parametrize("mpi", ["openmpi", "mpich"])
def test_a_killed_rank_ends_the_step(slurm: Cluster, place: Path, mpi: str, kill: str) -> None:
    done, seconds = step(slurm, mpi, f"--mpi={PLUGIN[mpi]}", kill, words=("die",))
    assert done.returncode != 0, done.stdout
    assert "nodes 2" in done.stdout  # all had started
    assert seconds < 10 + 5, done.stdout  # the start included


@pytest.mark.parametrize(
    ("mpi", "plugin"),
    [("openmpi", "pmi2"), ("openmpi", "none"), ("mpich", "pmix"), ("mpich", "none")],
)
def test_ranks_that_would_be_alone_are_refused(
    slurm: Cluster, place: Path, mpi: str, plugin: str
) -> None:
    done, _ = step(slurm, mpi, f"--mpi={plugin}", n=2)
    assert done.returncode != 0
    assert "LaunchError" in done.stdout
    assert f"srun --mpi={PLUGIN[mpi]} -n 2" in done.stdout
