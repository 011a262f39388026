"""Rung 4: layers are split; batches flow through the stages like cars through a wash.

Which global object is split?     The stack of layers.
Which rank owns each local object? Rank r owns the r-th run of layers, which is called a stage.
Which traces may be published?    The grid and its idle slots.

    python 04_pipeline_schedule.py 3
    mpipar run -n 3 -- 04_pipeline_schedule.py
"""

import numpy as np
from ladder import say, show, start

from mpipar.units import LayerCount, MicroBatchCount, PipelineLayout, WorldSize

QUESTION = "3 stages, 4 microbatches, forward only: how many slots until the last one is out?"
ANSWER = 6


def rung(comm):
    n_layers, n_microbatches = 4 * comm.size, 4
    layout = PipelineLayout(LayerCount(n_layers), WorldSize(comm.size))
    length = layout.stage_count + MicroBatchCount(n_microbatches)
    n = int(layout.layers_per_rank)
    layers = list(range(comm.rank * n, (comm.rank + 1) * n))
    show(comm, "BEFORE: the layers of each stage", layers)

    outputs, slots = [], []
    for m in range(n_microbatches):
        if comm.rank == 0:
            x = np.full(2, float(m))
        else:
            x = comm.recv(np.empty(2), source=comm.rank - 1)
        for layer in layers:
            x = x + layer  # a layer that can be checked by hand
        slots.append(comm.rank + m)  # the slot in which this stage can do microbatch m
        if comm.rank < comm.size - 1:
            comm.send(x, dest=comm.rank + 1)
        else:
            outputs.append(float(x[0]))
    grid = ["." for _ in range(int(length))]
    for m, slot in enumerate(slots):
        grid[slot] = str(m)
    show(comm, "AFTER: which microbatch each stage does in which slot", " ".join(grid))
    if comm.rank == comm.size - 1:
        assert outputs == [m + sum(range(n_layers)) for m in range(n_microbatches)]
    say(comm, f"{length}: stages - 1 + microbatches")
    return int(length)


if __name__ == "__main__":
    start(rung, QUESTION, n_ranks=3)
