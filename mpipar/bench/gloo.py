"""The column "gloo": torch's CPU backend on the same ranks, where torch is installed."""

from __future__ import annotations

import datetime
import socket
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpipar.bench.measure import one_round
from mpipar.bench.methods import Method, n_sets, pattern
from mpipar.bench.raw import Raw
from mpipar.bench.report import Row
from mpipar.comm.base import Communicator
from mpipar.errors import LaunchError

_started: Any = None


def _start(comm: Communicator) -> Any:
    """torch.distributed with the gloo backend. Collective."""
    global _started
    if _started is None:
        try:
            import torch
            import torch.distributed as group
        except ImportError:
            raise LaunchError("bench --gloo needs torch: pip install 'mpipar[bench]'") from None
        torch.set_num_threads(1)
        port = 0
        if comm.rank == 0:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
        port = int(comm.broadcast_json(port))
        group.init_process_group(
            "gloo",
            init_method=f"tcp://127.0.0.1:{port}",
            rank=comm.rank,
            world_size=comm.size,
            timeout=datetime.timedelta(seconds=60),
        )
        _started = torch
    return _started


def measured(
    comm: Communicator, raw: Raw, n_bytes: int, rows: Sequence[Row], n_rounds: int
) -> list[Row]:
    """All-reduce by gloo, in place as it offers it. Collective.

    Parameters
    ----------
    comm : Communicator
        The ranks.
    raw : Raw
        The same ranks, for barriers.
    n_bytes : int
        Of one rank's array.
    rows : sequence of Row
        The other forms at this size; the first is raw.
    n_rounds : int
        Rounds.

    Returns
    -------
    list of Row
        One.
    """
    torch = _start(comm)
    n, first = rows[0].count, rows[0]
    xs = [np.empty(n, np.float32) for _ in range(n_sets(4 * n))]

    def call_of(x: Any) -> Any:
        tensor = torch.from_numpy(x)
        return lambda: (torch.distributed.all_reduce(tensor), x)[1]

    method = Method("gloo", xs, [call_of(x) for x in xs], lambda: None)
    fresh, times = pattern(comm.rank, n), []
    for turn in range(n_rounds + 1):
        found = one_round(method, raw, turn, fresh, True, n_bytes)
        times += found if turn else []
    slowest = raw.slowest(times)
    low, median, high = (float(v) for v in np.percentile(slowest, [25, 50, 75]))
    size, bus = first.n_bytes, first.busbw / first.algbw
    ratio = first.time_s / median
    return [
        Row("all_reduce", "gloo", size, n, median, low, high, ratio, size / median,
            size / median * bus, 0, first.bound_s)
    ]  # fmt: skip
