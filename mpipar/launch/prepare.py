"""Before MPI starts: the device of this rank, the cores near it, the threads it may use.

A network library picks its cards by the device that is current then, so this comes first.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Final

from mpipar.errors import LaunchError
from mpipar.launch.binding import (
    DevicePlace,
    core_of,
    cores_of,
    device_place,
    domains_of,
    near_cpus,
    parse_site_map,
)
from mpipar.launch.devices import DeviceChoice, choose_device, read_visible
from mpipar.launch.environment import local_rank
from mpipar.launch.place import Place
from mpipar.topology.discover import numa_domains, nvml_devices, usable_cpus

SITE_MAP_VARIABLE: Final = "MPIPAR_SITE_MAP"
BIND_VARIABLE: Final = "MPIPAR_BIND"
_LOCAL_SIZES: Final = (
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "MV2_COMM_WORLD_LOCAL_SIZE",
)


def local_size(environment: Mapping[str, str]) -> int | None:
    """Ranks on this node, as announced before MPI starts.

    Parameters
    ----------
    environment : mapping of str to str
        Such as ``os.environ``.

    Returns
    -------
    int or None
        None where no launcher says.
    """
    for name in _LOCAL_SIZES:
        if environment.get(name, "").isdecimal():
            return int(environment[name])
    node = environment.get("SLURM_NODEID", "0")
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        sizes: list[int] = []
        for size, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", environment.get(name, "")):
            sizes += [int(size)] * int(times or 1)
        if node.isdecimal() and int(node) < len(sizes):
            return sizes[int(node)]
    return None


def launch_threads(environment: Mapping[str, str], n_cores: int) -> int:
    """Threads a rank that a batch script should announce: what the job asked for, if it is there.

    Parameters
    ----------
    environment : mapping of str to str
        Of the batch script.
    n_cores : int
        Cores that the script itself may use: those of the job on the first node.

    Returns
    -------
    int
        ``SLURM_CPUS_PER_TASK``, but never more than the ranks of a node can have each: some
        versions of Slurm keep the number and give one core. 1 outside an allocation.
    """
    asked = environment.get("SLURM_CPUS_PER_TASK", "")
    share = n_cores // (local_size(environment) or 1)
    return max(1, min(int(asked), share)) if asked.isdecimal() else 1


def prepare(environment: MutableMapping[str, str], root: Path = Path("/sys")) -> Place:
    """Choose this rank's device and bind it near, before MPI starts. Not collective.

    Sets ``CUDA_DEVICE_ORDER=PCI_BUS_ID``, so that numbers mean the same to CUDA, to the driver and
    to Slurm. Narrows the affinity mask to cores near the device where they are known (sysfs, or
    the file that ``MPIPAR_SITE_MAP`` names) and the launcher has not bound the rank already;
    ``MPIPAR_BIND=0`` leaves the mask alone.

    Parameters
    ----------
    environment : mutable mapping of str to str
        ``os.environ``.
    root : Path
        Where sysfs is mounted.

    Returns
    -------
    Place
        Of this process; its rank is the local one.

    Raises
    ------
    LaunchError
        If the site map cannot be read.
    """
    environment.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    local, n_local = local_rank(environment) or 0, local_size(environment) or 1
    ids = sorted(device.bus_id or "" for device in nvml_devices())
    visible, site = read_visible(environment), _site_map(environment)
    choices = [choose_device(visible, i, ids) for i in range(max(n_local, local + 1))]
    places = [_where(choice, site, root) for choice in choices]
    choice, where = choices[local], places[local]
    if choice is not None and choice.n_visible == 1:  # hidden by the scheduler: peers have others
        places = [DevicePlace()] * local + [where]
    usable, domains = usable_cpus(root), numa_domains(root)
    n_all = sum(len(domain.cpus) for domain in domains)
    is_unbound = len(usable) * n_local > n_all  # more than a fair share: the ranks' masks overlap
    if where.cpus and is_unbound and environment.get(BIND_VARIABLE) != "0":
        siblings = {cpu: core_of(cpu, root) for cpu in usable}
        usable = near_cpus(places, local, usable, siblings)
        _bind(usable)
    return Place(
        local,
        socket.gethostname(),
        tuple(sorted(usable)),
        tuple(sorted(cores_of(usable, root))),
        domains_of(usable, domains),
        choice,
        where.numa,
        where.nic,
    )


def _bind(cpus: frozenset[int]) -> None:
    """Every thread: those of the array library exist already."""
    tasks = Path("/proc/self/task")
    for task in os.listdir(tasks) if tasks.is_dir() else ["0"]:
        with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
            os.sched_setaffinity(int(task), cpus)


def _site_map(environment: Mapping[str, str]) -> Mapping[str, DevicePlace]:
    file = environment.get(SITE_MAP_VARIABLE, "")
    if not file:
        return {}
    try:
        return parse_site_map(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise LaunchError(
            f"{SITE_MAP_VARIABLE}={file} cannot be read: {error.strerror}; name a file with "
            f"[gpu.N] tables, or unset it"
        ) from None


def _where(choice: DeviceChoice | None, site: Mapping[str, DevicePlace], root: Path) -> DevicePlace:
    """The site's word first: it is there because sysfs is wrong or says nothing."""
    if choice is None:
        return DevicePlace()
    if choice.entry in site:
        return site[choice.entry]
    is_bus = re.fullmatch(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.\d", choice.device_id)
    return device_place(choice.device_id, root) if is_bus else DevicePlace()
