"""Stopping at a time limit: a signal on any rank ends the run of all ranks after the same step.

Slurm sends it by ``--signal=USR1@SECONDS``. Ranks see it at different steps, or only some of them
do, so they agree at the end of each step. A file in the run folder tells the job script that the
run has not come to its end.
"""

from __future__ import annotations

import signal
from pathlib import Path
from types import FrameType

import numpy as np

from mpipar.comm import Communicator, ReduceOp

STOPPED = "stopped"


class StopRequest:
    """Whether this process has been asked to stop, and whether any rank has.

    Installs a handler of ``SIGUSR1``, which would end the process otherwise: make it early. Main
    thread only.
    """

    def __init__(self) -> None:
        self.is_asked = False
        signal.signal(signal.SIGUSR1, self._ask)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.is_asked = True

    def is_agreed(self, comm: Communicator) -> bool:
        """Whether any rank has been asked. Collective.

        Parameters
        ----------
        comm : Communicator
            All ranks.

        Returns
        -------
        bool
            The same on every rank.

        Notes
        -----
        Cost: one all-reduce of 8 bytes.
        """
        return bool(comm.all_reduce(np.array(self.is_asked, np.int64), ReduceOp.MAX))


def mark_stopped(folder: Path, step: int) -> None:
    """Leave the note that a run stopped before its end.

    Parameters
    ----------
    folder : Path
        Run folder.
    step : int
        The last step that was done.
    """
    (folder / STOPPED).write_text(f"after step {step}\n", encoding="utf-8")


def clear_stopped(folder: Path) -> None:
    """Take the note away: a run goes on, or starts.

    Parameters
    ----------
    folder : Path
        Run folder.
    """
    (folder / STOPPED).unlink(missing_ok=True)
