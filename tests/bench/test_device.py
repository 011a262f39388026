"""The table of ways on a device, by the double; on real ranks too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mpipar.bench.device import DeviceBench, tune_device
from mpipar.comm import Communicator, Op
from mpipar.comm.node.paths import Paths
from tests.comm.device_double import DoubleDevice, OnDevice, forget


class OnThreads:
    """What the measurement needs of `Raw`, over any communicator."""

    def __init__(self, comm: Communicator) -> None:
        self.barrier = comm.barrier
        self.total = lambda n: sum(comm.all_gather_json(n))

    def slowest(self, seconds: list[float]) -> Any:
        return seconds


@pytest.mark.ranks(1, 2)
def test_every_way_is_measured_and_right(comm: Communicator) -> None:
    forget(comm)
    bench = DeviceBench(comm, OnThreads(comm), DoubleDevice())  # type: ignore[arg-type]
    for op in ("all_reduce", "all_gather", "send_recv"):
        rows = bench.measure(op, 4096, 2)
        raw = [] if op == "all_gather" else ["raw nccl"]
        assert [row.form for row in rows] == [*raw, "nccl", "staged"]
        assert all(row.n_wrong == 0 and row.time_s > 0 for row in rows)
    bench.close()


@pytest.mark.ranks(2)
def test_the_measured_table_chooses(
    comm: Communicator, tmp_path_factory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = Path(comm.broadcast_json(str(tmp_path_factory.getbasetemp() / "paths.toml")))
    monkeypatch.setenv("MPIPAR_PATHS", str(file))
    forget(comm)
    bench = DeviceBench(comm, OnThreads(comm), DoubleDevice())  # type: ignore[arg-type]
    text = tune_device(bench, (64, 4096))
    assert "[device_steps]" in text
    steps = Paths.from_environment(2).device
    assert {way for path in steps.values() for _, way in path} <= {"nccl", "staged"}
    group = OnDevice(comm, "").inner
    group.devices.steps = {Op.ALL_REDUCE: ((0, "staged"),)}
    group.all_reduce(DoubleDevice().empty(4, "f4"))
    assert group.devices.stats.calls["staged"] == 1
