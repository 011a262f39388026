"""Ends of jobs: one rank that raises ends them all, within seconds and with its traceback.

MPI knows three ends that Python programs meet by accident: an exception on one rank, a rank that
leaves early, and a rank that is killed. The first is handled here; for the others peers read the
board (see `watchdog`).
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

from mpipar.comm.mpi.board import FAILED, HAS_LEFT, LEFT, Board

_LAST_RESORT_S = 10.0
_READ_S = 0.2  # a launcher that is told to abort may drop what it has not yet read


class Job:
    """How this process takes part in a job, and how it ends it.

    Parameters
    ----------
    rank : int
        World rank.
    board : Board
        Lines of the node.
    kill_all : callable
        Ends every rank; gets the exit code.
    """

    def __init__(self, rank: int, board: Board, kill_all: Callable[[int], object]) -> None:
        self.rank = rank
        self.board = board
        self.stream: TextIO | None = None  # instead of sys.stderr, where that is captured
        self._kill_all = kill_all
        self._ended = threading.Lock()

    def end(self, report: str, code: int = 1) -> None:
        """Print a report and end every rank of the job.

        Parameters
        ----------
        report : str
            Printed on stderr, each line with the rank before it.
        code : int
            Exit code of the job.
        """
        if not self._ended.acquire(blocking=False):
            return
        self.board.set_state(FAILED)
        prefix = f"[mpipar rank {self.rank}] "
        stream = self.stream or sys.stderr
        stream.write("".join(f"{prefix}{line}\n" for line in report.rstrip().splitlines()))
        stream.flush()
        sys.stdout.flush()
        resort = threading.Timer(_LAST_RESORT_S, os._exit, [code])
        resort.daemon = True
        resort.start()
        time.sleep(_READ_S)
        self._kill_all(code)

    def leave(self) -> None:
        """Say that this rank is done, and wait here for peers rather than inside the MPI.

        A rank that peers still wait for is seen by their watchdogs, which end the job.
        """
        self.board.set_state(LEFT)
        while running := [r for r in self.board.lines if r != self.rank]:
            states = {r: self.board.gone(r) for r in running}
            if all(why == HAS_LEFT for why in states.values()):
                return
            bad = [f"rank {r} {why}" for r, why in states.items() if why and "left" not in why]
            if bad:
                self.end("; ".join(bad))
            time.sleep(0.005)


_job: Job | None = None


def install(job: Job) -> None:
    """Take over uncaught exceptions and the exit of this process.

    Parameters
    ----------
    job : Job
        Of this process.
    """
    global _job
    _job = job
    sys.excepthook = _report_uncaught
    atexit.register(job.leave)


def current_job() -> Job | None:
    """The job of this process.

    Returns
    -------
    Job or None
        None before MPI has started.
    """
    return _job


def _report_uncaught(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    text = "".join(traceback.format_exception(kind, error, trace))
    if _job is None:
        sys.stderr.write(text)
    else:
        _job.end(text)


def run_as_rank(function: Callable[[], object]) -> int:
    """Run the whole program of a rank; an exception ends the job.

    Parameters
    ----------
    function : callable
        The program; may return an exit code.

    Returns
    -------
    int
        Exit code of this process: that of `function` or of its `SystemExit`.
    """
    try:
        value = function()
    except SystemExit as error:
        if isinstance(error.code, str):
            sys.stderr.write(error.code + "\n")
            return 1
        return error.code or 0
    except BaseException as error:
        _report_uncaught(type(error), error, error.__traceback__)
        return 1
    return value if isinstance(value, int) else 0
