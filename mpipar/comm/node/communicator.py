"""Collectives through the shared memory of a node, behind the same verbs.

A `NodeCommunicator` wraps a transport whose ranks are all on one node. Every collective begins
with an arrival: each rank publishes what it calls and where its arrays lie, and looks at what its
peers published. So calls that differ are refused on every rank before a byte is read, always.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from mpipar.comm.base import Communicator
from mpipar.comm.call import Call, Op
from mpipar.comm.node.calls import NodeCalls
from mpipar.comm.node.flags import LINE_BYTES, Flags
from mpipar.comm.node.host import Door, Host, Pending, Queue
from mpipar.comm.node.paths import Paths
from mpipar.comm.node.planned import Planned
from mpipar.comm.node.plans import Plans
from mpipar.comm.node.replay import again, replayer
from mpipar.comm.port import NodePort
from mpipar.comm.request import ENDED, Request
from mpipar.errors import CountOutOfRange, RankFailed

_PEERS = (Op.SEND, Op.RECV)
_MAX_RANKS = 128


class NodeCommunicator(Planned):
    """A group whose ranks share the memory of one node.

    Parameters
    ----------
    inner : Communicator
        The transport: carries messages, groups, and what it does better.
    host : Host
        Memory and waiting on this node.
    offsets : sequence of int
        Where the lines of the ranks lie.
    paths : Paths
        Which algorithm for which call.
    """

    def __init__(
        self, inner: Communicator, host: Host, offsets: Sequence[int], paths: Paths
    ) -> None:
        super().__init__(inner.info, inner.name, inner.deterministic)
        self.inner, self.host = inner, host
        self.door = Door()
        self.open = True
        self.old_view = -1
        self.calls = Queue(self, host)
        self._port = NodePort(self)
        self._plans = Plans(self._latest)
        self._set_lines(offsets, paths)

    def _set_lines(self, offsets: Sequence[int], paths: Paths) -> None:
        host = self.host
        self._line = offsets[self.rank]
        self.flags = Flags(host.arena.memory, offsets, self.rank, host.fence)
        self.programs = NodeCalls(self.inner, host, self.flags, paths, host.process_ids(self.inner))
        simple = host.fence is None and not host.turns
        self._replay = replayer(self) if simple else partial(again, self)  # type: ignore[method-assign]
        host.adopt(self)

    @classmethod
    def over(cls, inner: Communicator, host: Host, paths: Paths) -> Communicator:
        """Wrap a transport. Collective over it.

        Parameters
        ----------
        inner : Communicator
            All its ranks are on this node.
        host : Host
            Memory and waiting on this node.
        paths : Paths
            Which algorithm for which call.

        Returns
        -------
        Communicator
            `inner` itself where a rank has no room for its line.
        """
        if not 1 < inner.size <= _MAX_RANKS:
            return inner
        offsets = _lines(inner, host)
        if min(offsets) >= 0:
            return cls(inner, host, offsets, paths)
        if offsets[inner.rank] >= 0:
            host.arena.give(offsets[inner.rank])
        return inner

    @property
    def paths(self) -> Paths:
        """Which algorithm for which call; the same on every rank."""
        return self.programs.paths

    @paths.setter
    def paths(self, paths: Paths) -> None:
        self.programs.use(paths)
        self._plans.clear()

    @property
    def mpi(self) -> Any:
        """The owned mpi4py communicator, where the transport has one."""
        return self.inner.mpi  # type: ignore[attr-defined]

    @property
    def world_ranks(self) -> tuple[int, ...]:
        """The ranks of the group, as ranks of the world."""
        return self.inner.world_ranks  # type: ignore[attr-defined,no-any-return]

    @property
    def deadline_s(self) -> float:
        """Longest wait for a call, in seconds."""
        return self.inner.deadline_s  # type: ignore[attr-defined,no-any-return]

    # -- the seam ---------------------------------------------------------------------------

    def submit(self, call: Call) -> Request:
        """Start one call through node memory.

        Parameters
        ----------
        call : Call
            Any call; messages are the transport's.

        Returns
        -------
        Request
            Ended if the call is blocking.

        Raises
        ------
        RankFailed
            If the communicator is closed, or another thread is inside it.
        """
        if call.op in _PEERS:
            return self._message(call)
        self.enter(call)
        try:
            if call.blocking:
                self.calls.run(call, self.programs.program(call))
                return ENDED
            pending = Pending(call, self.programs.program(call))
            self.calls.add(pending)
        finally:
            self.door.leave()
        block = (lambda: self._end(pending)) if self.host.turns else None
        return Request(
            call, lambda: self._advance(pending), self.calls.missing, self.deadline_s, block
        )

    def split(self, color: int | None, key: int = 0, purpose: str = "split") -> Communicator | None:
        """Make one group per color. Collective over this group.

        Parameters
        ----------
        color, key, purpose
            As in `Communicator.split`.

        Returns
        -------
        Communicator or None
            The group of this rank.
        """
        self.calls.drain()
        group = self.inner.split(color, key, purpose)
        return None if group is None else NodeCommunicator.over(group, self.host, self.paths)

    def progress(self) -> None:
        """Move pending calls on without waiting for any of them."""
        self.move_on()
        self.inner.progress()

    def move_on(self) -> None:
        """Move pending calls in node memory on, unless a thread is inside this group."""
        if self.door.enter():
            try:
                self.calls.advance()
            finally:
                self.door.leave()

    def close(self) -> None:
        """Release the group and its shared memory. Collective over it."""
        if self.open:
            self.close_devices()
            self.calls.drain()
            self.open = False
            self.calls.halted.append(RankFailed("closed"))
            self._plans.clear()
            self.inner.barrier()  # peers may still look at this rank's line
            self.programs.close()
            self._port.close()
            for offset in (self._line, self.old_view):
                if offset >= 0:
                    self.host.arena.give(offset)
            self.inner.close()

    def renew(self) -> None:
        """Begin anew after calls were broken off. Collective; the transport must be sound."""
        self.calls.clear()
        self.calls.halted.append(RankFailed("renewed"))  # for handles that knew the old lines
        self.calls = Queue(self, self.host)
        self._plans.clear()
        lines = _lines(self.inner, self.host)  # the old ones stay: peers may look at them
        self._set_lines(lines, self.paths)

    def force(self, algorithm: str) -> None:
        """Let every call of this group take one algorithm, as ``MPIPAR_ALGORITHM`` does for all.

        Parameters
        ----------
        algorithm : str
            "flags", "stage", "copy" or "mpi", where the call allows it; "" for the table. The same
            on every rank.
        """
        self.paths = replace(self.paths, forced=algorithm)

    def port(self) -> NodePort:
        """Where channels of this group lie."""
        return self._port

    # -- one call ---------------------------------------------------------------------------

    def enter(self, call: Call) -> None:
        """Make this rank the one that is in a call, or say why it cannot be."""
        self.host.arriving(self, call)
        if not self.door.enter():
            raise RankFailed(
                f"two threads call {self.name} at the same time; give each thread its own group: "
                "comm.split(0, purpose='thread name')"
            )
        if self.calls.halted:
            self.door.leave()
            if not self.open:
                raise RankFailed(f"{self.name} is closed; {call} came after close()")
            raise RankFailed(f"{self.name} is unusable since: {self.calls.halted[0]}")

    def _message(self, call: Call) -> Request:
        """A message of the transport; collectives under way go on while it waits."""
        if not call.blocking or not self.host.pending:
            return self.inner.submit(call)
        self.host.finish(self, self.inner.submit(call._replace(blocking=False)))
        return ENDED

    def _advance(self, pending: Pending) -> bool:
        if not pending.done:
            self.move_on()
            if not pending.done and self.host.turns:
                self.host.rest(self)
                self.move_on()
        if pending.error is not None:
            raise pending.error
        return pending.done

    def _end(self, pending: Pending) -> None:
        if self.door.enter():
            try:
                self.calls.drain(pending)
            finally:
                self.door.leave()


def _lines(inner: Communicator, host: Host) -> list[int]:
    """Where the fresh lines of all ranks lie; -1 for a rank without room."""
    try:
        line = host.arena.take(LINE_BYTES)
        host.arena.memory.bytes[line : line + LINE_BYTES] = 0
    except CountOutOfRange:
        line = -1
    offsets: list[int] = inner.all_gather(np.array([line], np.int64)).tolist()
    return offsets
