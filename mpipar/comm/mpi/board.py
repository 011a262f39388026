"""The board: one line per rank in node-shared memory, read by the watchdogs of its peers.

Each rank writes its own line only (process id, state, and how far it is in each group), with
aligned 8-byte stores. The board is a file in shared memory that is mapped and unlinked at once,
so that nothing stays behind, whatever happens to the job.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

_SLOTS = 256
_HEAD = 8
_LINE = _HEAD + _SLOTS
_PID, _STATE = 0, 1
RUNNING, LEFT, FAILED = 1, 2, 3
HAS_LEFT = "has left the program"
KILLED = "was killed"


class Board:
    """Lines of the ranks of one node.

    Parameters
    ----------
    world_ranks : tuple of int
        World ranks on this node, in node order.
    index : int
        Which of them is this process.
    share : callable
        Gives every rank of the node the text of its first rank; collective over the node.
    meet : callable
        A barrier over the node.
    """

    def __init__(
        self,
        world_ranks: tuple[int, ...],
        index: int,
        share: Callable[[str], str],
        meet: Callable[[], None],
    ) -> None:
        self.lines = {rank: i * _LINE for i, rank in enumerate(world_ranks)}
        n_bytes = 8 * _LINE * len(world_ranks)
        path = ""
        if index == 0:
            folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
            handle, path = tempfile.mkstemp(prefix="mpipar-board-", dir=folder)
            os.truncate(path, n_bytes)
            os.close(handle)
        path = share(path)
        with Path(path).open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), n_bytes)
        self.words = memoryview(self._map).cast("q")
        self.mine = index * _LINE
        self.words[self.mine + _PID] = os.getpid()
        self.words[self.mine + _STATE] = RUNNING
        meet()
        if index == 0:
            os.unlink(path)

    def slot(self, group: int) -> int:
        """Where this rank publishes its place in a group.

        Parameters
        ----------
        group : int
            Number of the group, equal on its ranks.

        Returns
        -------
        int
            Index into `words`.
        """
        return self.mine + _HEAD + group % _SLOTS

    def set_state(self, state: int) -> None:
        """Publish that this rank runs, has left or has failed."""
        self.words[self.mine + _STATE] = state

    def arrived(self, rank: int, group: int, mark: int) -> bool | None:
        """Whether a peer has come as far as `mark` in a group.

        Parameters
        ----------
        rank : int
            World rank.
        group : int
            Number of the group.
        mark : int
            ``group << 32 | sequence number``.

        Returns
        -------
        bool or None
            None where the board cannot tell: another node, or a slot shared by two groups.
        """
        line = self.lines.get(rank)
        if line is None:
            return None
        word = self.words[line + _HEAD + group % _SLOTS]
        if word and word >> 32 != mark >> 32:
            return None
        return word >= mark

    def gone(self, rank: int) -> str | None:
        """Why a peer will never arrive, or None.

        Parameters
        ----------
        rank : int
            World rank.

        Returns
        -------
        str or None
            ``"has left the program"``, ``"failed"`` or ``"was killed"``.
        """
        line = self.lines.get(rank)
        if line is None:
            return None
        state = self.words[line + _STATE]
        if state != RUNNING:
            return HAS_LEFT if state == LEFT else "failed"
        return None if _alive(self.words[line + _PID]) else KILLED

    def lost(self) -> str:
        """A sentence on a rank of this node that was killed, "" if there is none."""
        return next((f"rank {r} {KILLED}" for r in self.lines if self.gone(r) == KILLED), "")


def _alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        if Path("/proc/self/stat").exists():
            return False
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        return True
    except OSError:
        return True
    return fields[0] not in "ZX"
