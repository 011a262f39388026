"""What a trace costs a training step: steps with and without it, turn by turn in one run.

Run it with two ranks: ``mpipar run -n 2 -- benchmarks/trace_overhead.py``. Prints the medians and
the overhead; the aim is under 2 %.
"""

import dataclasses
import statistics
import sys
import time

import mpipar
from mpipar.train import Recipe, Trainer

PAIRS = int(sys.argv[1]) if len(sys.argv) > 1 else 60


def timed(trainer: Trainer) -> float:
    """Seconds of one step, all ranks starting together."""
    trainer.comm.barrier()
    start = time.perf_counter()
    trainer.train_step()
    return time.perf_counter() - start


def main() -> None:
    comm = mpipar.init()
    recipe = Recipe()
    with_trace = dataclasses.replace(recipe, run=dataclasses.replace(recipe.run, trace=True))
    trainers = [Trainer(comm, recipe), Trainer(comm, with_trace)]
    times: list[list[float]] = [[], []]
    for turn in range(PAIRS + 2):
        for which in (0, 1) if turn % 2 else (1, 0):
            seconds = timed(trainers[which])
            if turn >= 2:
                times[which].append(seconds)
    if comm.rank == 0:
        off, on = map(statistics.median, times)
        paired = statistics.median(b / a for a, b in zip(*times, strict=True))
        records = len(trainers[1].tracer.records) / (PAIRS + 2)
        print(f"{comm.size} ranks, {PAIRS} pairs: off {off * 1e3:.2f} ms, on {on * 1e3:.2f} ms a "
              f"step; median of the pairs' ratios {paired - 1:+.2%}; {records:.0f} records a step "
              "of a rank")  # fmt: skip


main()
