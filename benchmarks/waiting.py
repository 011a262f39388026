"""Whether ranks that wait slow down one that computes, with fewer and with more ranks than cores.

In turn one rank computes a fixed piece of work while all others already wait for it in a collective
call. Its time is set against the same work while the others sleep, for our call and for mpi4py's,
in interleaved rounds. 1.00 means that waiting costs the neighbour nothing.

    mpipar run -n 2 -- benchmarks/waiting.py
    mpipar run -n 4 -- benchmarks/waiting.py
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from mpipar.comm import Communicator, init


def work(block: Any) -> float:
    """Seconds of some products."""
    start = time.perf_counter()
    for _ in range(600):
        block @ block
    return time.perf_counter() - start


def ways(comm: Communicator) -> dict[str, Callable[[], Any]]:
    """How the others wait."""
    raw: Any = comm.mpi  # type: ignore[attr-defined]
    x = np.ones(1024, np.float32)
    out = np.empty_like(x)
    return {
        "asleep": lambda: time.sleep(0.06),
        "ours": lambda: comm.all_reduce(x, out=out),
        "raw": lambda: raw.Allreduce(x, out),
    }


def main() -> int:
    """Be one of the ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    comm = init()
    block = np.ones((160, 160), np.float32)
    spent: dict[str, list[float]] = {name: [] for name in ways(comm)}
    for turn in range(arguments.rounds + 2):
        for name, wait in ways(comm).items():
            busy = turn % comm.size
            comm.barrier()
            mine = 0.0
            if comm.rank == busy:
                time.sleep(0.002)  # the others wait by now
                mine = work(block)
            wait()
            mine = float(comm.broadcast(np.array(mine), busy))
            if turn > 1:
                spent[name].append(mine * 1e3)
    if comm.rank == 0:
        print(f"{comm.size} ranks; milliseconds of the rank that computes: median [quartiles]")
        alone = statistics.median(spent["asleep"])
        for name, values in spent.items():
            low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
            print(f"  others {name:7} {middle:7.2f} [{low:.2f} {high:.2f}]  {middle / alone:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
