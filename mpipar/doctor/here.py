"""Checks of this process and its machine. MPI is not started: libraries are asked in children."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from mpipar._version import version as own_version
from mpipar.comm.placement import blas_threads
from mpipar.doctor.check import Check, Status, guarded
from mpipar.doctor.devices import check_devices
from mpipar.doctor.site import check_slurm
from mpipar.errors import LaunchError
from mpipar.launch.binding import cores_of
from mpipar.launch.environment import Launched, detect, in_allocation, right_command
from mpipar.launch.launcher import find_launcher, identify_launcher
from mpipar.launch.library import Library, loaded_library
from mpipar.launch.prepare import local_size
from mpipar.topology.discover import cpu_quota, numa_domains, usable_cpus

_SHM_LEAST = 1 << 30  # what node-shared collectives of a real model take
_PACKAGES = ("numpy", "mpi4py", "safetensors", "ml_dtypes", "threadpoolctl")


@dataclass
class Here:
    """What the checks look at; recorded machines can stand in its place.

    Parameters
    ----------
    environment : mapping of str to str
        Such as ``os.environ``.
    root : Path
        Where sysfs is mounted.
    shm : Path
        Folder of shared memory.
    folder : Path
        Where run folders are to be made.
    """

    environment: Mapping[str, str]
    root: Path = Path("/sys")
    shm: Path = Path("/dev/shm")
    folder: Path = field(default_factory=Path.cwd)

    @cached_property
    def launched(self) -> Launched | None:
        """Which launcher started this process."""
        return detect(self.environment)

    @cached_property
    def library(self) -> Library:
        """The MPI that mpi4py loads."""
        return loaded_library(self.environment)


def check_here(here: Here) -> list[Check]:
    """Every check that needs no other rank.

    Parameters
    ----------
    here : Here
        Where to look.

    Returns
    -------
    list of Check
        In the order to be read.
    """
    checks: Mapping[str, Callable[[Here], Check | Iterator[Check]]] = {
        "versions": _versions,
        "MPI library": _library,
        "launcher": _launcher,
        "launched by": _launched_by,
        "cores": _cores,
        "threads": _threads,
        "shared memory": _shared_memory,
        "devices": check_devices,
        "Slurm": check_slurm,
        "run folder": _run_folder,
    }
    return [
        found for name, check in checks.items() for found in guarded(name, partial(check, here))
    ]


def _versions(here: Here) -> Check:
    found = {"python": platform.python_version(), "mpipar": own_version}
    absent = []
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            absent.append(name)
    reason = ", ".join(f"{name} {number}" for name, number in found.items())
    facts = {**found, "system": sys.platform}
    if absent:
        fix = f"{sys.executable} -m pip install {' '.join(absent)}"
        return Check("versions", Status.FAIL, f"{reason}; missing: {', '.join(absent)}", fix, facts)
    return Check("versions", Status.OK, reason, facts=facts)


def _library(here: Here) -> Check:
    try:
        name = here.library.name
    except LaunchError as error:
        reason, _, fix = str(error).partition("\n")
        return Check("MPI library", Status.FAIL, reason, fix)
    facts = {"family": name.family, "version": f"{name.version[0]}.{name.version[1]}"}
    status = Status.WARN if name.family == "unknown MPI" else Status.OK
    return Check("MPI library", status, f"mpi4py loads {here.library}", facts=facts)


def _launcher(here: Here) -> Iterator[Check]:
    """The launcher that fits, and whether a plain ``mpirun`` would be another MPI's."""
    try:
        fitting = find_launcher(here.library, here.environment)
    except LaunchError as error:
        reason, _, fix = str(error).partition("\n")
        is_needed = here.launched is None and not in_allocation(here.environment)
        yield Check("launcher", Status.FAIL if is_needed else Status.WARN, reason, fix)
        return
    facts = {"family": fitting.name.family}
    yield Check("launcher", Status.OK, f"`mpipar run` uses {fitting.path} ({fitting.name})",
                facts=facts)  # fmt: skip
    for name in ("mpirun", "mpiexec"):
        path = shutil.which(name, path=here.environment.get("PATH"))
        if path is None:
            continue
        found = identify_launcher(Path(path), here.environment).name
        is_same = found.family == here.library.name.family
        yield Check(
            f"{name} on PATH",
            Status.OK if is_same else Status.WARN,
            f"{path} is {found}" + ("" if is_same else f", mpi4py loads {here.library.name}"),
            "" if is_same else f"with it every rank would be 0 of 1: use `mpipar run`, not {name}",
            {"family": found.family},
        )


def _launched_by(here: Here) -> Check:
    launched = here.launched
    if launched is None:
        return Check("launched by", Status.NOT_APPLICABLE, "no launcher started this process")
    facts = {"launcher": launched.launcher, "size": launched.size}
    reason = f"{launched.launcher}, {launched.size} ranks ({launched.variable})"
    plugin = {"Open MPI": "pmix", "MPICH": "pmi2"}.get(here.library.name.family)
    is_wrong = launched.launcher.startswith("srun") and plugin and plugin not in launched.launcher
    if is_wrong and (launched.size or 1) > 1:
        command = right_command(here.environment, here.library.name, launched.size or 1)
        return Check("launched by", Status.FAIL, f"{reason}, which {here.library.name} does not "
                     "speak: every rank would be 0 of 1", f"use {command}", facts)  # fmt: skip
    return Check("launched by", Status.OK, reason, facts=facts)


def _cores(here: Here) -> Check:
    usable = usable_cpus(here.root)
    cores, domains = cores_of(usable, here.root), numa_domains(here.root)
    quota, n_local = cpu_quota(here.root), local_size(here.environment)
    touched = sum(bool(domain.usable) for domain in domains)
    reason = f"{len(cores)} cores ({len(usable)} CPUs) in {touched} of {len(domains)} NUMA domains"
    facts = {"cores": len(cores), "cpus": len(usable), "numa": len(domains), "ranks": n_local}
    asked = here.environment.get("SLURM_CPUS_PER_TASK", "")
    if quota is not None and quota < len(cores):
        return Check("cores", Status.WARN, f"{reason}, but the control group grants {quota:g}",
                     f"count on {max(1, int(quota))} ranks or threads", facts)  # fmt: skip
    in_step = here.launched is not None and here.launched.launcher.startswith("srun")
    if in_step and asked.isdecimal() and len(usable) < int(asked):
        return Check("cores", Status.WARN, f"{reason}, but SLURM_CPUS_PER_TASK is {asked}",
                     'give it to srun again: srun -c "$SLURM_CPUS_PER_TASK"', facts)  # fmt: skip
    if n_local is not None and n_local > len(cores) and here.launched is not None:
        return Check("cores", Status.WARN, f"{reason} for {n_local} ranks of this node",
                     f"start at most {len(cores)} ranks a node", facts)  # fmt: skip
    return Check("cores", Status.OK, reason, facts=facts)


def _threads(here: Here) -> Check:
    n_threads, n_cores = blas_threads(), len(cores_of(usable_cpus(here.root), here.root))
    n_local = local_size(here.environment) if here.launched is not None else 1
    reason = f"{n_threads} of the array library in this process"
    facts = {"threads": n_threads, "omp": here.environment.get("OMP_NUM_THREADS", "none")}
    if n_threads * (n_local or 1) > max(n_cores, n_local or 1):
        return Check("threads", Status.WARN, f"{reason}, {n_local} ranks a node, {n_cores} cores",
                     f"OMP_NUM_THREADS={max(1, n_cores // (n_local or 1))}", facts)  # fmt: skip
    return Check("threads", Status.OK, reason, facts=facts)


def _shared_memory(here: Here) -> Check:
    if not here.shm.is_dir() or not os.access(here.shm, os.W_OK):
        return Check("shared memory", Status.WARN, f"{here.shm} cannot be written",
                     "without it collectives inside a node go through the MPI")  # fmt: skip
    space = shutil.disk_usage(here.shm)
    unit, name = (2**30, "GiB") if space.total >= 2**30 else (2**20, "MiB")
    reason = f"{space.free / unit:.1f} of {space.total / unit:.1f} {name} free in {here.shm}"
    facts = {"free_gib": round(space.free / 2**30, 2), "total_gib": round(space.total / 2**30, 2)}
    if space.free < _SHM_LEAST:
        return Check("shared memory", Status.WARN, reason,
                     "in a container: --shm-size=4g or --ipc=host; else remove what is left over "
                     "there (the MPI's own memory; ours only without memory files)",
                     facts)  # fmt: skip
    return Check("shared memory", Status.OK, reason, facts=facts)


def _run_folder(here: Here) -> Check:
    try:
        with tempfile.NamedTemporaryFile(dir=here.folder, prefix=".mpipar-"):
            free = shutil.disk_usage(here.folder).free
    except OSError as error:
        return Check("run folder", Status.FAIL, f"{here.folder} cannot be written: "
                     f"{error.strerror}", "choose another with --run FOLDER")  # fmt: skip
    facts = {"free_gib": round(free / 2**30, 1)}
    return Check("run folder", Status.OK, f"{here.folder} can be written, {free / 2**30:.1f} GiB "
                 "free", facts=facts)  # fmt: skip
