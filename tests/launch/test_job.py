"""A supervised job: deadline, signals, and nothing left behind. Real processes, no MPI."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mpipar.launch import job
from mpipar.launch.job import Outcome, run_job

pytestmark = [
    pytest.mark.kill,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]


def sleepers(tag: str) -> list[int]:
    """Processes whose command line holds `tag`, zombies left out."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if tag.encode() in entry.read_bytes():
                found.append(int(entry.parent.name))
        except OSError:
            continue
    return found


def wait_for(condition: Callable[[], object], seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return False


@pytest.fixture
def tag() -> str:
    """A sleep time that no other process has."""
    return f"3{int.from_bytes(os.urandom(5), 'big')}"


def script(tag: str, end: str) -> list[str]:
    """A launcher double: one child in a session of its own, one beside it."""
    sleep = f"sleep {tag} >/dev/null"
    return ["sh", "-c", f"setsid {sleep} & a=$!; {sleep} & b=$!; {end}"]


def test_exit_codes_come_back() -> None:
    assert run_job(["sh", "-c", "exit 3"], os.environ) == Outcome(3)
    assert run_job(["sh", "-c", "kill -9 $$"], os.environ) == Outcome(-9)


def test_a_missing_launcher_is_an_error() -> None:
    with pytest.raises(FileNotFoundError):
        run_job(["/no/such/launcher"], os.environ)


def test_the_finder_sees_what_the_clean_up_must_kill(tag: str) -> None:
    """The planted fault: without supervision the child in its own session survives."""
    subprocess.run(script(tag, "sleep 0.2; kill -9 $$"), check=False)
    survivors = sleepers(tag)
    assert len(survivors) == 2
    for pid in survivors:
        os.kill(pid, signal.SIGKILL)


def test_a_failed_job_leaves_nothing(tag: str) -> None:
    assert run_job(script(tag, "sleep 0.2; exit 3"), os.environ) == Outcome(3)
    assert wait_for(lambda: not sleepers(tag), 2)


def test_the_deadline_ends_everything(tag: str) -> None:
    start = time.monotonic()
    outcome = run_job(script(tag, "wait"), os.environ, deadline_s=0.3)
    assert outcome.timed_out
    assert time.monotonic() - start < 5
    assert wait_for(lambda: not sleepers(tag), 2)


def test_a_launcher_that_ignores_the_request_is_killed(
    tag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "_GRACE_S", 0.3)
    outcome = run_job(script(tag, "trap '' TERM; wait; wait"), os.environ, deadline_s=0.3)
    assert outcome == Outcome(-9, timed_out=True)
    assert wait_for(lambda: not sleepers(tag), 2)


SUPERVISOR = """
import os, sys
from mpipar.launch.job import run_job
print(run_job(["sh", "-c", sys.argv[1]], os.environ), flush=True)
"""


def supervise(tag: str, end: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SUPERVISOR, script(tag, end)[2]]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert wait_for(lambda: len(sleepers(f"sleep\0{tag}")) == 2)
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_stop_signals_are_passed_on(tag: str, number: signal.Signals) -> None:
    process = supervise(tag, f"trap 'exit 7' {number.name[3:]}; while :; do sleep 0.05; done")
    time.sleep(0.2)
    process.send_signal(number)
    out, _ = process.communicate(timeout=20)
    assert f"returncode=7, timed_out=False, stopped_by={int(number)}" in out
    assert wait_for(lambda: not sleepers(tag), 2)


def test_user_signals_are_passed_on_and_end_nothing(tag: str) -> None:
    process = supervise(tag, "trap 'echo saw; exit 0' USR1; while :; do sleep 0.05; done")
    time.sleep(0.2)
    process.send_signal(signal.SIGUSR1)
    out, _ = process.communicate(timeout=20)
    assert out.startswith("saw\nOutcome(returncode=0, timed_out=False, stopped_by=None)")
    for pid in sleepers(tag):  # a job that ended well may leave a service of the user's
        os.kill(pid, signal.SIGKILL)


def test_the_launcher_ends_when_its_supervisor_is_killed(tag: str) -> None:
    process = supervise(tag, "trap 'kill $a $b; exit 1' TERM; while :; do sleep 0.05; done")
    time.sleep(0.2)
    process.kill()
    process.communicate(timeout=20)
    assert wait_for(lambda: not sleepers(tag))
