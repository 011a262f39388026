"""Rung 2: a matrix is split; every rank computes some columns of the product.

Which global object is split?     The weight matrix: its columns. The input is whole everywhere.
Which rank owns each local object? Rank r owns columns r*n to (r+1)*n, n = width / ranks.
Which traces may be published?    Widths and byte counts. Never weights.

    python 02_tensor_parallel_width.py 4
    mpipar run -n 2 -- 02_tensor_parallel_width.py
"""

import numpy as np
from ladder import say, show, start

from mpipar.units import ModelWidth, TensorParallelLayout, WorldSize

QUESTION = "A model of width 1024 on 4 ranks: how many columns has each rank?"
ANSWER = 256


def rung(comm):
    width = 4 * comm.size
    x = np.arange(6.0).reshape(2, 3)
    weight = np.arange(3.0 * width).reshape(3, width)
    show(comm, "BEFORE: the weight, whole", weight.shape)

    layout = TensorParallelLayout(ModelWidth(width), WorldSize(comm.size))
    n = int(layout.shard_width)
    shard = weight[:, comm.rank * n : (comm.rank + 1) * n]  # all that this rank would store
    y = x @ shard
    show(comm, "AFTER: columns of the product that each rank has computed", y)

    whole = comm.all_gather(y, dim=1)  # put side by side, in rank order, on every rank
    assert (whole == x @ weight).all()
    say(comm, f"gathered: {whole.shape}, equal to x @ weight")
    return n


if __name__ == "__main__":
    start(rung, QUESTION)
