"""``mpipar bench --tune``: measure the ways of arrays outside node memory, and keep the fastest."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mpipar.bench.measure import one_round, warm_up
from mpipar.bench.methods import Method, our_method, pattern
from mpipar.bench.raw import Raw
from mpipar.comm.base import Communicator
from mpipar.comm.node.paths import NAMES, SMALLEST, Steps, as_toml, table_file

SIZES = tuple(2**k for k in range(3, 25, 2))
OPS = ("all_reduce", "reduce_scatter", "broadcast", "all_gather", "all_to_all")
_GAIN = 0.95  # another way than at the size before must be faster by this factor


def tune(
    comm: Communicator, raw: Raw, sizes: Sequence[int] = SIZES, path: Path | None = None
) -> str:
    """Measure every way at every size and write the table of this machine. Collective.

    Parameters
    ----------
    comm : Communicator
        The ranks, all on one node.
    raw : Raw
        The same ranks, for barriers.
    sizes : sequence of int
        Bytes of one rank's input, rising.
    path : Path, optional
        Where the table goes; by default the user's cache folder.

    Returns
    -------
    str
        The table as TOML, the same on every rank.
    """
    groups: dict[str, Communicator] = {}
    for way in NAMES:
        group = comm.split(0, purpose=f"tune {way}")
        if group is not None and hasattr(group, "force"):
            group.force(way)
            groups[way] = group
    table: dict[str, Steps] = {}
    for op in OPS:
        whole = comm.size if op == "all_gather" else 1  # a table knows it by its result
        best = [(n_bytes * whole, _times(groups, raw, op, n_bytes)) for n_bytes in sizes]
        table[op] = steps_of(best)
    for group in groups.values():
        group.close()
    text = as_toml(table, comm.size)
    if comm.rank == 0:
        path = path or table_file()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    comm.barrier()
    return text


def _times(groups: dict[str, Communicator], raw: Raw, op: str, n_bytes: int) -> dict[str, float]:
    """Median seconds of each way, the slowest rank's, interleaved."""
    n = max(1, n_bytes // 4 // raw.size) * raw.size
    fresh = pattern(raw.rank, n)
    ways = [w for w in groups if w != "flags" or 4 * n <= SMALLEST]
    methods: list[Method] = [our_method(groups[w], op, "ordinary", n) for w in ways]
    warm_up(methods, fresh)
    kept: list[list[float]] = [[] for _ in ways]
    for turn in range(8):
        for method, seconds in zip(methods, kept, strict=True):
            found = one_round(method, raw, turn, fresh, True, n_bytes)
            seconds += found if turn > 2 else []
    for method in methods:
        method.free()
    medians = [float(np.median(raw.slowest(seconds))) for seconds in kept]
    return dict(zip(ways, medians, strict=True))


def steps_of(measured: Sequence[tuple[int, dict[str, float]]]) -> Steps:
    """From times by size to the sizes from which each way is taken.

    Parameters
    ----------
    measured : sequence of (int, dict)
        Rising sizes, with the seconds of each way.

    Returns
    -------
    tuple of (int, str)
        A way that is only a little faster than the one in use is not taken.
    """
    steps: list[tuple[int, str]] = []
    for n_bytes, times in measured:
        way = min(times, key=lambda name: times[name])
        used = steps[-1][1] if steps else ""
        if used in times and times[way] > _GAIN * times[used]:
            continue
        if way != used:
            steps.append((n_bytes if steps else 0, way))
    return tuple(steps)
