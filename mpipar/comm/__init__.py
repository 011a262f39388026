"""Communicators: one verb below, nine above.

A transport implements ``submit(call)`` and ``split``; the public verbs are sugar over them.
Transports: the identity (one rank), `ThreadWorld` (n ranks as threads, ``threads``) and MPI
(``mpi``). Over either, ``node`` carries calls through the memory that ranks of a node share, and
``device`` those on arrays of a device.
"""

from mpipar.comm.base import Communicator
from mpipar.comm.call import Call, CommInfo, Op, ReduceOp
from mpipar.comm.local import IdentityCommunicator
from mpipar.comm.request import Request, wait_all, wait_any
from mpipar.comm.threads.world import ThreadWorld
from mpipar.comm.world import init, wrap

__all__ = [
    "Call",
    "CommInfo",
    "Communicator",
    "IdentityCommunicator",
    "Op",
    "ReduceOp",
    "Request",
    "ThreadWorld",
    "init",
    "wait_all",
    "wait_any",
    "wrap",
]
