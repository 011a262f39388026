"""Data, tensor, pipeline and sequence parallelism where MPI is the fabric.

A parallel strategy is a map from one global object to rank-owned local objects, plus the
collectives that keep the map true.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mpipar._version import version as __version__

if TYPE_CHECKING:
    from mpipar.comm import (
        Call,
        CommInfo,
        Communicator,
        IdentityCommunicator,
        Op,
        ReduceOp,
        Request,
        ThreadWorld,
        init,
        wait_all,
        wait_any,
        wrap,
    )
    from mpipar.data_parallel import DataParallel
    from mpipar.errors import ParallelismError
    from mpipar.mesh import Mesh, MeshLayout

_HOMES = {
    "Call": "comm",
    "CommInfo": "comm",
    "Communicator": "comm",
    "DataParallel": "data_parallel",
    "IdentityCommunicator": "comm",
    "Mesh": "mesh",
    "MeshLayout": "mesh",
    "Op": "comm",
    "ParallelismError": "errors",
    "ReduceOp": "comm",
    "Request": "comm",
    "ThreadWorld": "comm",
    "init": "comm",
    "wait_all": "comm",
    "wait_any": "comm",
    "wrap": "comm",
}

__all__ = [
    "Call",
    "CommInfo",
    "Communicator",
    "DataParallel",
    "IdentityCommunicator",
    "Mesh",
    "MeshLayout",
    "Op",
    "ParallelismError",
    "ReduceOp",
    "Request",
    "ThreadWorld",
    "__version__",
    "init",
    "wait_all",
    "wait_any",
    "wrap",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"mpipar.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
