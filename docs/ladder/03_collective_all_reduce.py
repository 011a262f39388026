"""Rung 3: an all-reduce: every rank gives numbers, every rank gets their sum.

Which global object is split?     A line of numbers.
Which rank owns each local object? Rank r owns the r-th equal piece of the line.
Which traces may be published?    Kind, world size and bytes; values only after a review.

    python 03_collective_all_reduce.py
    mpipar run -n 2 -- 03_collective_all_reduce.py
"""

import numpy as np
from ladder import say, show, start

from mpipar.comm.trace_types import CollectiveTrace
from mpipar.units import (
    CommunicationBytes,
    ParallelStrategy,
    TensorLine,
    WorldSize,
    shard_tensor_line,
)

QUESTION = "1 2 3 4 on two ranks, 64 bytes from each rank, two rounds: how many bytes is that?"
ANSWER = 128


def rung(comm):
    line = np.arange(1.0, 2 * comm.size + 1)  # 1 2 3 4 on two ranks
    mine = line[2 * comm.rank : 2 * comm.rank + 2]
    show(comm, "BEFORE: the piece of each rank, and its sum", f"{mine} sum {mine.sum()}")

    total = comm.all_reduce(mine.sum())
    show(comm, "AFTER: the same number everywhere", float(total))
    assert total == line.sum()

    # The same as a typed record, for a report: counted, not timed.
    plan = shard_tensor_line(
        TensorLine.from_values(line), WorldSize(comm.size), ParallelStrategy.DATA_PARALLEL
    )
    trace = CollectiveTrace.all_reduce(plan, CommunicationBytes(64))
    say(comm, f"record: {trace.kind}, result {trace.reduced_value}, "
        f"estimate {trace.communication_estimate}, exactly {trace.exact_bytes_per_rank[0]} "
        "from each rank")  # fmt: skip
    return float(total)


if __name__ == "__main__":
    start(rung, QUESTION)
