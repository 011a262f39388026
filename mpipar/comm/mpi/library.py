"""Loading mpi4py without starting MPI, so that a wrong launch can be refused before it aborts."""

from __future__ import annotations

import sys

import mpi4py

if "mpi4py.MPI" not in sys.modules:
    mpi4py.rc.initialize = False
    mpi4py.rc.finalize = True

from mpi4py import MPI

__all__ = ["MPI"]
