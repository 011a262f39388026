"""Measured against simulated timelines of pipeline schedules, with stages that sleep.

Every action of a stage sleeps for a fixed time, so that the number of cores does not matter; what
is left over is what the executor, its messages and the launcher's waits cost.

    python -m mpipar run -n 4 -- python benchmarks/pipeline_timeline.py
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

import mpipar
from mpipar.pipeline_parallel import (
    Costs,
    PipelineExecutor,
    Schedule,
    Timeline,
    build_schedule,
    compare_timelines,
    simulate,
)

NAMES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")


class SleepingStage:
    """Sleeps for each action, and hands on one small array."""

    def __init__(self, number: int, n_stages: int, seconds: float) -> None:
        self.is_first, self.is_last = number == 0, number == n_stages - 1
        self.seconds = seconds

    def input_spec(self, microbatch: int) -> Any:
        """Take a few numbers."""
        return None if self.is_first else ((16,), "float32")

    def output_spec(self, microbatch: int) -> Any:
        """Give a few numbers."""
        return None if self.is_last else ((16,), "float32")

    def forward(self, microbatch: int, x: Any) -> Any:
        """Sleep once."""
        time.sleep(self.seconds)
        return None if self.is_last else np.zeros(16, np.float32)

    def backward_input(self, microbatch: int, grad: Any) -> Any:
        """Sleep once."""
        time.sleep(self.seconds)
        return None if self.is_first else np.zeros(16, np.float32)

    def backward_weight(self, microbatch: int) -> None:
        """Sleep once."""
        time.sleep(self.seconds)

    def backward(self, microbatch: int, grad: Any) -> Any:
        """Sleep twice."""
        self.backward_weight(microbatch)
        return self.backward_input(microbatch, grad)


def measure(comm: Any, schedule: Schedule, seconds: float, n_steps: int) -> Timeline:
    """The timeline of the step with the median makespan, after one to warm up."""
    stages = {
        s: SleepingStage(s, schedule.n_stages, seconds) for s in schedule.stages_of(comm.rank)
    }
    executor = PipelineExecutor(comm, schedule, stages)
    runs = [executor.gather_timeline(executor.step()) for _ in range(n_steps + 1)][1:]
    middle = statistics.median_low(float(run.makespan) for run in runs)
    return next(run for run in runs if float(run.makespan) == middle)


def main() -> int:
    """Print the table; 1 if a makespan is off by 3 %, or a bubble by 2 points of the total."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ms", type=float, default=60, help="each F, I and W (default 60)")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--draw", action="store_true", help="draw both timelines")
    a = parser.parse_args()
    comm = mpipar.init()
    say = print if comm.rank == 0 else lambda *_: None
    say(f"{comm.size} ranks, {a.microbatches} microbatches, F = I = W = {a.ms:g} ms a stage")
    say(f"{'schedule':<12}{'makespan ms: simulated':>24}{'measured':>10}{'off':>7}"
        f"{'bubble/total: simulated':>26}{'measured':>10}{'points':>8}")  # fmt: skip
    costs, is_bad = Costs(*[a.ms * 1000.0] * 3), False
    for name in NAMES:
        schedule = build_schedule(name, comm.size, a.microbatches, costs=costs)
        wanted = simulate(schedule, costs)
        found = measure(comm, schedule, a.ms / 1000, a.steps)
        times = [float(t.makespan) / 1000 for t in (wanted, found)]
        bubbles = [100 * float(t.bubble_over_total()) for t in (wanted, found)]
        off, points = 100 * (times[1] / times[0] - 1), bubbles[1] - bubbles[0]
        is_bad |= abs(off) > 3 or abs(points) > 2
        say(f"{name:<12}{times[0]:>24.1f}{times[1]:>10.1f}{off:>6.2f}%"
            f"{bubbles[0]:>25.2f}%{bubbles[1]:>9.2f}%{points:>8.2f}")  # fmt: skip
        if a.draw:
            say(compare_timelines(found))
    return int(is_bad)


if __name__ == "__main__":
    sys.exit(main())
