"""Rung 12: a plan is a prediction; hold it against what a run takes.

The planner prices a step from the model's arithmetic and a machine's figures. Here the machine's
figure for products is measured first, the step is predicted from it, and then really made.

Which global object is split?     The batch, over dp.
Which rank owns each local object? Rank r owns its rows.
Which traces may be published?    The ratio of measured to predicted time. Not the machine's name.

    python 12_plan_against_run.py
    mpipar run -n 2 -- 12_plan_against_run.py
"""

import time

import numpy as np
from ladder import say, show, start

QUESTION = "A linear layer of 256 x 256 on 1024 rows, forward and backward: how many Gflop?"
ANSWER = 0.402653184  # = 6 * 1024 * 256 * 256 / 1e9: 2 forward, 4 backward


def seconds(work, n_times=7):
    """Fastest of some runs: the one that was disturbed least."""
    found = []
    for _ in range(n_times):
        begin = time.perf_counter()
        work()
        found.append(time.perf_counter() - begin)
    return min(found)


def rung(comm):
    rows, width = 1024 // comm.size, 256
    rng = np.random.default_rng(0)
    x, weight = rng.normal(size=(rows, width)), rng.normal(size=(width, width))
    flop = 6 * rows * width * width
    show(comm, "BEFORE: operations of each rank", f"{flop / 1e9:.3f} Gflop")

    probe = rng.normal(size=(192, 192))
    rate = 2 * 192**3 / seconds(lambda: probe @ probe)
    predicted = flop / rate

    def step():
        y = x @ weight
        grad_weight, grad_x = x.T @ y, y @ weight.T
        return grad_weight, grad_x

    measured = seconds(step)
    comm.all_reduce(step()[0])  # the sum over dp that makes the step whole
    show(comm, "AFTER: measured over predicted", f"{measured / predicted:.2f}")
    say(comm, "`mpipar plan` does this for whole models, with communication, memory and bubbles")
    return flop * comm.size / 1e9


if __name__ == "__main__":
    start(rung, QUESTION)
