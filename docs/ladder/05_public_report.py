"""Rung 5: what may be told: only a reviewed, public trace becomes a report.

Which global object is split?     The line of rung 3.
Which rank owns each local object? As there.
Which traces may be published?    Those that somebody has reviewed and found public. No others.

    python 05_public_report.py
    mpipar run -n 2 -- 05_public_report.py
"""

import numpy as np
from ladder import say, show, start

from mpipar.comm.trace_types import CollectiveTrace, ParallelTraceVisibility
from mpipar.errors import InvalidPublicReport
from mpipar.report import PublicParallelismReport, ReviewedCollectiveTrace
from mpipar.units import (
    CommunicationBytes,
    ParallelStrategy,
    TensorLine,
    WorldSize,
    shard_tensor_line,
)

QUESTION = "Of public, research-restricted and private traces, how many kinds are published?"
ANSWER = 1


def rung(comm):
    line = np.arange(1.0, 2 * comm.size + 1)
    plan = shard_tensor_line(
        TensorLine.from_values(line), WorldSize(comm.size), ParallelStrategy.DATA_PARALLEL
    )
    trace = CollectiveTrace.all_reduce(plan, CommunicationBytes(64))
    show(comm, "BEFORE: every rank has the trace", f"{trace.kind} of {comm.size} ranks")

    n_published = 0
    for visibility in ParallelTraceVisibility:
        reviewed = ReviewedCollectiveTrace(trace, visibility)
        try:
            report = PublicParallelismReport.from_reviewed_trace(reviewed)
        except InvalidPublicReport as error:
            say(comm, f"{visibility}: {error}")
            continue
        n_published += 1
        say(comm, f"{visibility}: {report.as_record()}")
    show(comm, "AFTER: reports that each rank could publish", n_published)
    return n_published


if __name__ == "__main__":
    start(rung, QUESTION)
