"""Which calls the MPI can make on device memory: tried in child processes, and remembered.

A wrong guess is a segfault, so the try costs a child. One pair of ranks goes through the list and
tells after each item; where it dies, hangs or computes nonsense, the next pair goes on behind.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np

from mpipar.comm.call import Call, Op, ReduceOp
from mpipar.comm.device.calls import SMALL_BYTES
from mpipar.comm.mpi.library import MPI
from mpipar.comm.node.paths import cache_file
from mpipar.errors import LaunchError

_MARK = "mpipar can "
_LIMIT_S = 20.0
_MOST_DEATHS = 6
_SUMMED = ("int32", "int64", "float32", "float64")
_MOVES = (Op.SEND, Op.BROADCAST, Op.ALL_GATHER, Op.ALL_TO_ALL, Op.GATHER, Op.SCATTER)
_SUMS = (Op.ALL_REDUCE, Op.REDUCE, Op.REDUCE_SCATTER)

ITEMS = tuple(
    f"{op} {dtype} {size}"
    for op in (*_MOVES, *_SUMS)
    for dtype in (_SUMMED if op in _SUMS else ("bytes",))
    for size in ("small", "large")
)
"""What is tried, messages first: an MPI that cannot send device memory can do nothing with it."""

Try = Callable[[Sequence[str]], tuple[str, bool]]
"""Runs some items; what was printed, and whether it ended well."""


def probe(items: Sequence[str], attempt: Try) -> list[str]:
    """Find what works.

    Parameters
    ----------
    items : sequence of str
        Of `ITEMS`.
    attempt : callable
        Starts the ranks on the rest of the list.

    Returns
    -------
    list of str
        What gave the right answer; nothing if the first message did not.
    """
    able: list[str] = []
    left = list(items)
    for _ in range(_MOST_DEATHS):
        text, ended = attempt(left)
        told = [line.removeprefix(_MARK) for line in text.splitlines() if line.startswith(_MARK)]
        done = [item for item in left if item in told]
        able += done
        if ended or not able:
            break
        where = max((left.index(item) for item in done), default=-1) + 1
        left = left[where + 1 :]  # the one at which they died is out
    return able


def capability(model: str, attempt: Try | None = None) -> list[str]:
    """What the loaded MPI can do on a device, from the user's cache or by trying. Not collective.

    Parameters
    ----------
    model : str
        Of the device.
    attempt : callable, optional
        Starts the ranks; by default two on this machine, under the launcher of the loaded MPI.

    Returns
    -------
    list of str
        Of `ITEMS`; remembered for this MPI build and device model.
    """
    key, file = f"{MPI.Get_library_version().strip()[:200]} | {model}", cache_file("device.json")
    known: dict[str, list[str]] = {}
    with suppress(OSError, ValueError):
        known = json.loads(file.read_text())
    if key not in known:
        try:
            known[key] = probe(ITEMS, attempt or _two_ranks)
        except LaunchError:
            return []  # nothing was tried, so there is nothing to remember
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            part = file.with_suffix(f".{os.getpid()}")
            part.write_text(json.dumps(known, indent=1))
            part.replace(file)
    return known[key]


def _two_ranks(items: Sequence[str]) -> tuple[str, bool]:
    """Two ranks that know nothing of this job."""
    from mpipar.launch.launcher import find_launcher, rank_settings
    from mpipar.launch.library import loaded_library

    prefixes = ("OMPI_", "PMI", "PRTE_", "SLURM_", "MPI_LOCAL", "HYDRA", "HYDI_")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(prefixes)}
    command = [sys.executable, "-m", "mpipar.comm.mpi.probe", *items]
    found = loaded_library(clean)
    launcher = find_launcher(found, clean)
    clean |= launcher.environment
    clean |= rank_settings(found.name, clean, 2, os.cpu_count() or 1, os.geteuid() == 0)
    command = launcher.command(2, command)
    try:
        child = subprocess.run(command, env=clean, stdin=subprocess.DEVNULL, timeout=_LIMIT_S,
                               capture_output=True, text=True, check=False)  # fmt: skip
    except subprocess.TimeoutExpired as late:
        text = late.stdout or b""
        return (text.decode() if isinstance(text, bytes) else text), False
    return child.stdout, child.returncode == 0


def main(items: Sequence[str]) -> int:
    """Try items one after the other, as one rank of two. Collective over them.

    Parameters
    ----------
    items : sequence of str
        Of `ITEMS`.

    Returns
    -------
    int
        0 when all were tried; a wrong answer is told by leaving the item out.
    """
    from mpipar.comm.device.arrays import Device, library
    from mpipar.comm.mpi.engine import Engine

    if not MPI.Is_initialized():
        MPI.Init()
    comm, device = MPI.COMM_WORLD, library(os.environ.get("MPIPAR_PROBE_LIBRARY", "cupy"))
    engine = Engine(comm, 2**30, False)

    def right(item: str, device: Device) -> bool:
        op, dtype, size = item.split()
        n = 64 if size == "small" else SMALL_BYTES // 2
        call, wanted = _example(Op(op), np.dtype("u1" if dtype == "bytes" else dtype), n, comm)
        given = call
        for name in ("input", "output"):
            host = getattr(call, name)
            if host is not None:
                x = device.empty(host.size, host.dtype)
                if host.size:
                    device.begin_write(host, x).synchronize()
                given = given._replace(**{name: x})
        device.fence().synchronize()
        for request in engine.program(given):
            request.Wait()
        if wanted is None or given.output is None:
            return True
        back = np.empty_like(wanted)
        device.begin_read(given.output, back).synchronize()
        return bool(np.array_equal(back, wanted))

    for item in items:
        good = comm.allreduce(int(right(item, device)), MPI.MIN)
        if good and comm.rank == 0:
            sys.stdout.write(f"{_MARK}{item}\n")
            sys.stdout.flush()  # before the next one may kill
    MPI.Finalize()
    return 0


def _example(
    op: Op, dtype: np.dtype[np.generic], n: int, comm: MPI.Comm
) -> tuple[Call, np.ndarray | None]:
    """A call of one rank with host buffers, and its right output."""
    size, rank = comm.size, comm.rank
    n = n // size * size
    xs = [(np.arange(n) % 50 + r + 1).astype(dtype) for r in range(size)]
    mine, block = xs[rank], n // size
    cut = slice(rank * block, (rank + 1) * block)
    counts = (block,) * size
    total = sum(xs[1:], xs[0])
    nothing = np.empty(0, dtype)

    def call(x: np.ndarray | None, like: np.ndarray, **words: object) -> tuple[Call, np.ndarray]:
        return Call(op, x, np.zeros_like(like), root=0, **words), like  # type: ignore[arg-type]

    if op is Op.ALL_REDUCE or (op is Op.REDUCE and rank == 0):
        return call(mine, total, reduce_op=ReduceOp.SUM)
    if op is Op.REDUCE:
        return Call(op, mine, nothing, ReduceOp.SUM, 0), None
    if op is Op.REDUCE_SCATTER:
        return call(mine, total[cut], reduce_op=ReduceOp.SUM, counts=counts)
    if op is Op.ALL_GATHER or (op is Op.GATHER and rank == 0):
        return call(mine, np.concatenate(xs), counts=(n,) * size)
    if op is Op.GATHER:
        return Call(op, mine, nothing, root=0, counts=(n,) * size), None
    if op is Op.SCATTER:
        return call(mine if rank == 0 else None, xs[0][cut], counts=counts)
    if op is Op.ALL_TO_ALL:
        joined = np.concatenate([x[cut] for x in xs])
        return call(mine, joined, counts=counts, recv_counts=counts)
    if op is Op.BROADCAST:
        made, wanted = call(None, xs[0])
        return (Call(op, xs[0], xs[0].copy(), root=0) if rank == 0 else made), wanted
    if rank == 0:
        return Call(op, mine, peer=1), None
    return Call(Op.RECV, None, np.zeros(n, dtype), peer=0), xs[0]


def tell() -> int:
    """Print what `capability` finds for the current device, as one line of JSON."""
    from mpipar.comm.device.arrays import library

    found = capability(library("cupy").names()[0])
    sys.stdout.write("mpipar" + json.dumps({"able": found, "n_tried": len(ITEMS)}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) if sys.argv[1:] else tell())
