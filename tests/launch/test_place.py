"""Places of ranks: what launchers announce, the table, and what is wrong in it."""

import json
import os
from pathlib import Path

import pytest

from mpipar.errors import LaunchError
from mpipar.launch import prepare as module
from mpipar.launch.binding import DevicePlace
from mpipar.launch.devices import DeviceChoice
from mpipar.launch.environment import LibraryName
from mpipar.launch.launcher import rank_settings
from mpipar.launch.place import Place, cpu_text, place_problems, place_table, with_rank
from mpipar.launch.prepare import launch_threads, local_size, prepare

STEP = {"SLURM_STEP_TASKS_PER_NODE": "4(x2),3", "SLURM_TASKS_PER_NODE": "9"}


@pytest.mark.parametrize(
    ("environment", "size"),
    [
        ({}, None),
        ({**STEP, "SLURM_NODEID": "0"}, 4),
        ({**STEP, "SLURM_NODEID": "1"}, 4),
        ({**STEP, "SLURM_NODEID": "2"}, 3),
        ({"SLURM_TASKS_PER_NODE": "4(x2)"}, 4),  # the shell of a batch script
        ({**STEP, "SLURM_NODEID": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "7"}, 7),
        ({**STEP, "SLURM_NODEID": "1", "MPI_LOCALNRANKS": "2"}, 2),
        ({"SLURM_TASKS_PER_NODE": "2", "SLURM_NODEID": "5"}, None),
    ],
)
def test_ranks_of_the_node(environment: dict[str, str], size: int | None) -> None:
    assert local_size(environment) == size


@pytest.mark.parametrize(
    ("environment", "n_cores", "n_threads"),
    [
        ({}, 64, 1),
        ({"SLURM_CPUS_PER_TASK": "16", "SLURM_TASKS_PER_NODE": "4(x2)"}, 64, 16),
        ({"SLURM_CPUS_PER_TASK": "16", "SLURM_TASKS_PER_NODE": "4(x2)"}, 2, 1),
        ({"SLURM_CPUS_PER_TASK": "16"}, 8, 8),
    ],
)
def test_threads_announced_by_a_batch_script(
    environment: dict[str, str], n_cores: int, n_threads: int
) -> None:
    assert launch_threads(environment, n_cores) == n_threads
    settings = rank_settings(LibraryName("MPICH", (4, 2)), environment, 8, n_cores)
    assert settings["OMP_NUM_THREADS"] == str(n_threads)


def at(rank: int, node: str, cores: tuple[int, ...], **fields: object) -> Place:
    return Place(rank, node, cores, cores, (0,), **fields)  # type: ignore[arg-type]


PLACES = [
    at(0, "a", (0, 1), device=DeviceChoice(0, 4, "0", "0000:07:00.0"), device_numa=0, nic="mlx5_0"),
    at(1, "a", (2, 3), device=DeviceChoice(1, 4, "1", "0000:46:00.0"), device_numa=0),
    at(2, "b", (0, 1, 2, 5), n_threads=4),
]


def test_the_table() -> None:
    lines = place_table(PLACES).splitlines()
    assert len(lines) == 4
    words = [" ".join(line.split()) for line in lines]
    assert words[1] == "0 a 0-1 0 1 0 of 4 0000:07:00.0 0 mlx5_0"
    assert words[3] == "2 b 0-2,5 0 4 - - - -"
    assert place_problems(PLACES) == []
    assert cpu_text(()) == ""
    assert cpu_text((1, 3, 4, 5, 9)) == "1,3-5,9"


def test_places_travel_as_json() -> None:
    for place in PLACES:
        assert Place.from_json(json.loads(json.dumps(place.to_json()))) == place
    assert with_rank(PLACES[0], 7, 3).rank == 7


def test_what_is_wrong_is_said() -> None:
    shared = [PLACES[0], at(1, "a", (2,), device=PLACES[0].device, device_numa=3, n_threads=5)]
    assert place_problems(shared) == [
        "ranks 0, 1 on a share one device (0000:07:00.0)",
        "rank 1 on a runs on NUMA 0, its GPU sits at NUMA 3",
        "2 ranks with 6 threads run on 3 cores of a",
    ]


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, frozenset[int]]:
    """A node of 8 cores in 2 domains; what `prepare` binds to is kept here."""
    for i, cpus in enumerate(("0-3", "4-7")):
        folder = tmp_path / f"devices/system/node/node{i}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpus)
    seen: dict[str, frozenset[int]] = {"mask": frozenset(range(8))}
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: seen["mask"], raising=False)
    monkeypatch.setattr(module, "_bind", lambda cpus: seen.update(bound=cpus))
    monkeypatch.setattr(module, "nvml_devices", tuple)
    (tmp_path / "map.toml").write_text(
        '[gpu.0]\ncpus = "4-7"\nnuma = 1\nnic = "hsn0"\n[gpu.1]\ncpus = "0-3"\nnuma = 0\n'
    )
    return seen


def under_mpirun(tmp_path: Path, local: int, **more: str) -> dict[str, str]:
    return {
        "OMPI_COMM_WORLD_LOCAL_RANK": str(local),
        "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
        "CUDA_VISIBLE_DEVICES": "0,1",
        "MPIPAR_SITE_MAP": str(tmp_path / "map.toml"),
        **more,
    }


def test_unbound_ranks_are_bound_near_their_device(
    tmp_path: Path, node: dict[str, frozenset[int]]
) -> None:
    found = [prepare(under_mpirun(tmp_path, i), tmp_path) for i in range(4)]
    assert [place.cpus for place in found] == [(4, 5), (0, 1), (6, 7), (2, 3)]
    assert [place.numa for place in found] == [(1,), (0,), (1,), (0,)]
    assert [place.device_numa for place in found] == [1, 0, 1, 0]
    assert found[0].nic == "hsn0"
    assert node["bound"] == {2, 3}


def test_a_hidden_device_is_bound_near_without_its_peers(
    tmp_path: Path, node: dict[str, frozenset[int]]
) -> None:
    environment = under_mpirun(tmp_path, 2, CUDA_VISIBLE_DEVICES="1")
    assert prepare(environment, tmp_path).cpus == (0, 1, 2, 3)
    assert environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_what_the_launcher_or_the_user_has_bound_stays(
    tmp_path: Path, node: dict[str, frozenset[int]]
) -> None:
    assert prepare(under_mpirun(tmp_path, 0, MPIPAR_BIND="0"), tmp_path).cpus == tuple(range(8))
    node["mask"] = frozenset({2, 3})
    assert prepare(under_mpirun(tmp_path, 0), tmp_path).cpus == (2, 3)
    assert "bound" not in node


def test_a_site_map_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"MPIPAR_SITE_MAP=.*gone\.toml cannot be read"):
        prepare({"MPIPAR_SITE_MAP": str(tmp_path / "gone.toml")}, tmp_path)


def test_without_any_device_nothing_is_bound(
    tmp_path: Path, node: dict[str, frozenset[int]]
) -> None:
    place = prepare({"CUDA_VISIBLE_DEVICES": ""}, tmp_path)
    assert (place.device, place.cpus) == (None, tuple(range(8)))
    assert "bound" not in node
    assert DevicePlace() == DevicePlace(frozenset(), None, "")
