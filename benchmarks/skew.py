"""The waiting that disappears when calls begin early and ranks are 5 ms apart.

In turn one rank comes 5 ms late to a call. The early rank either waits for it in the plain verb,
or begins the call, computes for the 5 ms, and waits then. What is left of the wait is given for
ours (`progress` once a millisecond) and for mpi4py's own pair (`Allreduce`; `Iallreduce`, `Test`
once a millisecond, `Wait`), in interleaved rounds.

    mpipar run -n 2 -- benchmarks/skew.py
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from mpipar.comm import Communicator, init

Wait = Callable[[], float]


def compute(seconds: float, progress: Callable[[], object] | None = None) -> None:
    """Keep the core busy; call `progress` about once a millisecond."""
    end = time.perf_counter() + seconds
    block = np.ones((48, 48))
    due = time.perf_counter() + 1e-3
    while time.perf_counter() < end:
        block @ block
        if progress is not None and time.perf_counter() > due:
            progress()
            due = time.perf_counter() + 1e-3


def waits(comm: Communicator, count: int, skew_s: float) -> dict[str, Wait]:
    """Per way one call with the early rank's waiting time as its result."""
    raw = comm.mpi  # type: ignore[attr-defined]
    x, out = comm.empty(count), comm.empty(count)
    private, result = np.ones(count, np.float32), np.empty(count, np.float32)
    x[...] = 1

    def timed(call: Callable[[], object]) -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    def blocking() -> float:
        return timed(lambda: comm.all_reduce(x, out=out))

    def begun() -> float:
        start = time.perf_counter()
        request = comm.begin_all_reduce(x, out=out)
        begin_s = time.perf_counter() - start
        compute(skew_s, comm.progress)
        return begin_s + timed(request.wait)

    def raw_blocking() -> float:
        return timed(lambda: raw.Allreduce(private, result))

    def raw_begun() -> float:
        start = time.perf_counter()
        request = raw.Iallreduce(private, result)
        begin_s = time.perf_counter() - start
        compute(skew_s, request.Test)
        return begin_s + timed(request.Wait)

    return {"ours, plain": blocking, "ours, begun": begun,
            "raw, plain": raw_blocking, "raw, begun": raw_begun}  # fmt: skip


def measure(comm: Communicator, n_bytes: int, skew_s: float, n_rounds: int) -> None:
    """Print the early rank's waits for one size."""
    ways = waits(comm, n_bytes // 4, skew_s)
    found: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(2 * n_rounds):
        late = turn % 2
        for name, call in ways.items():
            comm.barrier()
            if comm.rank == late:
                compute(skew_s)
            spent = call()
            early = float(comm.broadcast(np.array(spent), 1 - late))
            if turn > 1:
                found[name].append(early * 1e3)
    if comm.rank == 0:
        for name, values in found.items():
            low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
            print(f"  {n_bytes:>9} bytes  {name:12} {middle:7.3f} ms [{low:.3f} {high:.3f}]")


def main() -> int:
    """Be one of two ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--skew-ms", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    comm = init()
    if comm.size != 2:
        raise SystemExit(f"two ranks are needed, not {comm.size}: mpipar run -n 2 -- {__file__}")
    if comm.rank == 0:
        print(
            f"the early rank's waiting, the other {arguments.skew_ms} ms late: median [quartiles]"
        )
    for n_bytes in (4 << 10, 256 << 10, 4 << 20):
        measure(comm, n_bytes, arguments.skew_ms * 1e-3, arguments.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
