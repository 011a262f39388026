"""Times of this library's collectives at sizes that the fit has not seen.

    mpirun -n 2 python benchmarks/predict_collectives.py

Every second size is fitted and the ones between are predicted. Rounds go over all collectives and
sizes in turn, so that what else the machine does meets all alike. A size counts by the lower
quartile of its rounds, since whatever else runs only adds time; the slowest rank decides.
"""

import time
from collections.abc import Callable
from statistics import median, quantiles
from typing import Any

import numpy as np

import mpipar
from mpipar.topology import fit_cost

SIZES = [1 << k for k in range(10, 23)]
N_ROUNDS, N_INNER = 81, 3


def calls(comm: Any, n_bytes: int) -> dict[str, Callable[[], Any]]:
    """The collectives over a whole vector of `n_bytes`."""
    whole = comm.empty((n_bytes // 4,), np.float32)
    part = comm.empty((n_bytes // 4 // comm.size,), np.float32)
    whole[...], part[...] = 1, 1
    total, out = comm.empty(whole.shape, np.float32), comm.empty(part.shape, np.float32)
    joined = comm.empty((part.size * comm.size,), np.float32)
    return {
        "all_reduce": lambda: comm.all_reduce(whole, out=total),
        "reduce_scatter": lambda: comm.reduce_scatter(joined, out=out),
        "all_gather": lambda: comm.all_gather(part, out=joined),
        "broadcast": lambda: comm.broadcast(whole, out=whole),
    }


def main() -> None:
    """Measure, fit, predict, print."""
    comm = mpipar.init()
    table = {(op, n): call for n in SIZES for op, call in calls(comm, n).items()}
    times: dict[tuple[str, int], list[float]] = {key: [] for key in table}
    for _ in range(N_ROUNDS):
        for key, call in table.items():
            comm.barrier()
            start = time.perf_counter()
            for _ in range(N_INNER):
                call()
            times[key].append((time.perf_counter() - start) / N_INNER)
    slowest = comm.all_reduce(
        np.array([quantiles(t)[0] for t in times.values()]), mpipar.ReduceOp.MAX
    ).tolist()
    found = dict(zip(table, slowest, strict=True))
    if comm.rank:
        return
    errors = []
    print(f"{comm.size} ranks; error of the prediction at sizes left out of the fit")
    for op in dict.fromkeys(op for op, _ in table):
        fit = fit_cost((n, found[op, n]) for n in SIZES[::2])
        own = [abs(float(fit.time(n)) / found[op, n] - 1) for n in SIZES[1::2]]
        errors += own
        parts = (
            f"{fit.constant_s * 1e6:.1f} us + {fit.per_byte_s * 1e9:.3f} ns/byte + "
            f"{fit.per_root_byte_s * 1e9:.0f} ns/sqrt(byte)"
        )
        print(f"{op:<15} median {median(own):6.1%}  worst {max(own):6.1%}  {parts}")
    print(f"all: median {median(errors):.1%} (goal: 25 % or less)")


if __name__ == "__main__":
    main()
