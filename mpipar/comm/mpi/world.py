"""Starting MPI: the world communicator, its board, its watchdog, and the hooks for its end."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection

import numpy as np
from mpi4py import MPI

from mpipar.comm.base import Communicator
from mpipar.comm.device.arrays import use_device
from mpipar.comm.hierarchy import HierarchicalCommunicator, placed
from mpipar.comm.mpi.board import Board
from mpipar.comm.mpi.communicator import MPICommunicator
from mpipar.comm.mpi.groups import Groups, Settings
from mpipar.comm.mpi.lifecycle import Job, install
from mpipar.comm.mpi.node import make_host, simulated_node
from mpipar.comm.mpi.watchdog import Watchdog
from mpipar.comm.node.communicator import NodeCommunicator
from mpipar.comm.node.paths import Paths
from mpipar.comm.placement import limit_threads
from mpipar.comm.request import set_lost
from mpipar.errors import LaunchError
from mpipar.launch.environment import check_before_start, check_launch
from mpipar.launch.prepare import prepare


class World:
    """MPI as this process sees it; one an interpreter.

    Parameters
    ----------
    settings : Settings
        Switches of the transport.
    """

    def __init__(self, settings: Settings) -> None:
        library = MPI.Get_library_version()
        self.place = prepare(os.environ)  # before MPI starts: it picks its cards by the device
        if not MPI.Is_initialized():
            check_before_start(os.environ, library)
            if self.place.device is not None and self.place.device.n_visible > 1:
                use_device(self.place.device.index)
            MPI.Init_thread(MPI.THREAD_MULTIPLE)
        base = MPI.COMM_WORLD
        check_launch(os.environ, base.size, library, " ".join(sys.argv) or "PROGRAM ...")
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE and base.size > 1:
            raise LaunchError(
                "the MPI library gives no MPI_THREAD_MULTIPLE, which the watchdog needs; leave "
                "mpi4py.rc.thread_level at 'multiple'"
            )
        self.groups = Groups(settings)
        self.node = base.Split_type(MPI.COMM_TYPE_SHARED)
        world = base.Dup()
        lines = self.node.allgather((base.rank, self.place.cores))
        on_node = tuple(rank for rank, _ in lines)
        node = self.node
        if base.size > 1:
            limit_threads(os.environ, [cores for _, cores in lines], node.rank)
        self.board = Board(
            on_node,
            node.rank,
            lambda text: _share(node, text),
            node.Barrier,
        )
        self.job = Job(base.rank, self.board, base.Abort)
        self.watchdog = Watchdog(self.board, base.rank, self.job.end)
        install(self.job)
        set_lost(self.board.lost)
        shared = self.groups.adopt(world, tuple(range(base.size)), "world")
        self.transport = MPICommunicator(shared, self.groups, self.watchdog)
        near = simulated_node(node)
        near_ranks = tuple(near.allgather(base.rank))
        self.nodes: list[int] = base.allgather(near_ranks[0])
        host = None
        if base.size > 1:
            host = make_host(near, near_ranks, self.watchdog, self.groups)
        self.host = host if base.allreduce(int(host is not None), MPI.MIN) else None
        self.comm = self._over_node(self.transport)

    def _over_node(self, transport: MPICommunicator) -> Communicator:
        """The transport, through node memory where all its ranks share some."""
        if self.host is None:
            return transport
        paths = Paths.from_environment(len(self.host.node_ranks))
        return placed(transport, self.host, self.nodes, paths)

    def give_up(self, names: Collection[str], reason: str) -> None:
        """Take groups out of use after calls on them were broken off; the world starts anew.

        Parameters
        ----------
        names : collection of str
            As in `Groups.marks`, the same on every rank of such a group; the world's on all ranks.
        reason : str
            Told by the error of every later call on them.
        """
        world = self.transport.world_ranks
        self.groups.give_up(names, reason)
        if not any(ranks == world and p.startswith("world") for ranks, p in self.groups.live):
            purpose = f"world {self.groups.n_made}"
            self.transport.attach(self.groups.adopt(MPI.COMM_WORLD.Dup(), world, purpose))
            if isinstance(self.comm, (NodeCommunicator, HierarchicalCommunicator)):
                self.comm.renew()

    def wrap(self, comm: MPI.Intracomm) -> Communicator:
        """A communicator of ours over the ranks of the user's. Collective over it.

        Parameters
        ----------
        comm : MPI.Intracomm
            Stays the user's; its traffic and ours never meet.

        Returns
        -------
        Communicator
            Over a duplicate.

        Raises
        ------
        LaunchError
            If it is no intracommunicator.
        """
        if not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
            raise LaunchError(f"wrap needs an mpi4py intracommunicator, got {type(comm).__name__}")
        mine, everyone = comm.Get_group(), MPI.COMM_WORLD.Get_group()
        ranks = MPI.Group.Translate_ranks(mine, list(range(mine.size)), everyone)
        mine.Free()
        everyone.Free()
        own = comm.Dup()
        number = own.allreduce(self.groups.n_made, MPI.MAX)  # the same on every rank, and new
        shared = self.groups.adopt(own, tuple(ranks), f"wrapped {number}")
        return self._over_node(MPICommunicator(shared, self.groups, self.watchdog))


def _share(node: MPI.Comm, text: str) -> str:
    """The text of the node's first rank."""
    raw = np.zeros(4096, np.uint8)
    data = text.encode()
    raw[: len(data)] = np.frombuffer(data, np.uint8)
    node.Bcast(raw, 0)
    return bytes(raw).rstrip(b"\0").decode()


def start(settings: Settings) -> World:
    """Start MPI in this process.

    Parameters
    ----------
    settings : Settings
        Switches of the transport.

    Returns
    -------
    World
        With the world communicator. Collective over all processes of the job.
    """
    sys.stdout.flush()
    return World(settings)
