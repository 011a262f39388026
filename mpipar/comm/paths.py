"""Which algorithm a call on a node takes: a table by operation and size, measured or shipped.

Algorithms: ``flags`` (slots of the flag lines, for small messages), ``stage`` and ``copy`` (node
memory; arrays outside it pass through stages, or through one copy by the kernel) and ``mpi`` (the
transport's own). Arrays in node memory are used where they lie by ``stage`` and ``copy`` alike.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from mpipar.comm.call import Call, Op
from mpipar.comm.flags import SLOT_BYTES
from mpipar.errors import UnsupportedArray

NAMES = ("flags", "stage", "copy", "mpi")
Steps = tuple[tuple[int, str], ...]
"""Rising sizes in bytes, each with the algorithm from that size on."""

_DEFAULT: Steps = ((0, "flags"), (SLOT_BYTES, "stage"))


@dataclass
class Paths:
    """The table of a process.

    Parameters
    ----------
    table : dict
        Steps by operation; an operation that is not in it takes the shipped default.
    forced : str
        One algorithm for all calls that it can carry; "" for the table.
    chunk : int
        Bytes that are worked on at a time.
    """

    table: dict[Op, Steps] = field(default_factory=dict)
    forced: str = ""
    chunk: int = 256 * 1024

    @classmethod
    def from_environment(cls) -> Paths:
        """The shipped table, changed by ``MPIPAR_ALGORITHM`` and ``MPIPAR_CHUNK_BYTES``.

        Returns
        -------
        Paths
            Of this process; the same settings are needed on every rank.
        """
        forced = os.environ.get("MPIPAR_ALGORITHM", "")
        if forced and forced not in NAMES:
            raise UnsupportedArray(f"MPIPAR_ALGORITHM={forced}: {', '.join(NAMES)} would do")
        return cls({}, forced, int(os.environ.get("MPIPAR_CHUNK_BYTES", 256 * 1024)))

    def choose(self, call: Call) -> str:
        """The algorithm of a call, the same on every rank.

        Parameters
        ----------
        call : Call
            Any collective.

        Returns
        -------
        str
            One of `NAMES`.
        """
        if call.op is Op.BARRIER or call.error is not None:
            return "flags"
        n_bytes, largest = _sizes(call)
        fits = 0 <= largest <= SLOT_BYTES
        if self.forced:
            return self.forced if self.forced != "flags" or fits else "stage"
        found = "flags"
        for start, name in self.table.get(call.op, _DEFAULT):
            if n_bytes < start:
                break
            found = name
        return found if found != "flags" or fits else "stage"

    def chunk_bytes(self, n: int) -> int:
        """Bytes worked on at a time in a group of n, so that stages stay small.

        Parameters
        ----------
        n : int
            Number of ranks.

        Returns
        -------
        int
            A multiple of 64.
        """
        return max(64, min(self.chunk, 4 * 2**20 // n)) // 64 * 64


def _sizes(call: Call) -> tuple[int, int]:
    """Bytes that are equal on every rank, and those of the largest message into a slot."""
    dtype = call.dtype
    item = 0 if dtype is None else dtype.itemsize
    if call.op in (Op.ALL_GATHER, Op.GATHER, Op.SCATTER):
        counts = call.counts or (0,)
        largest = sum(counts) if call.op is Op.SCATTER else max(counts)
        return sum(counts) * item, largest * item
    if call.op is Op.BROADCAST:
        n_bytes = 0 if call.output is None else call.output.nbytes
        return n_bytes, n_bytes
    if call.op is Op.ALL_TO_ALL and not call.uniform:
        return SLOT_BYTES, SLOT_BYTES + 1  # ranks do not know each other's sizes
    n_bytes = 0 if call.input is None else call.input.nbytes
    return n_bytes, n_bytes
