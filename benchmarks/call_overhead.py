"""What a call adds to raw mpi4py, in microseconds: prepared at most 1.5, free at most 5.

At one rank the MPI has next to nothing to do, so the difference is the library's own. Raw, prepared
and free calls take turns in short blocks of one run; the table shows medians over the rounds, with
quartiles, of each and of the difference within a round.

    python benchmarks/call_overhead.py
    mpipar run -n 1 --mpi mpich -- benchmarks/call_overhead.py
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from mpipar.comm import Op, init

LIMITS_US = {"prepared": 1.5, "free": 5.0}
Call = Callable[[], Any]


def calls(size: int) -> dict[str, dict[str, Call]]:
    """By verb: the raw call, the prepared and the free one, on the same arrays."""
    comm: Any = init()
    raw = comm.mpi
    x, out = np.ones(size), np.empty(size)
    joined = np.empty(size * comm.size)
    return {
        "all_reduce": {
            "raw": lambda: raw.Allreduce(x, out),
            "prepared": comm.prepare(Op.ALL_REDUCE, x, out=out),
            "free": lambda: comm.all_reduce(x, out=out),
        },
        "all_gather": {
            "raw": lambda: raw.Allgather(x, joined),
            "prepared": comm.prepare(Op.ALL_GATHER, x, out=joined),
            "free": lambda: comm.all_gather(x, out=joined),
        },
        "broadcast": {
            "raw": lambda: raw.Bcast(x, 0),
            "prepared": comm.prepare(Op.BROADCAST, x, out=x),
            "free": lambda: comm.broadcast(x, out=x),
        },
        "barrier": {
            "raw": raw.Barrier,
            "prepared": comm.prepare(Op.BARRIER),
            "free": comm.barrier,
        },
    }


def block_us(call: Call, n: int) -> float:
    """Mean time of one call in a short block."""
    start = time.perf_counter()
    for _ in range(n):
        call()
    return (time.perf_counter() - start) / n * 1e6


def measure(kinds: dict[str, Call], rounds: int, n: int) -> dict[str, np.ndarray[Any, Any]]:
    """One row of times a kind; the order turns from round to round."""
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    names = list(kinds)
    for call in kinds.values():
        block_us(call, n)
    for turn in range(rounds):
        for kind in names[turn % 3 :] + names[: turn % 3]:
            times[kind].append(block_us(kinds[kind], n))
    return {kind: np.array(row) for kind, row in times.items()}


def quartiles(row: np.ndarray[Any, Any]) -> str:
    """Median and quartiles."""
    low, middle, high = np.percentile(row, [25, 50, 75])
    return f"{middle:6.2f} [{low:5.2f} {high:5.2f}]"


def main() -> int:
    """Measure, print the table, fail above a limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--calls", type=int, default=50, help="calls a block")
    parser.add_argument("--size", type=int, default=16, help="float64 elements")
    a = parser.parse_args()
    comm = init()
    if not hasattr(comm, "mpi"):
        print("there is no MPI library here")
        return 1
    above = []
    if comm.rank == 0:
        print(f"{comm!r}, {a.size} float64, microseconds a call: median [quartiles]")
        print(f"{'verb':<12}{'kind':<10}{'raw':>20}{'ours':>22}{'difference':>22}  limit")
    for verb, kinds in calls(a.size).items():
        times = measure(kinds, a.rounds, a.calls)
        for kind, limit in LIMITS_US.items():
            added = times[kind] - times["raw"]
            if comm.size == 1 and np.median(added) > limit:
                above.append(f"{verb} {kind}")
            if comm.rank == 0:
                row = [quartiles(times["raw"]), quartiles(times[kind]), quartiles(added)]
                print(f"{verb:<12}{kind:<10}{row[0]:>20}{row[1]:>22}{row[2]:>22}  {limit}")
    if above and comm.rank == 0:
        print(f"above the limit: {', '.join(above)}")
    return 1 if above else 0


if __name__ == "__main__":
    sys.exit(main())
