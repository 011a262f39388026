"""One launched job under supervision: deadline, signals passed on, no process left behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Final

_STOPS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_NOTES: Final = (signal.SIGUSR1, signal.SIGUSR2)
_MARK: Final = "MPIPAR_JOB"
_GRACE_S: Final = 10.0  # the launcher ends its ranks; some sites' take seconds


@dataclass(frozen=True)
class Outcome:
    """How a job ended.

    Attributes
    ----------
    returncode : int
        The launcher's; negative for a launcher that a signal ended.
    timed_out : bool
        Whether the deadline ended it.
    stopped_by : int or None
        The signal that asked this process to stop, if any.
    """

    returncode: int
    timed_out: bool = False
    stopped_by: int | None = None


class _Stopped(BaseException):
    """A stop signal came; carries its number."""


@dataclass
class _Supervisor:
    command: Sequence[str]
    environment: Mapping[str, str]
    mark: str = field(default_factory=lambda: f"{os.getpid()}.{os.urandom(6).hex()}")
    process: subprocess.Popen[bytes] | None = None
    n_stops: int = 0

    def start(self) -> subprocess.Popen[bytes]:
        # A session of its own: Ctrl-C at a terminal reaches the launcher once, through us.
        self.process = subprocess.Popen(
            list(self.command),
            env={**self.environment, _MARK: self.mark},
            start_new_session=True,
            preexec_fn=_death_signal(),
        )
        return self.process

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)
        if number in _STOPS:
            self.n_stops += 1
            if self.n_stops == 1:
                raise _Stopped(number)
            self.kill()  # asked twice

    def end(self, ask: bool = True) -> None:
        """Ask the launcher to end its ranks (unless a signal has done so), then make sure."""
        if self.process is None:
            return
        if ask and self.process.poll() is None:
            self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_GRACE_S)
        self.kill()

    def kill(self) -> None:
        """Kill what is left of this job, wherever it moved in the process tree."""
        if self.process is None:
            return
        for pid in _marked(self.mark):
            _kill(pid)
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for pid in _marked(self.mark):  # started while the first round ran
            _kill(pid)


def run_job(
    command: Sequence[str], environment: Mapping[str, str], deadline_s: float | None = None
) -> Outcome:
    """Run a launcher to its end, passing signals on and leaving nothing behind.

    Parameters
    ----------
    command : sequence of str
        Launcher with its arguments.
    environment : mapping of str to str
        The whole environment of the job.
    deadline_s : float or None
        Seconds after which the job is ended; None waits for ever.

    Returns
    -------
    Outcome
        If the job failed, was stopped or timed out, all its processes on this node are gone.

    Raises
    ------
    OSError
        If the launcher cannot be started.
    """
    job = _Supervisor(command, environment)
    previous = {}
    if threading.current_thread() is threading.main_thread():
        previous = {n: signal.signal(n, job.on_signal) for n in (*_STOPS, *_NOTES)}
    try:
        code = job.start().wait(deadline_s)
        if code != 0:
            job.kill()
        return Outcome(code)
    except subprocess.TimeoutExpired:
        job.end()
        return Outcome(_code(job), timed_out=True)
    except _Stopped as stop:
        job.end(ask=False)
        return Outcome(_code(job), stopped_by=int(stop.args[0]))
    except BaseException:
        job.end()
        raise
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _code(job: _Supervisor) -> int:
    code = None if job.process is None else job.process.returncode
    return 1 if code is None else code


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def _marked(mark: str) -> list[int]:
    """Processes of this job, by a mark in their environment: ranks leave group and session."""
    needle = f"{_MARK}={mark}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            if needle in entry.read_bytes().split(b"\0"):
                found.append(int(entry.parent.name))
        except OSError:
            continue
    return found


def _death_signal() -> Callable[[], None] | None:
    """On Linux: the launcher is asked to end when this process dies, even by SIGKILL."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl
    set_parent_death_signal = 1

    def before_exec() -> None:
        prctl(set_parent_death_signal, signal.SIGTERM)

    return before_exec
