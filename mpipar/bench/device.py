"""Calls on arrays of a device: each way that the group has, beside NCCL's own call."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from mpipar.bench.methods import expected, output_size, pattern
from mpipar.bench.raw import Raw
from mpipar.bench.report import Row
from mpipar.bench.tune import OPS, steps_of
from mpipar.comm.base import Communicator
from mpipar.comm.device.arrays import Device
from mpipar.comm.node.paths import Paths, Steps, as_toml, table_file
from mpipar.topology.cost import bus_factor

TUNED_SIZES = tuple(2**k for k in range(10, 28, 3))


class DeviceBench:
    """One group of ranks for each way. Collective to make.

    Parameters
    ----------
    comm : Communicator
        The measured ranks.
    raw : Raw
        The same ranks, for barriers and times.
    device : Device
        The library of the arrays; its current device is measured.
    """

    def __init__(self, comm: Communicator, raw: Raw, device: Device) -> None:
        self.comm, self.raw, self.device = comm, raw, device
        self.groups: dict[str, Communicator] = {}
        first = comm.split(0, purpose="device bench")
        ways = first.devices.agree(device) if first is not None else ()
        for way in ways:
            group = comm.split(0, purpose=f"device bench {way}")
            if group is not None:
                group.devices.agree(device, way)
                self.groups[way] = group

    def close(self) -> None:
        """Close the groups. Collective."""
        for group in self.groups.values():
            group.close()

    def measure(self, op: str, n_bytes: int, n_rounds: int = 7) -> list[Row]:
        """Measure one operation at one size, all ways interleaved. Collective.

        Parameters
        ----------
        op : str
            As for ``mpipar bench``.
        n_bytes : int
            Of one rank's input.
        n_rounds : int
            Rounds that count, after one that does not.

        Returns
        -------
        list of Row
            NCCL's own call first, where there is one; ratios are to the first row.
        """
        size, rank = self.comm.size, self.comm.rank
        n = max(1, n_bytes // 4 // size) * size
        x, out = self._filled(pattern(rank, n)), self._filled(np.zeros(output_size(op, size, n)))
        calls = {way: self._verb(group, op, x, out) for way, group in self.groups.items()}
        if "nccl" in self.groups and op in ("all_reduce", "send_recv"):
            calls = {"raw nccl": self._raw(op, x, out), **calls}
        calls["memory bound"] = partial(out.__setitem__, slice(0, min(n, out.size)), x[: out.size])
        want = expected(op, rank, size, n) if size > 1 or op != "send_recv" else None
        n_wrong = {name: self._wrong(call, x, out, want, op) for name, call in calls.items()}
        times: dict[str, list[float]] = {name: [] for name in calls}
        for turn in range(n_rounds + 1):
            for name, call in calls.items():
                self.raw.barrier()
                start = time.perf_counter()
                call()
                self.device.fence().synchronize()
                times[name] += [time.perf_counter() - start] if turn else []
        slowest = {name: self.raw.slowest(seconds) for name, seconds in times.items()}
        return _rows(op, n, size, slowest, n_wrong)

    def _filled(self, values: Any) -> Any:
        values = np.asarray(values, np.float32)
        x = self.device.empty(values.size, values.dtype)
        self.device.begin_write(values, x).synchronize()
        return x

    def _verb(self, group: Communicator, op: str, x: Any, out: Any) -> Callable[[], Any]:
        if op != "send_recv":
            return partial(getattr(group, op), x, out=out)
        if group.rank > 1 or group.size == 1:
            return int
        return partial(group.send, x, 1) if group.rank == 0 else partial(group.recv, out, 0)

    def _raw(self, op: str, x: Any, out: Any) -> Callable[[], Any]:
        """As a careful user of ``cupy.cuda.nccl`` would write it."""
        nccl, stream, group = self.device.nccl, self.device.stream(), self.groups["nccl"]
        made = group.devices.nccl
        to, source = (a.__cuda_array_interface__["data"][0] for a in (out, x))
        kind = nccl.NCCL_FLOAT32
        if made is None or (op == "send_recv" and (group.rank > 1 or group.size == 1)):
            return int
        if op == "all_reduce":
            return partial(made.allReduce, source, to, x.size, kind, nccl.NCCL_SUM, stream)
        if group.rank == 0:
            return partial(made.send, source, x.size, kind, 1, stream)
        return partial(made.recv, to, x.size, kind, 0, stream)

    def _wrong(self, call: Callable[[], Any], x: Any, out: Any, want: Any, op: str) -> int:
        zeros = np.zeros(out.size, np.float32)
        self.device.begin_write(zeros, out).synchronize()
        call()
        back = np.empty(out.size, np.float32)
        self.device.begin_read(out, back).synchronize()
        is_told = want is not None and not (op == "send_recv" and self.comm.rank == 0)
        return self.raw.total(int((back != want).sum()) if is_told else 0)


def _rows(
    op: str, n: int, size: int, slowest: dict[str, Any], n_wrong: dict[str, int]
) -> list[Row]:
    medians = {name: float(np.median(t)) for name, t in slowest.items()}
    bound = medians.pop("memory bound")
    n_bytes = 4 * n * (size if op == "all_gather" else 1)
    first, rows = next(iter(medians.values())), []
    for name, median in medians.items():
        low, high = (float(v) for v in np.percentile(slowest[name], [25, 75]))
        speed = n_bytes / median
        rows.append(
            Row(op, name, n_bytes, n, median, low, high, first / median, speed,
                speed * bus_factor(op, size), n_wrong[name], bound)
        )  # fmt: skip
    return rows


def tune_device(bench: DeviceBench, sizes: Sequence[int] = TUNED_SIZES) -> str:
    """Measure every way at every size and add the table to that of this machine. Collective.

    Parameters
    ----------
    bench : DeviceBench
        The ranks.
    sizes : sequence of int
        Bytes of one rank's input, rising.

    Returns
    -------
    str
        The table as TOML.
    """
    table: dict[str, Steps] = {}
    for op in OPS:
        found = [(size, bench.measure(op, size)) for size in sizes]
        table[op] = steps_of(
            [(size, {r.form: r.time_s for r in rows if r.form in bench.groups})
             for size, rows in found]
        )  # fmt: skip
    n_ranks = bench.comm.size
    text = as_toml({str(op): s for op, s in Paths.from_environment(n_ranks).table.items()},
                   n_ranks, table)  # fmt: skip
    if bench.comm.rank == 0:
        path = table_file()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    bench.comm.barrier()
    return text
