"""Rung 8: 1F1B: as idle as GPipe, but a stage never holds more microbatches than stages follow.

The schedule is a value: it is generated, proved free of deadlock, simulated, and then run as it is.

Which global object is split?     The layers, into stages; the batch, into microbatches.
Which rank owns each local object? Rank r owns stage r, and the activations of microbatches on it.
Which traces may be published?    The grid, the bubble, the peak of microbatches in flight.

    python 08_one_forward_one_backward.py 4
    mpipar run -n 2 -- 08_one_forward_one_backward.py
"""

import numpy as np
from ladder import say, show, start

from mpipar.pipeline_parallel import PipelineExecutor, build_schedule, simulate, slot_grid

QUESTION = "1F1B, 4 stages, 8 microbatches: how many microbatches does stage 0 hold at most?"
ANSWER = 4


class Double:
    """A stage that doubles; its weight is a factor."""

    def __init__(self, comm):
        self.is_first, self.is_last = comm.rank == 0, comm.rank == comm.size - 1
        self.inputs, self.gradient, self.weight = {}, 0.0, 2.0

    def input_spec(self, m):
        return None if self.is_first else ((3,), "float64")

    def output_spec(self, m):
        return None if self.is_last else ((3,), "float64")

    def forward(self, m, x):
        self.inputs[m] = np.full(3, m + 1.0) if x is None else x
        return None if self.is_last else self.weight * self.inputs[m]

    def backward(self, m, grad):
        grad = np.ones(3) if grad is None else grad  # of the loss sum(y)
        self.gradient += float(self.inputs.pop(m) @ grad)
        return None if self.is_first else self.weight * grad


def rung(comm):
    schedule = build_schedule("1f1b", comm.size, 8)
    say(comm, f"BEFORE: the schedule\n{slot_grid(schedule)}")
    peak = simulate(schedule).peak_memory
    stage = Double(comm)
    executor = PipelineExecutor(comm, schedule, {comm.rank: stage})
    executor.step()
    show(comm, "AFTER: gradient, microbatches held at once", f"{stage.gradient}, "
         f"{executor.peak_in_flight} (simulated {peak[comm.rank]})")  # fmt: skip
    assert executor.peak_in_flight == peak[comm.rank]
    assert stage.gradient == sum(3 * (m + 1) * 2.0 ** (comm.size - 1) for m in range(8))
    return executor.peak_in_flight


if __name__ == "__main__":
    start(rung, QUESTION, n_ranks=4)
