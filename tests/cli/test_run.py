"""`mpipar run`: what it starts and refuses, with launcher doubles; then real launches (kill)."""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mpipar.cli import run
from mpipar.cli.main import main
from mpipar.errors import LaunchError
from mpipar.launch.environment import detect, identify_library
from mpipar.launch.library import Library

PYTHON = sys.executable


@pytest.fixture
def outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process looks as if no launcher had started it."""
    for name in list(os.environ):
        if name.startswith(("OMPI_", "PMI", "PRTE", "SLURM_", "MPI_LOCAL")):
            monkeypatch.delenv(name)


@pytest.fixture
def launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outside: None, request: pytest.FixtureRequest
) -> Path:
    """A Hydra double that notes how it was called and ends as the test asks."""
    path = tmp_path / "bin" / "mpiexec"
    path.parent.mkdir()
    path.write_text(
        "#!/bin/sh\n"
        '[ "$1" = --version ] && echo "HYDRA build details: Version: 4.3.1" && exit\n'
        f'printf "%s\\n" "$*" > {tmp_path}/called\nenv > {tmp_path}/environment\n'
        f"{getattr(request, 'param', 'exit 0')}\n"
    )
    path.chmod(0o755)
    library = Library(identify_library("MPICH Version: 4.3.1"), tmp_path / "lib" / "libmpi.so.12")
    monkeypatch.setattr(run, "loaded_library", lambda environment: library)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "program"),
    [
        (["train", "--set", "a=1"], [PYTHON, "-m", "mpipar", "train", "--set", "a=1"]),
        (["--", "a.py", "x"], [PYTHON, "-m", "mpipar.cli.program", "a.py", "x"]),
        (["--", "python", "a.py"], [PYTHON, "-m", "mpipar.cli.program", "a.py"]),
        (["--", "python", "-m", "m", "x"], [PYTHON, "-m", "mpipar.cli.program", "-m", "m", "x"]),
        (["--", "python3", "-c", "1"], [PYTHON, "-m", "mpipar.cli.program", "-c", "1"]),
        (["--", "python", "-W", "error", "a.py"], [PYTHON, "-W", "error", "a.py"]),
        (["--", "python"], [PYTHON]),
        (["--", "./lammps", "-in", "x.py"], ["./lammps", "-in", "x.py"]),
    ],
)
def test_what_a_rank_runs(words: list[str], program: list[str]) -> None:
    assert run.rank_program(words) == program


def test_the_launcher_is_called(launcher: Path) -> None:
    assert main(["run", "-n", "3", "--", "true", "-n", "9"]) == 0
    assert (launcher / "called").read_text() == "-n 3 true -n 9\n"
    assert "OPENBLAS_NUM_THREADS=1" in (launcher / "environment").read_text()


@pytest.mark.parametrize(
    ("launcher", "code"),
    [(f"exit {n}", n) for n in range(5)] + [("exit 77", 1), ("exit 139", 1), ("kill -9 $$", 1)],
    indirect=["launcher"],
)
def test_exit_codes(launcher: Path, code: int) -> None:
    assert main(["run", "-n", "2", "--", "true"]) == code


@pytest.mark.kill
@pytest.mark.parametrize("launcher", ["sleep 30"], indirect=True)
def test_the_deadline_is_a_failure_and_says_so(
    launcher: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    start = time.monotonic()
    assert main(["run", "-n", "2", "--deadline", "0.3", "--", "true"]) == 1
    assert time.monotonic() - start < 10
    assert "deadline of 0.3 s passed" in capfd.readouterr().err


def test_dry_run_prints_a_command_that_can_be_pasted(
    launcher: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "-n", "2", "--dry-run", "--", "a program".replace(" ", ""), "x y"]) == 2
    assert main(["run", "-n", "2", "--dry-run", "--", "true", "x y"]) == 0
    comment, command = capsys.readouterr().out.splitlines()
    assert comment.startswith("# MPICH 4.3")
    assert shlex.split(command)[-5:] == [f"{launcher}/bin/mpiexec", "-n", "2", "true", "x y"]
    assert not (launcher / "called").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["-n", "0", "--", "true"], "at least 1"),
        (["-n", "two", "--", "true"], "whole number"),
        (["--", "true"], "how many ranks"),
        (["-n", "2"], "say what to run"),
        (["-n", "2", "--"], "say what to run"),
        (["-n", "2", "--deadline", "-1", "--", "true"], "seconds above 0"),
        (["-n", "2", "--", "no_such_program"], "no such program: no_such_program"),
        (["-n", "2", "--", "no_such_file.py"], "no such program"),
        (["-n", "2", "trian"], "unknown verb 'trian'"),
        (["-n", "2", "run", "-n", "2", "--", "true"], "run cannot start run"),
    ],
)
def test_usage_errors_start_nothing(
    launcher: Path, words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *words]) == 2
    assert says in capsys.readouterr().err
    assert not (launcher / "called").exists()


def test_slurm_says_how_many(launcher: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_NTASKS", "6")
    assert main(["run", "--", "true"]) == 0
    assert (launcher / "called").read_text().startswith("-n 6 ")


def test_a_rank_cannot_start_ranks(
    launcher: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    assert main(["run", "-n", "2", "--", "true"]) == 4
    assert "OMPI_COMM_WORLD_SIZE=2" in capsys.readouterr().err


# ---- real launches, with the MPI that this environment loads


def launch(*words: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    command = [PYTHON, "-m", "mpipar", "run", "--deadline", str(timeout_s - 20), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)


HELLO = "from mpi4py.MPI import COMM_WORLD as w; print(f'rank {w.rank} of {w.size}')"


@pytest.mark.kill
@pytest.mark.parametrize("n_ranks", [1, 2, 4])
def test_real_ranks_see_each_other(n_ranks: int) -> None:
    done = launch("-n", str(n_ranks), "--", "python", "-c", HELLO)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n")) == [
        "",
        *(f"rank {r} of {n_ranks}" for r in range(n_ranks)),
    ]


@pytest.mark.kill
@pytest.mark.parametrize("code", [2, 3, 4])
def test_real_ranks_exit_codes_come_back(code: int) -> None:
    program = f"import sys; from mpi4py import MPI; sys.exit({code})"
    assert launch("-n", "2", "--", "python", "-c", program).returncode == code


@pytest.mark.kill
def test_a_real_rank_that_raises_ends_the_job(tmp_path: Path) -> None:
    file = tmp_path / "one_raises.py"
    file.write_text(
        "from mpi4py.MPI import COMM_WORLD as w\n"
        "if w.rank == 1:\n    raise ValueError('a mistake of rank 1')\n"
        "w.Barrier()\n"
    )
    start = time.monotonic()
    done = launch("-n", "3", "--", str(file))
    assert done.returncode == 1
    assert time.monotonic() - start < 20
    assert "ValueError: a mistake of rank 1" in done.stderr


@pytest.mark.kill
def test_a_real_rank_that_hangs_meets_the_deadline() -> None:
    program = "from mpi4py.MPI import COMM_WORLD as w; w.Recv(bytearray(1), 1 - w.rank)"
    done = launch("-n", "2", "--", "python", "-c", program, timeout_s=23)
    assert done.returncode == 1
    assert "deadline of 3 s passed" in done.stderr


def running(tag: str) -> int:
    """Processes with `tag` on their command line."""
    found = 0
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found += tag.encode() in entry.read_bytes()
    return found


@pytest.mark.kill
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_real_rank_outlives_mpipar_run(number: signal.Signals) -> None:
    tag = f"tag{os.urandom(6).hex()}"
    program = f"import mpi4py.MPI, time; print('up', flush=True); time.sleep(50)  # {tag}"
    command = [PYTHON, "-m", "mpipar", "run", "-n", "2", "--", "python", "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as job:
        assert job.stdout is not None
        assert [job.stdout.readline() for _ in range(2)] == [b"up\n"] * 2
        assert running(tag) >= 3  # the finder sees what must go
        job.send_signal(number)
        assert job.wait(20) == (-number if number == signal.SIGKILL else 1)
        end = time.monotonic() + 10
        while running(tag) and time.monotonic() < end:
            time.sleep(0.05)
        assert running(tag) == 0


SINGLETON = """
import os
from mpi4py import MPI
from mpipar.launch.environment import check_launch
check_launch(os.environ, MPI.COMM_WORLD.size, MPI.Get_library_version())
"""


@pytest.mark.kill
def test_the_other_mpis_launcher_is_refused_by_every_rank() -> None:
    """Open MPI's library under MPICH's mpiexec: N times rank 0 of 1, unless refused."""
    other = Path(__file__).parents[2] / ".mpich" / "bin" / "mpiexec"
    listed = launch("-n", "2", "--dry-run", "--", "true").stdout
    if "Open MPI" not in listed or not other.exists() or detect(os.environ):
        pytest.skip("needs Open MPI loaded and MPICH in .mpich/")
    done = subprocess.run(
        [other, "-n", "2", PYTHON, "-W", "ignore", "-c", SINGLETON],
        env={**os.environ, "OMPI_MCA_btl": "^ofi,uct", "OMPI_MCA_pml": "ob1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode != 0
    assert done.stderr.count(f"{LaunchError.__module__}.LaunchError: every rank is 0 of 1") >= 1
    assert "PMI_SIZE=2" in done.stderr
    assert "`mpipar run -n 2 -- PROGRAM ...`" in done.stderr
