"""Tests on several ranks: a pytest plugin, installed with the library.

A test that asks for the fixture ``comm`` runs once per rank: on n threads (`ThreadWorld`) in a
plain run, on the ranks of the job under an MPI launcher. See `mpipar.testing.plugin`.
"""

from __future__ import annotations

import os

from mpipar.launch.environment import SINGLETON_VARIABLE, Launched, detect

__all__ = ["launched_ranks"]


def launched_ranks() -> Launched | None:
    """The launcher that made this process one rank of a job.

    Returns
    -------
    Launched or None
        None for a plain run; also for a shell that is a Slurm step of one task.
    """
    if os.environ.get(SINGLETON_VARIABLE) == "1":
        return None
    launched = detect(os.environ)
    if launched is None or (launched.launcher.startswith("srun") and launched.size == 1):
        return None
    return launched
