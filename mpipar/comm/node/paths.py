"""Which way a call on a node takes: a table by operation and size, measured or shipped.

Small messages go through the slots of the flag lines (``flags``). Above, arrays in node memory are
used where they lie; arrays elsewhere pass through stages (``stage``), through one copy by the
kernel (``copy``), or are left to the transport (``mpi``).
"""

from __future__ import annotations

import os
import platform
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mpipar.comm.call import Call, Op
from mpipar.comm.node.flags import SLOT_BYTES
from mpipar.errors import UnsupportedArray

NAMES = ("flags", "stage", "copy", "mpi")
DEVICE_WAYS = ("nccl", "direct", "staged")
"""Ways of arrays on a device (`device.calls`), the likely fastest first."""
Steps = tuple[tuple[int, str], ...]
"""Rising sizes in bytes, each with the way of ordinary arrays from that size on."""

_DEFAULT: Steps = ((0, "flags"), (SLOT_BYTES + 1, "stage"))
_SHIPPED: dict[Op, Steps] = {
    Op.ALL_GATHER: (*_DEFAULT, (2**19, "mpi")),
    Op.ALL_TO_ALL: (*_DEFAULT, (2**22, "mpi")),
}
_SHIPPED_FOR_TWO = dict.fromkeys((Op.ALL_REDUCE, Op.BROADCAST), (*_DEFAULT, (2**22, "copy")))
SMALLEST = SLOT_BYTES
"""Bytes of the largest small message."""


@dataclass
class Paths:
    """The table of a process.

    Parameters
    ----------
    table : dict
        Steps by operation; one that is not in it passes through stages from `SMALLEST` on.
    forced : str
        One algorithm for all calls that it can carry; "" for the table.
    chunk : int
        Bytes that are worked on at a time.
    device : dict
        Steps by operation for arrays on a device, with names of `DEVICE_WAYS`; it is in no
        operation's way where it is empty.
    """

    table: dict[Op, Steps] = field(default_factory=dict)
    forced: str = ""
    chunk: int = 256 * 1024
    device: dict[Op, Steps] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.forced and self.forced not in NAMES:
            raise UnsupportedArray(f"algorithm {self.forced!r}: {', '.join(NAMES)} would do")
        rows = ";".join(f"{op}{steps}" for op, steps in sorted(self.table.items()))
        self.fingerprint = f"{self.forced or 'table'} {self.chunk} {rows}"

    @classmethod
    def from_environment(cls, n_ranks: int) -> Paths:
        """The measured or the shipped table, with ``MPIPAR_ALGORITHM`` and ``MPIPAR_CHUNK_BYTES``.

        Parameters
        ----------
        n_ranks : int
            Ranks on this node: a measured table is for one number of them.

        Returns
        -------
        Paths
            Of this process; the same settings are needed on every rank.
        """
        get = os.environ.get
        chunk = int(get("MPIPAR_CHUNK_BYTES", 256 * 1024))
        found = _measured(n_ranks)
        forced = get("MPIPAR_ALGORITHM", "")
        table = _SHIPPED | (_SHIPPED_FOR_TWO if n_ranks == 2 else {}) | found.get("steps", {})
        return cls(table, forced, chunk, found.get("device_steps", {}))

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


def table_file() -> Path:
    """Where the measured table of this machine lies: ``MPIPAR_PATHS``, or the user's cache folder.

    Returns
    -------
    Path
        Of a TOML file, which may be missing.
    """
    chosen = os.environ.get("MPIPAR_PATHS")
    return cache_file("paths.toml") if chosen is None else Path(chosen)


def cache_file(name: str) -> Path:
    """A file of this machine in the user's cache folder.

    Parameters
    ----------
    name : str
        With its ending.

    Returns
    -------
    Path
        It may be missing.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    file = Path(name)
    return Path(cache) / "mpipar" / f"{file.stem}-{platform.node() or 'here'}{file.suffix}"


def as_toml(
    table: Mapping[str, Steps], n_ranks: int, device: Mapping[str, Steps] | None = None
) -> str:
    """A table as text.

    Parameters
    ----------
    table : mapping
        Steps by name of the operation.
    n_ranks : int
        For which it was measured.
    device : mapping, optional
        The same for arrays on a device.

    Returns
    -------
    str
        TOML.
    """
    rows = [f"n_ranks = {n_ranks}", "", "[steps]  # bytes from which on each way is taken"]
    for head, part in (("", table), ("[device_steps]", device or {})):
        rows += ["", head] if head and part else []
        for op, steps in part.items():
            rows.append(f"{op} = [{', '.join(f'[{start}, {way!r}]' for start, way in steps)}]")
    return "\n".join(rows) + "\n"


def _measured(n_ranks: int) -> dict[str, dict[Op, Steps]]:
    """The measured table, if there is one for this number of ranks."""
    try:
        found = tomllib.loads(table_file().read_text())
    except (OSError, ValueError):
        return {}
    if found.get("n_ranks") != n_ranks:
        return {}
    return {
        kind: {
            Op(name): tuple((int(start), str(way)) for start, way in steps)
            for name, steps in found.get(kind, {}).items()
        }
        for kind in ("steps", "device_steps")
    }


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
