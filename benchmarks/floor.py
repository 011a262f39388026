"""What a sum through node memory costs at the least from Python, beside ours and the MPI's.

The floor makes the same steps on the same memory - arrive, sum the own slice, wait for the others -
with two bare counters a rank: nothing is looked up, checked, compared or recorded, and a wait never
ends. Dirty inputs, every rank reads the whole result inside the timing, buffers rotate over more
than the last-level cache, methods interleaved, the slowest rank counts; medians with quartiles in
microseconds and the ratio of raw over each. "reading" is the result read where it lies, without any
call: what no form of the call can be faster than.

    mpipar run -n 2 -- benchmarks/floor.py --sizes 64K,256K,1M,4M,16M
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextvars import copy_context
from os import sched_yield
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from mpipar.bench.measure import one_round, warm_up
from mpipar.bench.methods import Method, n_sets, our_method, pattern, raw_method
from mpipar.bench.raw import Raw
from mpipar.bench.report import parsed_size
from mpipar.comm import init

_FLOAT = np.dtype(np.float32)


class Floor:
    """Bare counters and bare sums on the node memory of a communicator."""

    def __init__(self, comm: Any) -> None:
        self.comm, self.memory = comm, comm.host.arena.memory
        line = comm.host.arena.take(128)
        self.memory.bytes[line : line + 128] = 0
        lines = [self.memory.words(int(o), 128) for o in comm.all_gather(np.array([line]))]
        self.mine = lines[comm.rank]
        self.peers = [other for other in lines if other is not self.mine]
        self.count = 0
        self.spins = range(200 if comm.host.n_spins else 0)
        context = copy_context()
        context.run(np.seterr, all="ignore")
        self.silent = context.run

    def wait(self, word: int) -> None:
        """Be as far as all others."""
        self.mine[word] = count = self.count
        for line in self.peers:
            for _ in self.spins:
                if line[word] >= count:
                    break
            while line[word] < count:
                sched_yield()

    def method(self, op: str, n: int) -> Method:
        """An all-reduce into one result a node, or a reduce-scatter, of n elements a rank."""
        comm = self.comm
        xs = [comm.empty(n) for _ in range(n_sets(4 * n))]
        whole = op == "all_reduce"
        outs = [comm.empty_shared(n) if whole else comm.empty(n // comm.size) for _ in xs]
        calls = [self.call(comm.views(x), out, whole) for x, out in zip(xs, outs, strict=True)]

        def free() -> None:
            for array in (*xs, *outs):
                comm.free(array)

        return Method("floor", xs, calls, free)

    def call(self, rows: list[Any], out: Any, whole: bool) -> Callable[[], Any]:
        """One pair of buffers."""
        n, rank, size = rows[0].size, self.comm.rank, self.comm.size
        low, high = rank * n // size, (rank + 1) * n // size
        place = self.memory.locate(out) + (low * 4 if whole else 0)
        target = self.memory.view(place, high - low, _FLOAT)
        steps, chunk = [], 64 * 1024
        for start in range(low, high, chunk):
            part = slice(start, min(start + chunk, high))
            into = target[start - low : part.stop - low]
            total = rows[0][part]
            for row in rows[1:]:
                steps.append((np.add, total, row[part], into))
                total = into

        def run() -> Any:
            self.count += 1
            self.wait(0)
            for step in steps:
                self.silent(*step)
            self.wait(8)
            return out

        return run


def reading(comm: Any, n: int) -> Method:
    """Nothing but reading what every rank's array holds."""
    xs = [comm.empty(n) for _ in range(n_sets(4 * n))]
    shown = [comm.views(x)[-1 - comm.rank] for x in xs]
    calls = [lambda view=view: view for view in shown]
    return Method("reading", xs, calls, lambda: [comm.free(x) for x in xs] and None)


def main() -> int:
    """Be one of the ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default="64K,256K,1M,4M,16M")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    comm: Any = init()
    raw, floor = Raw(comm.mpi), Floor(comm)
    for op, form in (("all_reduce", "shared"), ("reduce_scatter", "own")):
        for n_bytes in map(parsed_size, arguments.sizes.split(",")):
            n = n_bytes // 4 // comm.size * comm.size
            methods = [raw_method(raw, op, n), our_method(comm, op, form, n), floor.method(op, n)]
            methods.append(reading(comm, n if op == "all_reduce" else n // comm.size))
            whole = pattern(comm.rank, n)
            fresh = [whole[: method.inputs[0].size] for method in methods]
            for method, values in zip(methods, fresh, strict=True):
                warm_up([method], values)
            spent: list[list[float]] = [[] for _ in methods]
            for turn in range(arguments.rounds + 1):
                for method, values, kept in zip(methods, fresh, spent, strict=True):
                    seconds = one_round(method, raw, turn, values, True, n_bytes)
                    kept += seconds if turn else []
            show(comm.rank, op, n_bytes, methods, [raw.slowest(kept) * 1e6 for kept in spent])
            for method in methods:
                method.free()
    return 0


def show(rank: int, op: str, n_bytes: int, methods: list[Method], times: list[Any]) -> None:
    """One line a method."""
    base = float(np.median(times[0]))
    for method, values in zip(methods, times, strict=True):
        low, middle, high = np.percentile(values, [25, 50, 75])
        if rank == 0:
            text = f"{middle:9.1f} [{low:.1f} {high:.1f}]"
            print(f"{op:15} {n_bytes:>9} {method.name:8} {text:32} raw/this {base / middle:.2f}")


if __name__ == "__main__":
    sys.exit(main())
