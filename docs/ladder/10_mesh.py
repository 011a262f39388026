"""Rung 10: three axes at once: a rank has one coordinate on each, and a group along each.

Which global object is split?     The layers over pp, the batch over dp, the widths over tp.
Which rank owns each local object? The rank at (pp, dp, tp); the last axis varies fastest.
Which traces may be published?    Degrees, and the groups as coordinates, never host names.

    python 10_mesh.py 8
    mpipar run -n 4 -- 10_mesh.py
"""

import numpy as np
from ladder import say, show, start

from mpipar import Mesh
from mpipar.sharding import ShardedArray

QUESTION = "pp=2, dp=2, tp=2 over ranks 0 to 7: which rank is at pp=1, dp=0, tp=1?"
ANSWER = 5


def rung(comm):
    tp = 2 if comm.size % 2 == 0 else 1
    pp = 2 if comm.size % (2 * tp) == 0 else 1
    with Mesh(comm, pp=pp, tp=tp) as mesh:  # dp is what remains
        at = {axis: mesh.coordinate[axis] for axis in ("pp", "dp", "tp")}
        comm.where = " ".join(f"{axis}={i}" for axis, i in at.items())
        show(comm, "BEFORE: rank at each coordinate", comm.rank)

        sums = {axis: int(mesh.comm(axis).all_reduce(comm.rank)) for axis in at}
        show(comm, "sum of the ranks along each axis", sums)

        # One array over two axes: rows over dp, columns over tp, the same on both pp halves.
        whole = np.arange(16).reshape(4, 4)
        array = ShardedArray.from_global(whole, mesh, "A[I_dp, J_tp]")
        show(comm, "AFTER: the shard of A[I_dp, J_tp]", array.local)
        again = array.redistribute("A[I, J]").local
        assert (again == whole).all()
    say(comm, f"mesh pp={pp} dp={comm.size // pp // tp} tp={tp}")
    return comm.rank, at


if __name__ == "__main__":
    start(rung, QUESTION, n_ranks=8)
