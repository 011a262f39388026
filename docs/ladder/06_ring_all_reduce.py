"""Rung 6: an all-reduce by hand, on a ring, with sends to the right neighbour only.

Which global object is split?     Each rank's array, into as many pieces as there are ranks.
Which rank owns each local object? After the first half rank r owns the finished piece r.
Which traces may be published?    Bytes a rank: 2 (n-1)/n of the array.

    python 06_ring_all_reduce.py 4
    mpipar run -n 3 -- 06_ring_all_reduce.py
"""

import numpy as np
from ladder import say, show, start

QUESTION = "4 ranks, arrays of 4 MiB: how many MiB does each rank send in all?"
ANSWER = 6


def rung(comm):
    n, me = comm.size, comm.rank
    right, left = (me + 1) % n, (me - 1) % n
    mine = np.arange(2.0 * n) + 100 * me
    pieces = mine.copy().reshape(n, -1)  # one row a piece
    show(comm, "BEFORE: the array of each rank", mine)

    n_bytes = 0
    arrived = np.empty_like(pieces[0])
    for half in ("reduce-scatter", "all-gather"):
        for step in range(n - 1):
            # In the first half a piece comes past every rank and grows; in the second the
            # finished pieces go round once more.
            given = (me - step - 1 + (half == "all-gather")) % n
            taken = (given - 1) % n
            request = comm.begin_send(pieces[given], right)  # never blocks: all send at once
            comm.recv(arrived, left)
            request.wait()
            n_bytes += pieces[given].nbytes
            pieces[taken] = arrived + (pieces[taken] if half == "reduce-scatter" else 0)
        show(comm, f"after the {half}", pieces.reshape(-1))

    expected = comm.all_reduce(mine)  # the library's own
    assert (pieces.reshape(-1) == expected).all()
    assert n_bytes == 2 * (n - 1) * mine.nbytes // n
    show(comm, "AFTER: bytes sent by each rank", f"{n_bytes} of an array of {mine.nbytes}")
    say(comm, "equal to comm.all_reduce")
    return n_bytes / mine.nbytes


if __name__ == "__main__":
    start(rung, QUESTION, n_ranks=4)
