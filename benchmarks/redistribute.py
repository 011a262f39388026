"""Moving a matrix from row shards to column shards, against Alltoallw and Heat's resplit.

    mpipar run -n 2 -- benchmarks/redistribute.py --sizes 512 2048 --rounds 15
    python benchmarks/redistribute.py --plan

All sides run in one job, in alternating rounds on the same matrices; a round's time is that of the
slowest rank. Heat takes part where it is installed (``pip install heat``, best in a virtual
environment of its own, since it caps PyTorch). ``--plan`` times the plan between two meshes of 64
ranks, in one process.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

Move = Callable[[], object]


def alltoallw(comm, local: np.ndarray, shape: tuple[int, int], rows: bool) -> Move:
    """The MPI's own way: one subarray type a peer, no packing by hand."""
    from mpi4py import MPI

    from mpipar.units.remainder import spread_range

    def box(dim: int, rank: int, limits: tuple[int, ...]) -> MPI.Datatype:
        """Block of `rank` along `dim` inside an array of shape `limits`."""
        start, stop = spread_range(shape[dim], comm.size, rank)
        sizes, starts = list(limits), [0, 0]
        sizes[dim], starts[dim] = stop - start, start
        kind = MPI._typedict[local.dtype.char]
        return kind.Create_subarray(limits, sizes, starts).Commit()

    given, cut = (0, 1) if rows else (1, 0)  # dim that is sharded before, after
    start, stop = spread_range(shape[cut], comm.size, comm.rank)
    extent = (shape[0], stop - start) if rows else (stop - start, shape[1])
    out = np.empty(extent, local.dtype)
    sends = [box(cut, r, local.shape) for r in range(comm.size)]
    takes = [box(given, r, extent) for r in range(comm.size)]
    n = comm.size

    def move() -> np.ndarray:
        comm.Alltoallw([local, [1] * n, [0] * n, sends], [out, [1] * n, [0] * n, takes])
        return out

    return move


def sides(world, comm, n: int, rows: bool) -> dict[str, Move]:
    """The three ways to make the same move."""
    from mpipar.mesh import Mesh
    from mpipar.sharding import ShardedArray

    texts = ("A[I_tp, J]", "A[I, J_tp]") if rows else ("A[I, J_tp]", "A[I_tp, J]")
    mesh = Mesh(world, tp=world.size)
    array = ShardedArray.from_function(
        lambda b: np.add(*np.ogrid[b]), (n, n), mesh, texts[0], np.float32
    )
    result = array.redistribute(texts[1])
    moves: dict[str, Move] = {
        "mpipar": lambda: array.redistribute(texts[1], out=result).local,
        "Alltoallw": alltoallw(comm, array.local, (n, n), rows),
    }
    try:
        import heat
        import torch
    except ImportError:
        return moves
    torch.set_num_threads(1)
    split = 0 if rows else 1
    theirs = heat.array(torch.from_numpy(array.local), is_split=split)
    moves["Heat"] = lambda: heat.resplit(theirs, 1 - split).larray
    return moves


def compare(sizes: list[int], rounds: int) -> None:
    """Medians and ratios, told by rank 0."""
    from mpi4py import MPI

    import mpipar

    world, comm = mpipar.init(), MPI.COMM_WORLD
    for n in sizes:
        for rows in (True, False):
            moves = sides(world, comm, n, rows)
            results = [np.asarray(move()) for move in moves.values()]
            assert all(np.array_equal(results[0], other) for other in results)
            times: dict[str, list[float]] = {name: [] for name in moves}
            for _ in range(rounds):
                for name, move in moves.items():
                    comm.Barrier()
                    start = time.perf_counter()
                    move()
                    spent = comm.allreduce(time.perf_counter() - start, MPI.MAX)
                    times[name].append(spent)
            medians = {name: statistics.median(t) for name, t in times.items()}
            if comm.rank == 0:
                ours = medians.pop("mpipar")
                what = "rows -> columns" if rows else "columns -> rows"
                line = f"{comm.size} ranks {n:5d}x{n:<5d} float32 {what}: {1e3 * ours:8.3f} ms"
                for name, other in medians.items():
                    line += f"   {name} {1e3 * other:8.3f} ms = {other / ours:5.2f}x"
                print(line, flush=True)


def plan() -> None:
    """Time of a plan that is not in the cache."""
    from mpipar.mesh import MeshLayout
    from mpipar.sharding import ArraySpec, Sharding, plan_redistribution

    old, new = MeshLayout(64, pp=2, dp=4, tp=8), MeshLayout(64, dp=2, cp=4, tp=8)
    times = []
    for k in range(15):
        one, other = Sharding.parse("A[I_dp_pp, J_tp, K]"), Sharding.parse("A[I_tp, J_cp, K_dp]")
        source = ArraySpec((1000 + k, 512, 96), np.dtype(np.float32), old, one)
        target = ArraySpec(source.shape, source.dtype, new, other)
        start = time.perf_counter()
        found = plan_redistribution(source, target)
        times.append(time.perf_counter() - start)
    print(found)
    print(f"plan between two meshes of 64 ranks: {1e3 * statistics.median(times):.2f} ms")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[512, 2048, 4096])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--plan", action="store_true")
    chosen = parser.parse_args()
    if chosen.plan:
        plan()
    else:
        compare(chosen.sizes, chosen.rounds)
