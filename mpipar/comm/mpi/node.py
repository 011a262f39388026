"""MPI processes of one node: their shared memory, and how they wait for each other's flags."""

from __future__ import annotations

import os
import platform
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from mpi4py import MPI

from mpipar.comm.call import Call
from mpipar.comm.mpi.groups import Groups
from mpipar.comm.mpi.watchdog import Watchdog
from mpipar.comm.node.arena import Arena, region_limit
from mpipar.comm.node.flags import Fence
from mpipar.comm.node.host import Group, Movable
from mpipar.comm.node.memory import Memory
from mpipar.comm.node.process_memory import probe
from mpipar.comm.request import Request, pause, set_others
from mpipar.errors import CollectiveTimeout, RankFailed

_SPINS = 200
_LOOK_S = 0.25
_GRACE_S = 1.5
_ORDERED = ("x86_64", "amd64", "i686", "i386")


@dataclass
class _Watched:
    """A group of node memory as the watchdog sees it."""

    name: str
    number: int
    world_ranks: tuple[int, ...]
    deadline_s: float


@dataclass
class MPIHost:
    """What one MPI process knows of its node; see `node_host.Host`.

    Parameters
    ----------
    arena : Arena
        This rank's region.
    fence : callable or None
        Where the processor needs one.
    pids : sequence of int or None
        Processes by node rank, where the kernel lets them copy from each other.
    n_spins : int
        Polls before the first yield: none where there are more ranks than cores.
    watchdog : Watchdog
        Of this process.
    node_ranks : tuple of int
        World ranks on this node.
    groups : Groups
        The communicators of this process.
    """

    arena: Arena
    fence: Fence | None
    pids: Sequence[int] | None
    n_spins: int
    watchdog: Watchdog
    node_ranks: tuple[int, ...]
    groups: Groups
    turns: bool = False
    pending: list[Movable] = field(default_factory=list)
    _watched: dict[int, _Watched] = field(default_factory=dict)

    def process_ids(self, inner: Any) -> Sequence[int] | None:
        """Processes by rank of a group."""
        if self.pids is None:
            return None
        ranks: tuple[int, ...] = inner.world_ranks
        return [self.pids[self.node_ranks.index(r)] for r in ranks]

    def arriving(self, group: Group, call: Call) -> None:
        """Nothing: real ranks run by themselves."""

    def rest(self, group: Group) -> None:
        """Nothing: real ranks run by themselves."""

    def block(self, comm: Group, call: Call, ready: Callable[[], bool]) -> None:
        """Wait until `ready()`: yields first, then sleeps, and looks whether peers still live.

        Parameters
        ----------
        comm : Group
            On which is waited.
        call : Call
            What is waited for.
        ready : callable
            Without effects.

        Raises
        ------
        RankFailed
            If a peer has died.
        CollectiveTimeout
            At the deadline of the group; it is unusable from then on.
        """
        group = self._group(comm)
        board, mark = self.watchdog.board, group.number << 32 | comm.flags.sequence
        board.words[board.slot(group.number)] = mark
        self.watchdog.current = (call, group, mark)
        turn, start, looked = 0, 0.0, 0.0
        try:
            while not ready():
                turn += 1
                pause(turn)
                if self.pending or self.groups.pending:
                    self._others(comm)
                if turn & 0xFF == 0 and (now := time.monotonic()) - looked > _LOOK_S:
                    start, looked = start or now, now
                    self._look(comm, call, group, ready, now - start)
        finally:
            self.watchdog.current = None

    def finish(self, comm: Group, request: Request) -> None:
        """Wait for a request of the transport; calls under way on other groups go on.

        Parameters
        ----------
        comm : Group
            On which is waited.
        request : Request
            Of its transport.
        """
        turn = 0
        while (self.pending or self.groups.pending) and not request.test():
            self._others(None)
            turn += 1
            pause(turn)
        request.wait()

    def adopt(self, comm: Group) -> None:
        """Let the group's record know of its node memory.

        Parameters
        ----------
        comm : Group
            Fresh.
        """
        users = comm.inner.shared.users
        if comm not in users:
            users.append(comm)

    def _look(
        self,
        comm: Group,
        call: Call,
        group: _Watched,
        ready: Callable[[], bool],
        waited_s: float,
    ) -> None:
        """End the wait where a peer that had arrived has died, or at the deadline."""
        gone = [
            f"rank {r} {why}" for r in group.world_ranks if (why := self.watchdog.board.gone(r))
        ]
        if gone and waited_s > _GRACE_S and not ready():
            raise RankFailed(f"{call} of {group.name}: {'; '.join(gone)}")
        if waited_s > group.deadline_s:
            raise CollectiveTimeout(
                f"{call}, call number {comm.flags.sequence} of {group.name}, has not ended within "
                f"{group.deadline_s:g} s{comm.calls.missing()}"
            )

    def others(self) -> None:
        """Move on all that is under way: peers may wait for its next step."""
        self._others(None)

    def _others(self, comm: Group | None) -> None:
        """Move on what is under way elsewhere: peers may wait for its next step."""
        for other in list(self.pending):
            if other is not comm:
                other.move_on()
        if self.groups.pending:
            self.groups.advance()

    def _group(self, comm: Group) -> _Watched:
        watched = self._watched.get(id(comm))
        if watched is None:
            inner: Any = comm.inner
            number = zlib.crc32(f"node memory of {inner.number}".encode()) & 0x7FFFFFFF
            watched = _Watched(comm.name, number, inner.world_ranks, inner.deadline_s)
            self._watched[id(comm)] = watched
        return watched


def simulated_node(node: MPI.Comm) -> MPI.Comm:
    """The node itself, or a part of it: ``MPIPAR_NODE_SIZE`` ranks make believe to be a node.

    Parameters
    ----------
    node : MPI.Comm
        The processes of the machine.

    Returns
    -------
    MPI.Comm
        Those that share memory.
    """
    size = int(os.environ.get("MPIPAR_NODE_SIZE", "0"))
    return node.Split(node.rank // size, node.rank) if size else node


def make_host(
    node: MPI.Comm, world_ranks: tuple[int, ...], watchdog: Watchdog, groups: Groups
) -> MPIHost | None:
    """Set up the shared memory of a node. Collective over it.

    Parameters
    ----------
    node : MPI.Comm
        The processes of the node.
    world_ranks : tuple of int
        Their world ranks.
    watchdog : Watchdog
        Of this process.
    groups : Groups
        The communicators of this process.

    Returns
    -------
    MPIHost or None
        None on every process where there is no shared memory.
    """
    n = node.size
    limit = node.allreduce(region_limit(n), MPI.MIN)
    if limit <= 0:
        return None
    memory = Memory.of_node(
        node.rank, n, lambda text: node.bcast(text, 0), lambda k: node.allreduce(k, MPI.MIN), limit
    )
    if memory is None:
        return None
    cores = set().union(*node.allgather(sorted(os.sched_getaffinity(0))))
    spins = _SPINS if n <= len(cores) else 0
    host = MPIHost(
        Arena(memory, node.rank),
        _fence(node),
        _process_ids(node),
        spins,
        watchdog,
        world_ranks,
        groups,
    )
    groups.node_pending = host.pending
    set_others(host.others)
    return host


def _process_ids(node: MPI.Comm) -> list[int] | None:
    """Process ids of the node, if each process may copy from and to each other one."""
    token = int.from_bytes(os.urandom(7))
    word = np.array([token], np.int64)
    rows = node.allgather((os.getpid(), word.ctypes.data, token))
    works = all(probe(*row) for rank, row in enumerate(rows) if rank != node.rank)
    agreed = node.allreduce(int(works), MPI.MIN)
    return [pid for pid, _, _ in rows] if agreed else None


def _fence(node: MPI.Comm) -> Fence | None:
    """The sync of a small window, on processors that do not keep stores in order."""
    if platform.machine().lower() in _ORDERED and os.environ.get("MPIPAR_FENCE") != "1":
        return None
    window = MPI.Win.Allocate_shared(8, 8, comm=MPI.Intracomm(node))
    window.Lock_all(MPI.MODE_NOCHECK)  # MPICH asks for an epoch
    sync: Fence = window.Sync
    return sync
