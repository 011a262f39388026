"""Owned communicators: one per rank set and purpose, shared, counted and freed explicitly."""

from __future__ import annotations

import os
import threading
import zlib
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from mpi4py import MPI

from mpipar.comm.call import Op
from mpipar.comm.mpi.engine import Engine
from mpipar.comm.mpi.mover import Mover
from mpipar.errors import CollectiveMismatch, CountOutOfRange, ParallelismError, RankFailed


@dataclass
class Settings:
    """Switches of the MPI transport, read from the environment once.

    Parameters
    ----------
    checked : bool
        Compare calls between ranks before each of them (``MPIPAR_CHECK=1``).
    deadline_s : float
        Longest wait for a call (``MPIPAR_DEADLINE_S``, 600 by default).
    max_bytes : int
        Largest message in one piece (``MPIPAR_MAX_MESSAGE_BYTES``, 1 GiB by default).
    synchronous_sends : bool
        No send is ever buffered (``MPIPAR_SYNC_SENDS=1``).
    max_communicators : int
        Budget of MPI communicators (``MPIPAR_MAX_COMMUNICATORS``, 1,000 by default: MPICH has
        2,048, Open MPI 65,532, and both fail without a clear word at their limit).
    """

    checked: bool = False
    deadline_s: float = 600.0
    max_bytes: int = 2**30
    synchronous_sends: bool = False
    max_communicators: int = 1000

    @classmethod
    def from_environment(cls) -> Settings:
        """Read the switches.

        Returns
        -------
        Settings
            With what the environment says.
        """
        get = os.environ.get
        return cls(
            get("MPIPAR_CHECK") == "1",
            float(get("MPIPAR_DEADLINE_S", "600")),
            int(get("MPIPAR_MAX_MESSAGE_BYTES", str(2**30))),
            get("MPIPAR_SYNC_SENDS") == "1",
            int(get("MPIPAR_MAX_COMMUNICATORS", "1000")),
        )


@dataclass(eq=False)
class SharedGroup:
    """One owned MPI communicator and the state that all its handles share.

    Parameters
    ----------
    comm : MPI.Intracomm
        Owned.
    world_ranks : tuple of int
        Its ranks, as ranks of the world.
    purpose : str
        What it is for.
    engine : Engine
        Carries calls out on it.
    """

    comm: MPI.Intracomm
    world_ranks: tuple[int, ...]
    purpose: str
    engine: Engine
    n_users: int = 1
    sequence: int = 0
    queue: deque[Any] = field(default_factory=deque)
    peers: list[Any] = field(default_factory=list)
    busy: threading.Lock = field(default_factory=threading.Lock)
    users: list[Any] = field(default_factory=list)
    broken: ParallelismError | None = None

    def advance(self) -> None:
        """Move the calls under way on, without waiting; collectives one after the other."""
        self.advance_peers()
        while self.queue and self.queue[0].settle():
            self.queue.popleft()

    def advance_peers(self) -> None:
        """Move messages on, without waiting.

        What travels in parts (a header, pieces) keeps later messages of its channel waiting: their
        parts would be taken for its own.
        """
        held = set()
        for each in list(self.peers):
            channel = (each.call.op, each.call.peer, each.call.tag)
            if channel in held:
                continue
            if each.settle():
                self.peers.remove(each)
            elif each.has_parts:
                held.add(channel)

    @property
    def number(self) -> int:
        """A number that is equal on all ranks of the group."""
        return zlib.crc32(repr((self.world_ranks, self.purpose)).encode()) & 0x7FFFFFFF

    @property
    def name(self) -> str:
        """Shown in messages."""
        if self.purpose == "world":
            return "world"
        ranks = ", ".join(map(str, self.world_ranks[:8])) + ", ..." * (len(self.world_ranks) > 8)
        return f"{self.purpose}({ranks})"


def _is_busy(user: Any) -> bool:
    """Whether a handle through node memory has calls under way; what ended by closing has not."""
    return bool(user.calls.under_way) or any(str(e) != "closed" for e in user.calls.halted)


class Groups:
    """The communicators of this process.

    Parameters
    ----------
    settings : Settings
        For new engines, and the budget.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.live: dict[tuple[tuple[int, ...], str], SharedGroup] = {}
        self.n_made = 0
        self.pending: list[SharedGroup] = []  # those with calls under way
        self.node_pending: list[Any] = []  # those with calls under way in node memory
        self.mover = Mover(self.advance)
        self.given_up: list[Any] = []  # kept alive: the MPI may still write into their buffers

    def adopt(self, comm: MPI.Intracomm, world_ranks: tuple[int, ...], purpose: str) -> SharedGroup:
        """Own a fresh communicator.

        Parameters
        ----------
        comm : MPI.Intracomm
            Nobody else uses it.
        world_ranks : tuple of int
            Its ranks, as ranks of the world.
        purpose : str
            What it is for.

        Returns
        -------
        SharedGroup
            Counted.
        """
        settings = self.settings
        engine = Engine(comm, settings.max_bytes, settings.synchronous_sends)
        shared = SharedGroup(comm, world_ranks, purpose, engine)
        self.live[(world_ranks, purpose)] = shared
        self.n_made += 1
        return shared

    def make(
        self, parent: Any, ranks: tuple[int, ...], order: Sequence[int], purpose: str
    ) -> SharedGroup | None:
        """The group of these ranks and this purpose, shared or new. Collective over `parent`.

        Parameters
        ----------
        parent : MPICommunicator
            Over which the split is made.
        ranks : tuple of int
            World ranks of this rank's group; empty for none.
        order : sequence of int
            The same as ranks of `parent`.
        purpose : str
            What it is for.

        Returns
        -------
        SharedGroup or None
            None for a rank in no group.

        Raises
        ------
        CountOutOfRange
            If the budget of communicators is used up on any rank.
        CollectiveMismatch
            If some ranks of the group have closed it and others not.
        """
        found = self.live.get((ranks, purpose))
        full = len(self.live) >= self.settings.max_communicators
        state = 2 if found else 1 if full else 0
        states = parent.all_gather(np.array([state], np.int64))
        mine = [int(states[r]) for r in order]
        if order and 2 in mine and set(mine) != {2}:
            closed = [ranks[i] for i, s in enumerate(mine) if s != 2]
            error: Exception | None = CollectiveMismatch(
                f"ranks {closed} have closed the group {purpose}{ranks} that its other ranks keep; "
                "close() is collective"
            )
        elif 1 in states:
            error = CountOutOfRange(
                "number of open communicators (close those no longer needed, or raise "
                "MPIPAR_MAX_COMMUNICATORS)",
                f"0..{self.settings.max_communicators}",
                len(self.live) + 1,
            )
        else:
            error = None
        parent.all_gather_json(error)
        if not order:
            return None
        if found:
            found.n_users += 1
            return found
        return self.adopt(self._create(parent.mpi, order), ranks, purpose)

    def _create(self, parent: MPI.Intracomm, order: Sequence[int]) -> MPI.Intracomm:
        everyone = parent.Get_group()
        members = everyone.Incl(order)
        try:
            return parent.Create_group(members)
        except MPI.Exception as error:
            raise RankFailed(
                f"the MPI cannot make communicator number {self.n_made + 1} "
                f"({len(self.live)} are open): {error}"
            ) from None
        finally:
            members.Free()
            everyone.Free()

    def add(self, shared: SharedGroup, pending: Any) -> None:
        """Keep a call that is under way, with its arrays.

        Parameters
        ----------
        shared : SharedGroup
            The group it is made on.
        pending : object
            With its call.
        """
        (shared.peers if pending.call.op in (Op.SEND, Op.RECV) else shared.queue).append(pending)
        if shared not in self.pending:
            self.pending.append(shared)

    def advance(self) -> None:
        """Move all that is under way in this process on, but what another thread is at."""
        for shared in list(self.pending):
            if shared.busy.acquire(blocking=False):
                try:
                    shared.advance()
                    if not shared.queue and not shared.peers:
                        self.pending.remove(shared)
                finally:
                    shared.busy.release()
        for group in list(self.node_pending):
            group.move_on()

    def marks(self) -> dict[str, list[int]]:
        """How far each group is.

        Returns
        -------
        dict
            Name -> number of collectives begun, and whether any call on it is unfinished.
        """
        self.advance()  # what has ended without anybody looking is no call under way
        return {
            f"{purpose}{ranks}": [
                shared.sequence + sum(user.flags.sequence for user in shared.users),
                bool(
                    shared.queue
                    or shared.peers
                    or shared.broken
                    or any(_is_busy(user) for user in shared.users)
                ),
            ]
            for (ranks, purpose), shared in self.live.items()
        }

    def give_up(self, names: Collection[str], reason: str) -> None:
        """Take groups out of use for good, without a word to their other ranks.

        Parameters
        ----------
        names : collection of str
            As in `marks`.
        reason : str
            Told by the error of every later call on them.
        """
        for key, shared in list(self.live.items()):
            ranks, purpose = key
            if f"{purpose}{ranks}" in names:
                shared.broken = RankFailed(reason)
                for user in shared.users:
                    user.calls.halted.append(shared.broken)
                self.given_up.append(self.live.pop(key))
                if shared in self.pending:
                    self.pending.remove(shared)

    def release(self, shared: SharedGroup) -> None:
        """Give one handle back; the last one frees the communicator. Collective over it.

        Parameters
        ----------
        shared : SharedGroup
            From `adopt` or `make`.
        """
        shared.n_users -= 1
        if shared.n_users > 0:
            return
        key = (shared.world_ranks, shared.purpose)
        if self.live.get(key) is shared:
            del self.live[key]
        if shared.broken is None and not shared.queue and not shared.peers:
            shared.comm.Free()
        else:  # calls under way go on, so their communicator stays
            self.given_up.append(shared)
