"""Cores near a rank's GPU: from sysfs or a site's map, within the mask and the control group.

Maps of real nodes are irregular (on some, GPU 4 is nearest to the first cores), so nothing is
computed from numbers: either the kernel tells which cores are near, or a site file does.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from mpipar.errors import LaunchError
from mpipar.topology.discover import NumaDomain, parse_cpu_list
from mpipar.units.remainder import spread_range


@dataclass(frozen=True)
class DevicePlace:
    """Where a GPU sits.

    Parameters
    ----------
    cpus : frozenset of int
        Cores near it; empty where unknown.
    numa : int or None
        Its NUMA domain.
    nic : str
        The nearest network card; several are joined by "+", "" means unknown.
    """

    cpus: frozenset[int] = frozenset()
    numa: int | None = None
    nic: str = ""


def parse_site_map(text: str) -> Mapping[str, DevicePlace]:
    """Read a site's map of GPUs, cores and network cards.

    Parameters
    ----------
    text : str
        TOML with one table a GPU: ``[gpu.0]``, ``cpus = "49-55"``, and if known ``numa = 3`` and
        ``nic = "hsn2"``. The names are GPU numbers in bus order.

    Returns
    -------
    mapping of str to DevicePlace
        By GPU name.

    Raises
    ------
    LaunchError
        If it is no TOML, a key is unknown, or two GPUs claim one core.
    """
    try:
        tables: Mapping[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise LaunchError(f"the site map is no TOML: {error}") from None
    places: dict[str, DevicePlace] = {}
    owner: dict[int, str] = {}
    gpus = tables.get("gpu")
    if set(tables) != {"gpu"} or not isinstance(gpus, Mapping):
        raise LaunchError(f"a site map has tables [gpu.0], [gpu.1], ..., not {sorted(tables)}")
    for name, values in gpus.items():
        if not isinstance(values, Mapping) or set(values) - {"cpus", "numa", "nic"}:
            raise LaunchError(f"site map: [gpu.{name}] has keys cpus, numa and nic, not {values}")
        cpus = parse_cpu_list(str(values.get("cpus", "")))
        for cpu in sorted(cpus):
            if owner.setdefault(cpu, name) != name:
                raise LaunchError(f"site map: core {cpu} is near gpu.{owner[cpu]} and gpu.{name}")
        places[name] = DevicePlace(cpus, values.get("numa"), str(values.get("nic", "")))
    return places


def device_place(bus_id: str, root: Path = Path("/sys")) -> DevicePlace:
    """What the kernel says of a GPU: NUMA domain, near cores, nearest network card.

    Parameters
    ----------
    bus_id : str
        Such as ``0000:07:00.0``.
    root : Path
        Where sysfs is mounted.

    Returns
    -------
    DevicePlace
        Empty fields where the kernel does not tell.
    """
    folder = root / "bus/pci/devices" / bus_id
    numa = _text(folder / "numa_node")
    cpus = parse_cpu_list(_text(folder / "local_cpulist"))
    return DevicePlace(
        cpus, int(numa) if numa.isdecimal() else None, _nearest_nic(folder, root) if bus_id else ""
    )


def _text(file: Path) -> str:
    return file.read_text().strip() if file.is_file() else ""


def _nearest_nic(gpu: Path, root: Path) -> str:
    """The cards with the longest common way down the PCI tree, then those of the same domain."""
    cards = [
        *(root / "class/infiniband").glob("*"),
        *(root / "class/cxi").glob("*"),
    ]
    way, numa = gpu.resolve().parts, _text(gpu / "numa_node")

    def nearness(card: Path) -> tuple[int, bool]:
        other = (card / "device").resolve().parts
        common = next((i for i, pair in enumerate(zip(way, other, strict=False))
                       if pair[0] != pair[1]), min(len(way), len(other)))  # fmt: skip
        return common, _text(card / "device/numa_node") == numa

    best = max(map(nearness, cards), default=None)
    return "+".join(sorted(card.name for card in cards if nearness(card) == best))


def core_of(cpu: int, root: Path = Path("/sys")) -> int:
    """The first hardware thread of a CPU's core.

    Parameters
    ----------
    cpu : int
        The kernel's number.
    root : Path
        Where sysfs is mounted.

    Returns
    -------
    int
        `cpu` itself where the kernel does not tell.
    """
    file = root / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
    return min(parse_cpu_list(_text(file)), default=cpu)


def cores_of(cpus: frozenset[int], root: Path = Path("/sys")) -> frozenset[int]:
    """The cores of some CPUs, each named by its first hardware thread.

    Parameters
    ----------
    cpus : frozenset of int
        The kernel's numbers.
    root : Path
        Where sysfs is mounted.

    Returns
    -------
    frozenset of int
        One number a core.
    """
    return frozenset(core_of(cpu, root) for cpu in cpus)


def near_cpus(
    places: Sequence[DevicePlace],
    local_rank: int,
    usable: frozenset[int],
    siblings: Mapping[int, int] | None = None,
) -> frozenset[int]:
    """The CPUs for one rank of a node: its share of those near its GPU.

    Parameters
    ----------
    places : sequence of DevicePlace
        Of the device of each local rank, in order; as many as ranks on the node. A single one
        says nothing of the peers: all that is near is then taken.
    local_rank : int
        Which of them.
    usable : frozenset of int
        Affinity mask and control group of this process.
    siblings : mapping of int to int, optional
        Core of each CPU, so that hardware threads of one core stay together.

    Returns
    -------
    frozenset of int
        Never outside `usable`; all of it where nothing near is usable or known. Ranks with the
        same near cores divide them, and share them where there are fewer cores than ranks.
    """
    near = [place.cpus & usable for place in places]
    mine = near[local_rank]
    if not mine:
        return usable
    core = siblings or {}
    peers = [i for i, cpus in enumerate(near) if cpus == mine]
    cores = sorted({core.get(cpu, cpu) for cpu in mine})
    if len(cores) < len(peers):
        return mine
    low, high = spread_range(len(cores), len(peers), peers.index(local_rank))
    own = set(cores[low:high])
    return frozenset(cpu for cpu in mine if core.get(cpu, cpu) in own)


def fair_threads(cores: Sequence[frozenset[int]], index: int) -> int:
    """Threads of a rank: its cores, each counted by the share that its node peers leave.

    Parameters
    ----------
    cores : sequence of frozenset of int
        Cores that each rank of the node may run on.
    index : int
        Which of them.

    Returns
    -------
    int
        At least 1. Bound ranks get all of their own cores, unbound ones divide the node.
    """
    total = sum(Fraction(1, sum(core in other for other in cores)) for core in cores[index])
    return max(1, int(total))


def domains_of(cpus: frozenset[int], domains: Sequence[NumaDomain]) -> tuple[int, ...]:
    """NUMA domains that some CPUs touch.

    Parameters
    ----------
    cpus : frozenset of int
        The kernel's numbers.
    domains : sequence of NumaDomain
        Of the node.

    Returns
    -------
    tuple of int
        Ascending.
    """
    return tuple(domain.index for domain in domains if domain.cpus & cpus)
