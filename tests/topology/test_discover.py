from types import SimpleNamespace

import pytest

from mpipar.errors import LayoutError
from mpipar.topology.discover import (
    cpu_quota,
    join_by_bus_id,
    normal_bus_id,
    numa_domains,
    nvml_devices,
    ranks_by_node,
    usable_cpus,
    visible_devices,
)


@pytest.fixture
def machine(tmp_path):
    """A recorded sysfs: two NUMA domains of four CPUs, a control group over CPUs 2 to 5."""
    for i in range(2):
        folder = tmp_path / f"devices/system/node/node{i}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{4 * i}-{4 * i + 3}\n")
        (folder / "meminfo").write_text(f"Node {i} MemTotal:       1024 kB\n")
    (tmp_path / "fs/cgroup").mkdir(parents=True)
    (tmp_path / "fs/cgroup/cpuset.cpus.effective").write_text("2-5\n")
    (tmp_path / "fs/cgroup/cpu.max").write_text("150000 100000\n")
    return tmp_path


def test_mask_and_control_group_are_both_respected(machine):
    assert usable_cpus(machine, range(8)) == {2, 3, 4, 5}
    assert usable_cpus(machine, [0, 1, 2]) == {2}
    assert [sorted(d.usable) for d in numa_domains(machine, [3, 4, 7])] == [[3], [4]]
    assert cpu_quota(machine) == 1.5


def test_domains_without_usable_cpus_keep_their_position(machine):
    first, second = numa_domains(machine, [2])
    assert (first.index, second.index) == (0, 1)
    assert not second.usable
    assert second.cpus == {4, 5, 6, 7}
    assert first.memory_bytes == 2**20


def test_no_sysfs_is_one_domain(tmp_path):
    (domain,) = numa_domains(tmp_path, [0, 3])
    assert domain.cpus == domain.usable == {0, 3}
    assert cpu_quota(tmp_path) is None


class Driver:
    """The calls of NVML that are used, over GPUs listed by bus id."""

    class NVMLError(Exception):
        pass

    def __init__(self, bus_ids, works=True):
        self.bus_ids, self.works = bus_ids, works

    def nvmlInit(self):
        if not self.works:
            raise self.NVMLError("driver not loaded")

    def nvmlDeviceGetCount(self):
        return len(self.bus_ids)

    def nvmlDeviceGetHandleByIndex(self, i):
        return i

    def nvmlDeviceGetName(self, i):
        return b"GPU"

    def nvmlDeviceGetPciInfo(self, i):
        return SimpleNamespace(busId=self.bus_ids[i])

    def nvmlDeviceGetMemoryInfo(self, i):
        return SimpleNamespace(total=i + 1)


def test_cuda_order_is_joined_by_bus_id_never_by_index():
    driver = nvml_devices(Driver([b"00000000:07:00.0", "0000:0F:00.0", "00000001:07:00.0"]))
    joined = join_by_bus_id(driver, ["0001:07:00.0", "0000:07:00.0"])
    assert [(d.ordinal, d.memory_bytes) for d in joined] == [(0, 3), (1, 1)]
    (only,) = join_by_bus_id(driver, ["0000:0f:00.0"])
    assert (only.ordinal, only.memory_bytes) == (0, 2)


def test_faults_of_the_join():
    driver = nvml_devices(Driver(["0000:07:00.0"]))
    with pytest.raises(LayoutError, match="not in the driver's list"):
        join_by_bus_id(driver, ["0000:08:00.0"])
    with pytest.raises(LayoutError, match="shown twice"):
        join_by_bus_id(driver, ["0000:07:00.0"] * 2)
    with pytest.raises(LayoutError, match="not a PCI bus id"):
        normal_bus_id("GPU0")


def test_no_driver_is_no_error():
    assert nvml_devices(Driver([], works=False)) == ()


@pytest.mark.parametrize(
    ("text", "indices"),
    [
        (None, (0, 1, 2)),
        ("2,0", (2, 0)),
        ("GPU-bb", (1,)),
        ("MIG-GPU-cc33/1/0", (2,)),
        ("0,9,1", (0,)),
        ("", ()),
        ("GPU-", ()),
    ],
)
def test_visible_devices(text, indices):
    assert visible_devices(text, ["GPU-aa11", "GPU-bb22", "GPU-cc33"]) == indices


def test_ranks_by_node():
    assert ranks_by_node(["b", "a", "b"]) == {"b": (0, 2), "a": (1,)}
