"""Cores near a GPU: site maps, recorded sysfs, masks and control groups."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpipar.errors import LaunchError
from mpipar.launch.binding import (
    DevicePlace,
    cores_of,
    device_place,
    fair_threads,
    near_cpus,
    parse_site_map,
)

MAPS = Path(__file__).resolve().parents[2] / "jobs" / "maps"
SMALL = '[gpu.0]\ncpus = "2-3"\nnuma = 1\nnic = "hsn1"\n[gpu.1]\ncpus = "0-1"\n'


def test_a_site_map() -> None:
    found = parse_site_map(SMALL)
    assert found == {
        "0": DevicePlace(frozenset({2, 3}), 1, "hsn1"),
        "1": DevicePlace(frozenset({0, 1})),
    }


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gpu = 3", "tables"),
        ("[gpu.0]\ncpu = '1'", "has keys cpus, numa and nic"),
        ("[gpu.0]\ncpus = '1-2'\n[gpu.1]\ncpus = '2-3'", "core 2 is near gpu.0 and gpu.1"),
        ("[[gpu", "no TOML"),
        ("[nic.0]\ncpus = '1'", "tables"),
    ],
)
def test_a_wrong_site_map_is_refused(text: str, words: str) -> None:
    with pytest.raises(LaunchError, match=words):
        parse_site_map(text)


def test_the_maps_in_jobs_agree_with_the_sites() -> None:
    # the first core for each GPU, as the sites print it in their `--cpu-bind=map_cpu` lines
    first = {"lumi-g": [49, 57, 17, 25, 1, 9, 33, 41], "frontier": [49, 57, 17, 25, 1, 9, 33, 41]}
    for name, cores in first.items():
        found = parse_site_map((MAPS / f"{name}.toml").read_text())
        assert [min(found[str(i)].cpus) for i in range(8)] == cores
        assert [found[str(i)].numa for i in range(8)] == [3, 3, 1, 1, 0, 0, 2, 2]
        assert {len(place.cpus) for place in found.values()} == {7}
    booster = parse_site_map((MAPS / "juwels-booster.toml").read_text())
    assert [booster[str(i)].numa for i in range(4)] == [3, 1, 7, 5]
    assert all(min(p.cpus) // 6 == p.numa and len(p.cpus) == 6 for p in booster.values())


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    """Two GPUs behind one bridge each, with a card behind the second bridge."""

    def device(path: str, numa: str, cpus: str) -> Path:
        folder = tmp_path / "devices" / path
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(numa + "\n")
        (folder / "local_cpulist").write_text(cpus + "\n")
        return folder

    gpus = {
        "0000:07:00.0": device("pci0000:00/0000:00:01.0/0000:07:00.0", "3", "48-63"),
        "0000:46:00.0": device("pci0000:40/0000:40:01.0/0000:46:00.0", "-1", ""),
    }
    near = device("pci0000:40/0000:40:01.0/0000:47:00.0", "1", "16-31")
    far = device("pci0000:80/0000:80:01.0/0000:88:00.0", "5", "80-95")
    (tmp_path / "bus/pci/devices").mkdir(parents=True)
    for name, folder in gpus.items():
        (tmp_path / "bus/pci/devices" / name).symlink_to(folder)
    for name, folder in {"mlx5_0": near, "mlx5_1": far}.items():
        (tmp_path / "class/infiniband" / name).mkdir(parents=True)
        (tmp_path / "class/infiniband" / name / "device").symlink_to(folder)
    for cpu in range(4):
        topology = tmp_path / f"devices/system/cpu/cpu{cpu}/topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{cpu % 2},{cpu % 2 + 2}\n")
    return tmp_path


def test_what_the_kernel_says(sysfs: Path) -> None:
    first = device_place("0000:07:00.0", sysfs)
    assert (first.cpus, first.numa) == (frozenset(range(48, 64)), 3)
    assert first.nic == "mlx5_0+mlx5_1"  # neither is nearer
    second = device_place("0000:46:00.0", sysfs)
    assert second == DevicePlace(frozenset(), None, "mlx5_0")
    assert device_place("0000:99:00.0", sysfs).cpus == frozenset()
    assert cores_of(frozenset({0, 2, 3}), sysfs) == {0, 1}
    assert cores_of(frozenset({9}), sysfs) == {9}


def test_ranks_share_the_cores_near_their_device() -> None:
    far, near = DevicePlace(frozenset({0, 1, 2})), DevicePlace(frozenset({4, 5, 6, 7}))
    everything = frozenset(range(8))
    places = [far, near, near, near]
    found = [near_cpus(places, i, everything) for i in range(4)]
    assert found == [{0, 1, 2}, {4, 5}, {6}, {7}]
    # the job's control group leaves two near cores: the third rank cannot have its own
    assert near_cpus(places, 3, frozenset({0, 4, 5})) == {4, 5}
    # nothing near is allowed, or nothing is known: the mask stays
    assert near_cpus(places, 1, frozenset({0, 1})) == {0, 1}
    assert near_cpus([DevicePlace()], 0, everything) == everything
    # hardware threads of a core stay together
    threads = {4: 4, 5: 5, 6: 4, 7: 5}
    assert near_cpus([near, near], 0, everything, threads) == {4, 6}


@given(
    st.lists(st.frozensets(st.integers(0, 11)), min_size=1, max_size=6),
    st.frozensets(st.integers(0, 11), min_size=1),
)
def test_binding_stays_inside_the_mask(near: list[frozenset[int]], usable: frozenset[int]) -> None:
    places = [DevicePlace(cpus) for cpus in near]
    for i, place in enumerate(places):
        own = near_cpus(places, i, usable)
        assert own
        assert own <= usable
        assert own <= place.cpus or own == usable


def test_threads_are_the_ranks_own_cores() -> None:
    bound = [frozenset({0, 1}), frozenset({2, 3, 4})]
    assert [fair_threads(bound, i) for i in range(2)] == [2, 3]
    unbound = [frozenset(range(8))] * 4
    assert [fair_threads(unbound, i) for i in range(4)] == [2] * 4
    assert fair_threads([frozenset({0, 1})] * 3, 0) == 1  # oversubscribed: never none
    mixed = [frozenset({0, 1}), frozenset({0, 1, 2, 3})]
    assert [fair_threads(mixed, i) for i in range(2)] == [1, 3]
