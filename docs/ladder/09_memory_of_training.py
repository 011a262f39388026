"""Rung 9: where the memory of training goes, and what sharding the optimizer's state would save.

Which global object is split?     With ZeRO the optimizer state (stage 1), then the gradients (2),
                                  then the parameters (3), over the data-parallel ranks.
Which rank owns each local object? Rank r would own the r-th part of the flat state.
Which traces may be published?    Bytes a parameter: arithmetic, no measurement.

ZeRO is priced here, not run: the planner marks it so.

    python 09_memory_of_training.py
    mpipar run -n 2 -- 09_memory_of_training.py
"""

import numpy as np
from ladder import say, show, start

from mpipar.planner import SINGLE, state_bytes
from mpipar.planner.memory import ZERO_PAPER

QUESTION = "7.5 billion parameters, mixed precision with Adam, no sharding: how many GB of state?"
ANSWER = 120


def rung(comm):
    n, dp = 7_500_000_000, 64
    say(comm, "BEFORE: bytes for one parameter in mixed precision with Adam")
    say(comm, "  2 weight + 2 gradient + 4 master copy + 4 + 4 moments = 16")
    rows = {}
    for zero in range(4):
        rows[zero] = float(state_bytes(n, ZERO_PAPER, zero=zero, dp=dp)) / 1e9
        say(comm, f"AFTER: ZeRO-{zero} over {dp} ranks: {rows[zero]:6.1f} GB a rank")

    # The same sum on something small enough to hold: weight, gradient and two moments in float32.
    arrays = [np.zeros(1000, np.float32) for _ in range(4)]
    held = sum(a.nbytes for a in arrays)
    show(comm, "held by each rank for 1000 float32 parameters", f"{held} bytes")
    assert held == state_bytes(1000, SINGLE)
    return rows[0]


if __name__ == "__main__":
    start(rung, QUESTION)
