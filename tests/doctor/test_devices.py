"""What the doctor says of GPUs, by recorded answers and by the double of a device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpipar.comm import Communicator
from mpipar.doctor import devices
from mpipar.doctor.check import Status
from mpipar.doctor.devices import check_ways, judge_probe
from mpipar.doctor.here import Here
from tests.comm.device_double import DoubleDevice, forget

GOOD = {"driver": 12080, "runtime": 12090, "devices": 1, "nccl": 22703, "works": True}


def said(monkeypatch: pytest.MonkeyPatch, answers: dict[str, Any], package: str = "14.0") -> Any:
    monkeypatch.setattr(devices, "_version", lambda p: package if p == "cupy-cuda12x" else "")
    monkeypatch.setattr(devices, "_asked", lambda _, word, *__, **___: answers[word])
    return {check.name: check for check in devices._libraries(Here({}), True)}


def test_a_good_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    found = said(monkeypatch, {"-c": GOOD, "-m": {"able": ["a", "b"], "n_tried": 3}})
    assert [check.status for check in found.values()] == [Status.OK] * 3
    assert "2 of 3" in found["CUDA-aware MPI"].reason
    assert found["CuPy"].facts["nccl"] == 22703


def test_what_is_missing_or_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    none = said(monkeypatch, {}, package="")
    assert (none["CuPy"].status, none["CUDA-aware MPI"].status) == ("warn", "n/a")
    broken = said(monkeypatch, {"-c": {**GOOD, "works": False, "devices": "too old"}})
    assert broken["CuPy"].status is Status.FAIL
    assert "too old" in broken["CuPy"].reason
    bare = said(monkeypatch, {"-c": {**GOOD, "nccl": None}, "-m": {"able": [], "n_tried": 3}})
    assert bare["NCCL"].fix == "pip install nvidia-nccl-cu12"
    assert bare["CUDA-aware MPI"].reason.startswith("no (tried)")
    assert judge_probe(None).status is Status.WARN


@pytest.mark.ranks(1, 2)
def test_sums_of_all_ways(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    forget(comm)
    assert check_ways(comm, DoubleDevice()).reason == "right by nccl, staged"
    assert check_ways(comm).status is Status.NOT_APPLICABLE

    def spoilt(host: np.ndarray, x: Any) -> Any:
        return good(host * 2 if host.size > 1 else host, x)

    device = DoubleDevice()
    good = device.begin_write
    device.begin_write = spoilt  # type: ignore[method-assign]
    assert check_ways(comm, device).status is Status.FAIL
