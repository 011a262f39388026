"""Rung 1: a batch is split; every rank works on its own rows.

A program that is started on several *ranks* runs several times at once. Every copy has the same
code and another number: `comm.rank`, from 0 to `comm.size - 1`.

Which global object is split?     The batch: its rows. The weights are whole on every rank.
Which rank owns each local object? Rank r owns rows r*n to (r+1)*n of the batch, n = batch / ranks.
Which traces may be published?    Counts, such as 32 rows a rank. Never the rows.

    python 01_data_parallel_batch.py          two ranks inside this process
    mpipar run -n 4 -- 01_data_parallel_batch.py
"""

import numpy as np
from ladder import say, show, start

from mpipar.errors import UnevenSplit
from mpipar.units import DataParallelLayout, GlobalBatchSize, WorldSize

QUESTION = "A batch of 128 on 4 ranks: how many rows has each rank?"
ANSWER = 32


def rung(comm):
    batch = np.arange(8 * comm.size * 2).reshape(-1, 2)  # two features a row
    show(comm, "BEFORE: the batch, as every rank could read it", batch.shape)

    layout = DataParallelLayout(GlobalBatchSize(len(batch)), WorldSize(comm.size))
    n = int(layout.local_batch)
    mine = batch[comm.rank * n : (comm.rank + 1) * n]
    show(comm, "AFTER: the rows of each rank", f"{n} rows, first {mine[0]}, last {mine[-1]}")

    # What the ranks have seen together is the batch, each row once.
    total = comm.all_reduce(mine.sum(axis=0))
    assert (total == batch.sum(axis=0)).all()
    say(comm, f"sum over all ranks {total}, of the whole batch {batch.sum(axis=0)}")

    try:  # a batch that does not divide is refused, never quietly cut
        GlobalBatchSize(10) / WorldSize(4)
    except UnevenSplit as error:
        say(comm, f"10 rows over 4 ranks: {error}")
    return n


if __name__ == "__main__":
    start(rung, QUESTION)
