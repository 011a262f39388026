"""Ends of jobs: whatever one rank does, the job ends within seconds, non-zero, with a reason.

Run with the MPI that this environment loads, under its own launcher (bare ``python program``) and
under ``mpipar run``.
"""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import pytest

from mpipar.launch.launcher import find_launcher, rank_settings
from mpipar.launch.library import loaded_library

pytestmark = pytest.mark.kill
ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 10.0  # from the deed to the end of the launcher

PROGRAM = r"""
import os, signal, sys, time
from pathlib import Path
import numpy as np
from mpipar.comm import init

deed, folder = sys.argv[1], Path(sys.argv[2])
comm = init()
note = folder / f"note {comm.rank}"
note.write_text(str(os.getpid()))
note.rename(folder / f"pid {comm.rank}")
assert comm.all_reduce(1) == comm.size
if comm.rank == 0:
    (folder / "begun").write_text("")
if comm.rank == comm.size - 1:
    if deed == "raise":
        raise ValueError("a mistake of the last rank")
    if deed == "raise with a request pending":
        request = comm.begin_all_reduce(np.ones(50_000))
        message = comm.begin_recv(np.ones(3), 0, tag=7)
        raise ValueError("a mistake of the last rank")
    if deed == "raise inside a request":
        comm.begin_recv(np.empty(1), comm.size, tag=1).wait()
    if deed == "sys.exit(0)":
        sys.exit(0)
    if deed == "sys.exit(3)":
        sys.exit(3)
    if deed == "sys.exit(text)":
        sys.exit("no more")
    if deed == "os._exit(0)":
        os._exit(0)
    if deed == "kill -9":
        os.kill(os.getpid(), signal.SIGKILL)
    if deed == "sleep":
        time.sleep(60)
    if deed == "leave early":
        comm = None
if comm is not None and deed != "end well":
    if deed.startswith("raise with"):
        comm.recv(np.empty(2), comm.size - 1)
    comm.all_reduce(np.ones(1000))
    comm.barrier()
if comm is not None:
    sys.stdout.write("ALL-DONE\n")
"""


@dataclass
class Ended:
    """How a job went."""

    code: int
    seconds: float
    text: str
    orphans: list[int]


@lru_cache
def launcher(n: int) -> tuple[tuple[str, ...], dict[str, str]]:
    """The MPI's own launcher, and what its ranks need in their environment."""
    library = loaded_library(os.environ)
    found = find_launcher(library, os.environ)
    settings = rank_settings(library.name, os.environ, n, os.cpu_count() or 1, is_root=True)
    return tuple(found.command(n, [sys.executable])), {**settings, **found.environment}


def job(
    folder: Path, deed: str, how: str, n: int = 2, interrupt: int = 0, **settings: str
) -> Ended:
    """Start a job whose last rank does a deed; count from the moment that all ranks have met."""
    program = folder / "program.py"
    program.write_text(PROGRAM)
    command, environment = launcher(n)
    words = [str(program), deed, str(folder)]
    line = [*command, *words]
    if how == "mpipar run":
        line = [sys.executable, "-m", "mpipar", "run", "-n", str(n), "--", *words]
    child = subprocess.Popen(
        line,
        env={**os.environ, **environment, "PYTHONPATH": str(ROOT), **settings},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    start = time.monotonic()
    while not (folder / "begun").exists() and child.poll() is None:
        assert time.monotonic() - start < 40, "the ranks have not met"
        time.sleep(0.02)
    start = time.monotonic()
    if interrupt:
        time.sleep(0.3)
        child.send_signal(interrupt)
    try:
        text, _ = child.communicate(timeout=LIMIT_S + 5)
    except subprocess.TimeoutExpired:
        child.kill()
        text, _ = child.communicate()
        text += "\nTHE JOB DID NOT END"
    seconds = time.monotonic() - start
    orphans = living(folder)
    for pid in orphans:
        os.kill(pid, signal.SIGKILL)
    return Ended(child.returncode, seconds, text, orphans)


def living(folder: Path) -> list[int]:
    """Ranks that still run a while after the launcher has gone."""
    pids = [int(path.read_text()) for path in folder.glob("pid *")]
    for _ in range(100):
        pids = [pid for pid in pids if runs(pid)]
        if not pids:
            break
        time.sleep(0.02)
    return pids


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def ended_badly(end: Ended, *says: str) -> None:
    """Non-zero, in time, nobody left, with these words."""
    assert end.code != 0, end.text
    assert "ALL-DONE" not in end.text, end.text
    assert end.seconds < LIMIT_S, f"{end.seconds:.1f} s: {end.text}"
    assert end.orphans == []
    for word in says:
        assert word in end.text, end.text


DEEDS: dict[str, list[str]] = {
    "raise": ["[mpipar rank {last}]", "ValueError: a mistake of the last rank", "program.py"],
    "raise with a request pending": ["[mpipar rank {last}]", "ValueError: a mistake"],
    "raise inside a request": ["[mpipar rank {last}]", "source must be in range"],
    "sys.exit(0)": ["rank {last} has left the program", "all_reduce"],
    "sys.exit(3)": [],
    "sys.exit(text)": ["no more"],
    "kill -9": [],
    "leave early": ["rank {last} has left the program", "all_reduce"],
}
RARE = ("raise inside a request", "sys.exit(text)")


@pytest.mark.parametrize("deed", [d for d in DEEDS if d not in RARE])
def test_a_bare_program_under_the_mpis_launcher(tmp_path: Path, deed: str) -> None:
    ended_badly(job(tmp_path, deed, "launcher"), *(w.format(last=1) for w in DEEDS[deed]))


@pytest.mark.parametrize("deed", ["raise", "sys.exit(0)"])
def test_under_mpipar_run(tmp_path: Path, deed: str) -> None:
    ended_badly(job(tmp_path, deed, "mpipar run"), *(w.format(last=1) for w in DEEDS[deed]))


@pytest.mark.parametrize("how", ["launcher", "mpipar run"])
def test_ctrl_c(tmp_path: Path, how: str) -> None:
    ended_badly(job(tmp_path, "sleep", how, interrupt=signal.SIGINT))


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"MPIPAR_ARENA_BYTES": "0"},
        {"MPIPAR_ARENA_BYTES": "0", "MPIPAR_CHECK": "1"},
        {"MPIPAR_CHECK": "1"},
        {},
    ],
    ids=["MPI", "MPI checked", "node checked", "node"],
)
@pytest.mark.parametrize("how", ["launcher", "mpipar run"])
@pytest.mark.parametrize("deed", DEEDS)
def test_every_deed_on_every_transport(
    tmp_path: Path, deed: str, how: str, settings: dict[str, str]
) -> None:
    end = job(tmp_path, deed, how, 3, **settings)
    ended_badly(end, *(w.format(last=2) for w in DEEDS[deed]))


@pytest.mark.slow
def test_a_process_that_vanishes_leaves_nobody_waiting(tmp_path: Path) -> None:
    """Hydra takes exit code 0 without finalisation for a good end; Open MPI's launcher does not."""
    end = job(tmp_path, "os._exit(0)", "launcher", 3)
    assert "ALL-DONE" not in end.text, end.text
    assert end.seconds < LIMIT_S
    assert end.orphans == []


def test_over_mpi_alone(tmp_path: Path) -> None:
    end = job(tmp_path, "sys.exit(0)", "launcher", MPIPAR_ARENA_BYTES="0", MPIPAR_CHECK="0")
    ended_badly(end, *(w.format(last=1) for w in DEEDS["sys.exit(0)"]))


def test_a_job_that_ends_well_is_no_bad_end(tmp_path: Path) -> None:
    """The planted fault: what these tests rest on must see a good end, and an orphan."""
    end = job(tmp_path, "end well", "launcher")
    assert end.code == 0, end.text
    assert end.text.count("ALL-DONE") == 2
    with pytest.raises(AssertionError):
        ended_badly(end)
    left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)"])
    (tmp_path / "pid 0").write_text(str(left.pid))
    assert living(tmp_path) == [left.pid]
    left.kill()
    left.wait()
    assert living(tmp_path) == []
