"""What a small all-reduce costs from Python, step by step, and where the floor is.

Microseconds a call, all ranks in step: raw mpi4py; a bare Python method around it that only looks
whether the arrays are those of the last call; mpi4py's persistent request; our prepared handle and
our plain verb, which also compare every rank's signature. The bare method is the least that any
verb written in Python can cost. "New" calls get a copy of the input each time and give a new
result, as gradients and activations are; their ratios are over raw calls of that kind.

    mpipar run -n 2 -- benchmarks/small_calls.py
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


class Bare:
    """The thinnest verb: a method with our signature, for one pair of arrays."""

    def __init__(self, raw: Any, x: Any, out: Any) -> None:
        self.raw, self.x, self.out = raw, x, out

    def all_reduce(self, x: Any, op: Any = None, *, out: Any = None) -> Any:
        """Hand the same arrays to mpi4py again."""
        if x is not self.x or out is not self.out:
            raise ValueError("other arrays")
        self.raw.Allreduce(x, out)
        return out


def ways(comm: Communicator, n_bytes: int) -> dict[str, Callable[[], Any]]:
    """The calls to be compared."""
    raw: Any = comm.mpi  # type: ignore[attr-defined]
    x = np.ones(max(1, n_bytes // 4), np.float32)
    out = np.empty_like(x)
    bare, request = Bare(raw, x, out), raw.Allreduce_init(x, out)

    def persistent() -> None:
        request.Start()
        request.Wait()

    def raw_new() -> None:
        raw.Allreduce(x.copy(), np.empty_like(x))

    return {
        "raw": lambda: raw.Allreduce(x, out),
        "bare method": lambda: bare.all_reduce(x, out=out),
        "persistent": persistent,
        "prepared": comm.prepare("all_reduce", x, out=out),  # type: ignore[arg-type]
        "plain": lambda: comm.all_reduce(x, out=out),
        "raw, new": raw_new,
        "plain, new": lambda: comm.all_reduce(x.copy()),
    }


def main() -> int:
    """Be one of the ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    arguments = parser.parse_args()
    comm = init()
    for n_bytes in (8, 256, 4096, 2**16, 2**18):
        calls, n_calls = ways(comm, n_bytes), 500 if n_bytes <= 4096 else 50
        spent: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(arguments.rounds):
            for name, call in calls.items():
                comm.barrier()
                start = time.perf_counter()
                for _ in range(n_calls):
                    call()
                spent[name].append((time.perf_counter() - start) / n_calls * 1e6)
        for name, values in spent.items():
            raw = statistics.median(spent["raw, new" if "new" in name else "raw"])
            low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
            if comm.rank == 0:
                text = f"{middle:6.2f} [{low:.2f} {high:.2f}]"
                print(f"{n_bytes:>6} bytes  {name:12} {text:22} raw/this {raw / middle:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
