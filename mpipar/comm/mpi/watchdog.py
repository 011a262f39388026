"""The watchdog: ends the job when a rank waits for one that will never come.

A blocking MPI call cannot be interrupted, so a thread looks at it from outside: peers on the node
by the board, everything else by a deadline.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

from mpipar.comm.call import Call, Op
from mpipar.comm.mpi.board import HAS_LEFT, Board

_PERIOD_S = 0.25
_GRACE_S = 1.0


class Group(Protocol):
    """What the watchdog needs to know of a communicator."""

    name: str
    number: int
    world_ranks: tuple[int, ...]
    deadline_s: float


class Watchdog:
    """Watches the one blocking call that this rank may be in.

    Parameters
    ----------
    board : Board
        Lines of the node.
    world_rank : int
        Of this process.
    end : callable
        Ends the whole job; gets the report.
    """

    def __init__(self, board: Board, world_rank: int, end: Callable[[str], None]) -> None:
        self.board = board
        self._world_rank = world_rank
        self._end = end
        self.current: tuple[Call, Group, int] | None = None
        self._seen: tuple[Call, Group, int] | None = None
        self._since = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="mpipar watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join(2 * _PERIOD_S)

    def missing(self, call: Call, group: Group, mark: int) -> tuple[list[int], list[str]]:
        """Who has not arrived at a call.

        Parameters
        ----------
        call : Call
            The call that waits.
        group : Group
            Its communicator.
        mark : int
            Its place on the board.

        Returns
        -------
        tuple
            World ranks that have not arrived, and sentences on those that never will.
        """
        if call.op in (Op.SEND, Op.RECV):
            awaited = [group.world_ranks[call.peer]]
            absent = awaited
        else:
            awaited = [r for r in group.world_ranks if r != self._world_rank]
            absent = [r for r in awaited if self.board.arrived(r, group.number, mark) is False]
        known = {r: why for r in awaited if (why := self.board.gone(r))}
        return absent, [
            f"rank {r} {why}"
            for r, why in known.items()
            if r in absent
            or (why != HAS_LEFT and self.board.arrived(r, group.number, mark) is None)
        ]

    def report(self, call: Call, group: Group, mark: int, waited_s: float) -> str:
        """The lines that are printed when the job is ended.

        Parameters
        ----------
        call, group, mark
            As in `missing`.
        waited_s : float
            How long this rank has waited.

        Returns
        -------
        str
            Call, sequence number and ranks that have not arrived.
        """
        absent, gone = self.missing(call, group, mark)
        elsewhere = [r for r in group.world_ranks if r not in self.board.lines]
        lines = [
            f"rank {self._world_rank} has waited {waited_s:.1f} s in {call}, call number "
            f"{mark & 0xFFFFFFFF} of {group.name}"
        ]
        if absent:
            lines.append(f"not arrived: ranks {', '.join(map(str, absent))}")
        if elsewhere:
            lines.append(f"on other nodes, not known: ranks {', '.join(map(str, elsewhere))}")
        return "; ".join([*lines, *gone])

    def _watch(self) -> None:
        while not self._stop.wait(_PERIOD_S):
            current, now = self.current, time.monotonic()
            if current is None or current is not self._seen:
                self._seen, self._since = current, now
                continue
            waited_s = now - self._since
            call, group, mark = current
            if waited_s < _GRACE_S:
                continue
            _, gone = self.missing(call, group, mark)
            if (gone or waited_s > group.deadline_s) and self.current is current:
                self._end(self.report(call, group, mark, waited_s))
