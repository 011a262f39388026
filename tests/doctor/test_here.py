"""Checks of a machine, on recorded ones; the verb on this one."""

import json
import os
from pathlib import Path

import pytest

from mpipar.cli.main import main
from mpipar.doctor import devices
from mpipar.doctor import here as module
from mpipar.doctor.check import Check, Status
from mpipar.doctor.here import Here, check_here
from mpipar.errors import LaunchError
from mpipar.launch.environment import LibraryName
from mpipar.launch.launcher import Launcher
from mpipar.launch.library import Library

STEP = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "8"}


class Machine:
    """A machine whose answers a test sets."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self._patch = folder, monkeypatch
        self.set(mask=range(4))
        self.library(LibraryName("Open MPI", (5, 0)))
        monkeypatch.setattr(devices, "nvml_devices", tuple)
        monkeypatch.setattr(devices, "_version", lambda _: "")
        monkeypatch.setattr(module, "blas_threads", lambda: 1)
        monkeypatch.setattr(module, "find_launcher", lambda library, _: Launcher(
            Path("/mpi/bin/mpirun"), library.name))  # fmt: skip

    def set(self, mask: range) -> None:
        self._patch.setattr(os, "sched_getaffinity", lambda _: set(mask), raising=False)

    def library(self, name: LibraryName | None) -> None:
        def load(_: object) -> Library:
            if name is None:
                raise LaunchError("mpi4py finds no MPI\nInstall one")
            return Library(name, None)

        self._patch.setattr(module, "loaded_library", load)

    def checks(self, **environment: str) -> dict[str, Check]:
        (self.folder / "shm").mkdir(exist_ok=True)
        here = Here(environment, self.folder, self.folder / "shm", self.folder)
        return {check.name: check for check in check_here(here)}


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_a_sound_machine(machine: Machine) -> None:
    found = machine.checks(PATH="")
    assert {name: str(check.status) for name, check in found.items()} == {
        "versions": "ok",
        "MPI library": "ok",
        "launcher": "ok",
        "launched by": "n/a",
        "cores": "ok",
        "threads": "ok",
        "shared memory": "ok",
        "devices": "n/a",
        "CUDA-aware MPI": "n/a",
        "CuPy": "n/a",
        "Slurm": "n/a",
        "run folder": "ok",
    }
    assert found["cores"].facts["cores"] == 4


def test_no_mpi_blocks(machine: Machine) -> None:
    machine.library(None)
    found = machine.checks(PATH="")["MPI library"]
    assert (found.status, found.reason, found.fix) == (
        Status.FAIL, "mpi4py finds no MPI", "Install one"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("library", "environment", "command"),
    [
        ("Open MPI", {"PMI_RANK": "1"}, "srun --mpi=pmix -n 8"),
        ("Open MPI", {}, "srun --mpi=pmix -n 8"),
        ("MPICH", {"PMIX_RANK": "1"}, "srun --mpi=pmi2 -n 8"),
        ("Open MPI", {"PMIX_RANK": "1"}, None),
        ("MPICH", {"PMI_RANK": "1"}, None),
    ],
)
def test_a_step_of_the_wrong_kind_blocks(
    machine: Machine, library: str, environment: dict[str, str], command: str | None
) -> None:
    machine.library(LibraryName(library, (4, 3)))
    found = machine.checks(PATH="", SLURM_JOB_ID="7", **STEP, **environment)["launched by"]
    assert found.status is (Status.FAIL if command else Status.OK)
    assert (command or "") in found.fix


def test_cores_that_srun_did_not_give(machine: Machine) -> None:
    machine.set(mask=range(1))
    found = machine.checks(PATH="", SLURM_CPUS_PER_TASK="8", PMIX_RANK="1", **STEP)["cores"]
    assert found.status is Status.WARN
    assert found.fix == 'give it to srun again: srun -c "$SLURM_CPUS_PER_TASK"'


def test_a_quota_below_the_cores(machine: Machine) -> None:
    (machine.folder / "fs/cgroup").mkdir(parents=True)
    (machine.folder / "fs/cgroup/cpu.max").write_text("150000 100000\n")
    found = machine.checks(PATH="")["cores"]
    assert found.status is Status.WARN
    assert "grants 1.5" in found.reason


def test_more_threads_than_cores(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "blas_threads", lambda: 4)
    ranks = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}
    found = machine.checks(PATH="", OMPI_COMM_WORLD_LOCAL_SIZE="2", **ranks)["threads"]
    assert (found.status, found.fix) == (Status.WARN, "OMP_NUM_THREADS=2")
    assert machine.checks(PATH="")["threads"].status is Status.OK


def test_visible_devices_without_a_driver_and_options_that_hide(machine: Machine) -> None:
    found = machine.checks(PATH="", CUDA_VISIBLE_DEVICES="0,1", SLURM_GPUS_PER_TASK="1")
    assert found["devices"].status is Status.WARN
    assert "visible: 0,1 (CUDA_VISIBLE_DEVICES); this rank takes 0" in found["devices"].reason
    assert found["GPU options"].status is Status.WARN
    assert "--gpus-per-node" in found["GPU options"].fix


def test_a_launcher_of_another_mpi_on_path(machine: Machine) -> None:
    program = machine.folder / "mpirun"
    program.write_text("#!/bin/sh\necho 'HYDRA build details:'; echo 'Version: 4.2.1'\n")
    program.chmod(0o755)
    found = machine.checks(PATH=f"{machine.folder}:/bin:/usr/bin")["mpirun on PATH"]
    assert found.status is Status.WARN
    assert "is MPICH 4.2, mpi4py loads Open MPI 5.0" in found.reason


@pytest.mark.parametrize(
    ("plugins", "status"),
    [("none\npmi2\npmix\n", Status.OK), ("none\ncray_shasta\n", Status.WARN)],
)
def test_what_srun_offers(machine: Machine, plugins: str, status: Status) -> None:
    program = machine.folder / "srun"
    program.write_text(f"#!/bin/sh\nprintf '{plugins}'\n")
    program.chmod(0o755)
    assert machine.checks(PATH=str(machine.folder))["Slurm"].status is status


def test_a_folder_that_cannot_be_written(machine: Machine) -> None:
    here = Here({"PATH": ""}, machine.folder, machine.folder, machine.folder / "gone")
    found = {check.name: check for check in check_here(here)}["run folder"]
    assert found.status is Status.FAIL


def test_the_verb_tells_and_blocks(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["doctor", "--folder", str(tmp_path)]) == 0
    assert "[ok]   run folder" in capsys.readouterr().out
    assert main(["doctor", "--json", "--folder", str(tmp_path / "gone")]) == 4
    found = {check["name"]: check["status"] for check in json.loads(capsys.readouterr().out)}
    assert found["run folder"] == "fail"
    main(["doctor", "--public", "--folder", str(tmp_path)])
    assert str(tmp_path) not in capsys.readouterr().out
