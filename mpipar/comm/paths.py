"""Which way a call on a node takes: a table by operation and size, measured or shipped.

Small messages go through the slots of the flag lines (``flags``). Above, arrays in node memory are
used where they lie; arrays elsewhere pass through stages (``stage``), through one copy by the
kernel (``copy``), or are left to the transport (``mpi``).
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from mpipar.comm.call import Call, Op
from mpipar.comm.flags import SLOT_BYTES
from mpipar.errors import UnsupportedArray

NAMES = ("flags", "stage", "copy", "mpi")
Steps = tuple[tuple[int, str], ...]
"""Rising sizes in bytes, each with the way of ordinary arrays from that size on."""

_DEFAULT: Steps = ((0, "flags"), (SLOT_BYTES + 1, "stage"))


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

    def __post_init__(self) -> None:
        if self.forced and self.forced not in NAMES:
            raise UnsupportedArray(f"algorithm {self.forced!r}: {', '.join(NAMES)} would do")
        rows = ";".join(f"{op}{steps}" for op, steps in sorted(self.table.items()))
        self.fingerprint = f"{self.forced or 'table'} {self.chunk} {rows}"

    @classmethod
    def from_environment(cls) -> Paths:
        """The shipped table, changed by ``MPIPAR_ALGORITHM`` and ``MPIPAR_CHUNK_BYTES``.

        Returns
        -------
        Paths
            Of this process; the same settings are needed on every rank.
        """
        get = os.environ.get
        return cls({}, get("MPIPAR_ALGORITHM", ""), int(get("MPIPAR_CHUNK_BYTES", 256 * 1024)))

    def choose(self, call: Call) -> str:
        """How a call begins, alike on every rank.

        Parameters
        ----------
        call : Call
            Any collective.

        Returns
        -------
        str
            "flags" (in slots), "node" (where arrays lie decides) or "mpi" (only if forced).
        """
        if call.op is Op.BARRIER or call.error is not None:
            return "flags"
        n_bytes, largest = _sizes(call)
        small = self.forced == "flags" if self.forced else self._found(call.op, n_bytes) == "flags"
        if small and largest <= SLOT_BYTES:
            return "flags"
        return "mpi" if self.forced == "mpi" else "node"

    def ordinary(self, call: Call) -> str:
        """The way of a call of which some array is not in node memory.

        Parameters
        ----------
        call : Call
            Any collective.

        Returns
        -------
        str
            "stage", "copy" or "mpi".
        """
        found = self.forced or self._found(call.op, _sizes(call)[0])
        return "stage" if found == "flags" else found

    def _found(self, op: Op, n_bytes: int) -> str:
        found = "flags"
        for start, name in self.table.get(op, _DEFAULT):
            if n_bytes >= start:
                found = name
        return found

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
        return SLOT_BYTES + 1, SLOT_BYTES + 1  # ranks do not know each other's sizes
    n_bytes = 0 if call.input is None else call.input.nbytes
    return n_bytes, n_bytes
