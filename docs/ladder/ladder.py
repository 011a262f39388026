"""What the rungs share: how they are started, and how they print what each rank holds."""

import sys

import numpy as np

import mpipar


def show(comm, title, value):
    """Print one line a rank, in rank order, on rank 0."""
    text = np.array2string(value, separator=" ") if isinstance(value, np.ndarray) else str(value)
    rows = comm.all_gather_json([getattr(comm, "where", f"rank {comm.rank}"), text])
    if comm.rank == 0:
        print(title)
        for where, row in rows:
            print(f"  {where}: " + row.replace("\n", "\n" + " " * (len(where) + 4)))


def say(comm, text):
    """Print on rank 0 only."""
    if comm.rank == 0:
        print(text)


def start(rung, question, n_ranks=2):
    """Run a rung: under a launcher on its ranks, else on ranks inside this process."""
    comm = mpipar.init()
    if comm.size > 1:
        rung(comm)
    else:
        world = mpipar.ThreadWorld(int(sys.argv[1]) if len(sys.argv) > 1 else n_ranks)
        world.run(rung)
    say(comm, f"QUESTION: {question}")
