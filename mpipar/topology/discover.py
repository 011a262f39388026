"""What this node looks like: NUMA domains, usable CPUs, GPUs. Each source is one small adapter.

Every function takes what it reads (a folder, a mask, a module) as a parameter, so that recorded
machines are as good as the real one. A library or a file that is not there is no error.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mpipar.errors import LayoutError
from mpipar.topology.link import DeviceInfo, DeviceKind


def parse_cpu_list(text: str) -> frozenset[int]:
    """Read a kernel CPU list such as ``"0-3,8"``; an empty text is an empty set."""
    cpus: set[int] = set()
    for low, high in re.findall(r"(\d+)(?:-(\d+))?", text):
        cpus.update(range(int(low), int(high or low) + 1))
    return frozenset(cpus)


@dataclass(frozen=True)
class NumaDomain:
    """One NUMA domain, with what this process may use of it.

    Parameters
    ----------
    index : int
        The kernel's number.
    cpus : frozenset of int
        All its CPUs.
    usable : frozenset of int
        Those within both the affinity mask and the control group.
    memory_bytes : int
        Its memory, 0 when unknown.
    """

    index: int
    cpus: frozenset[int]
    usable: frozenset[int]
    memory_bytes: int = 0


def usable_cpus(root: Path = Path("/sys"), mask: Iterable[int] | None = None) -> frozenset[int]:
    """CPUs that this process may run on: affinity mask and control group, both respected.

    Parameters
    ----------
    root : Path
        Where sysfs is mounted.
    mask : iterable of int, optional
        Affinity mask (default: the process's own).

    Returns
    -------
    frozenset of int
        Never empty where the mask is not.
    """
    if mask is None:
        affinity = getattr(os, "sched_getaffinity", None)
        mask = affinity(0) if affinity else range(os.cpu_count() or 1)
    allowed = frozenset(mask)
    group = root / "fs/cgroup/cpuset.cpus.effective"
    within = parse_cpu_list(group.read_text()) if group.is_file() else frozenset()
    return allowed & within or allowed


def cpu_quota(root: Path = Path("/sys")) -> float | None:
    """CPUs' worth of time that the control group grants (`cpu.max`); None without a limit."""
    file = root / "fs/cgroup/cpu.max"
    words = file.read_text().split() if file.is_file() else []
    return int(words[0]) / int(words[1]) if len(words) == 2 and words[0] != "max" else None


def numa_domains(
    root: Path = Path("/sys"), mask: Iterable[int] | None = None
) -> tuple[NumaDomain, ...]:
    """The NUMA domains of this node in ascending order.

    Parameters
    ----------
    root : Path
        Where sysfs is mounted.
    mask : iterable of int, optional
        Affinity mask (default: the process's own).

    Returns
    -------
    tuple of NumaDomain
        One domain of all usable CPUs where the kernel tells of none. Domains without a usable
        CPU stay in the list, so that positions stay the kernel's.
    """
    usable = usable_cpus(root, mask)
    domains = []
    for folder in sorted(
        (root / "devices/system/node").glob("node[0-9]*"), key=lambda p: int(p.name[4:])
    ):
        cpus = parse_cpu_list((folder / "cpulist").read_text())
        info = folder / "meminfo"
        total = re.search(r"MemTotal:\s*(\d+) kB", info.read_text() if info.is_file() else "")
        memory = int(total[1]) * 1024 if total else 0
        domains.append(NumaDomain(int(folder.name[4:]), cpus, cpus & usable, memory))
    return tuple(domains) or (NumaDomain(0, usable, usable),)


def normal_bus_id(bus_id: str) -> str:
    """A PCI bus id in one form: ``"00000000:07:00.0"`` and ``"0000:07:00.0"`` are the same."""
    match = re.fullmatch(r"(?:([0-9a-fA-F]+):)?([0-9a-fA-F]{2}):([0-9a-fA-F]{2})\.(\d)", bus_id)
    if not match:
        raise LayoutError(f"{bus_id!r} is not a PCI bus id such as 0000:07:00.0")
    domain = int(match[1] or "0", 16)
    return f"{domain:04x}:{match[2].lower()}:{match[3].lower()}.{match[4]}"


def nvml_devices(nvml: Any = None) -> tuple[DeviceInfo, ...]:
    """All NVIDIA GPUs of the node in NVML's order, () without driver or library.

    Parameters
    ----------
    nvml : module, optional
        The `pynvml` module of `nvidia-ml-py` (default: imported when present).

    Returns
    -------
    tuple of DeviceInfo
        With memory and bus id; the ordinal is NVML's index, which is not CUDA's.
    """
    if nvml is None:
        if find_spec("pynvml") is None:
            return ()
        nvml = import_module("pynvml")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return ()
    found = []
    for i in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(i)
        name, bus_id = nvml.nvmlDeviceGetName(handle), nvml.nvmlDeviceGetPciInfo(handle).busId
        memory = int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
        info = DeviceInfo(i, DeviceKind.CUDA, _text(name), memory)
        found.append(replace(info, bus_id=normal_bus_id(_text(bus_id))))
    return tuple(found)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def join_by_bus_id(
    devices: Sequence[DeviceInfo], cuda_bus_ids: Sequence[str]
) -> tuple[DeviceInfo, ...]:
    """The devices that CUDA shows, in CUDA's order, described by the driver's list.

    Parameters
    ----------
    devices : sequence of DeviceInfo
        From `nvml_devices`; all of the node.
    cuda_bus_ids : sequence of str
        Bus id of each CUDA ordinal; one visible GPU a task is the usual case under a scheduler.

    Returns
    -------
    tuple of DeviceInfo
        With CUDA's ordinals.

    Raises
    ------
    LayoutError
        If CUDA shows a device that the driver does not list, or one twice.
    """
    by_bus = {device.bus_id: device for device in devices}
    ids = [normal_bus_id(bus_id) for bus_id in cuda_bus_ids]
    for i, bus_id in enumerate(ids):
        if bus_id not in by_bus or bus_id in ids[:i]:
            why = "shown twice" if bus_id in ids[:i] else "not in the driver's list"
            raise LayoutError(f"CUDA device {i} at {bus_id} is {why} ({', '.join(by_bus)})")
    return tuple(replace(by_bus[bus_id], ordinal=i) for i, bus_id in enumerate(ids))


def visible_devices(text: str | None, uuids: Sequence[str]) -> tuple[int, ...]:
    """NVML indices that `CUDA_VISIBLE_DEVICES` leaves visible, in its order.

    Parameters
    ----------
    text : str or None
        The variable: integers (valid under `CUDA_DEVICE_ORDER=PCI_BUS_ID` only), UUIDs or their
        unique beginnings, `MIG-` tokens; None means all. As CUDA does, the first unknown entry
        ends the list.
    uuids : sequence of str
        UUID of each NVML index.

    Returns
    -------
    tuple of int
        Positions in `uuids`.
    """
    if text is None:
        return tuple(range(len(uuids)))
    visible: list[int] = []
    for token in text.split(","):
        word = token.strip()
        if word.isdigit():
            matches = [int(word)] if int(word) < len(uuids) else []
        else:
            parent = re.sub(r"^MIG-(GPU-[^/]+)/.*", r"\1", word)
            matches = [i for i, uuid in enumerate(uuids) if parent and uuid.startswith(parent)]
        if len(matches) != 1:
            break
        visible.append(matches[0])
    return tuple(visible)


def ranks_by_node(node_keys: Sequence[str]) -> Mapping[str, tuple[int, ...]]:
    """Ranks of each node, from one gathered key a rank (what a shared-memory split tells).

    Parameters
    ----------
    node_keys : sequence of str
        For every rank, something equal on ranks that share memory and different elsewhere.

    Returns
    -------
    mapping of str to tuple of int
        In order of first appearance.
    """
    nodes: dict[str, tuple[int, ...]] = {}
    for rank, key in enumerate(node_keys):
        nodes[key] = (*nodes.get(key, ()), rank)
    return nodes
