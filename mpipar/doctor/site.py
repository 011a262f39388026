"""Checks of what the site gives: GPUs and the batch system."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from mpipar.doctor.check import Check, Status
from mpipar.launch.devices import choose_device, read_visible
from mpipar.launch.environment import local_rank
from mpipar.topology.discover import nvml_devices

if TYPE_CHECKING:
    from mpipar.doctor.here import Here


def check_devices(here: Here) -> Iterator[Check]:
    """GPUs, driver, options that hide peers, CuPy, and whether the MPI reads device memory.

    Parameters
    ----------
    here : Here
        Where to look.

    Yields
    ------
    Check
        Several.
    """
    visible, devices = read_visible(here.environment), nvml_devices()
    n_listed = "all" if visible.entries is None else len(visible.entries)
    facts = {"driver": len(devices), "visible": n_listed}
    if not devices and not visible.entries:
        yield Check("devices", Status.NOT_APPLICABLE, "no GPU driver and no visible device",
                    facts=facts)  # fmt: skip
    else:
        ids = sorted(device.bus_id or "" for device in devices)
        choice = choose_device(visible, local_rank(here.environment), ids)
        reason = f"{len(devices)} in the driver, visible: {visible}"
        reason += "" if choice is None else f"; this rank takes {choice.index}"
        yield Check("devices", Status.OK if devices else Status.WARN, reason,
                    "" if devices else "no driver answers, so numbers cannot be told apart",
                    facts)  # fmt: skip
    hidden = [
        name
        for name in ("SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_GPU_BIND")
        if here.environment.get(name) not in (None, "none")
    ]
    if hidden:
        yield Check("GPU options", Status.WARN, f"{', '.join(hidden)} hide the GPUs of peers",
                    "use --gpus-per-node: copies between the GPUs of a node break otherwise",
                    {"hidden": len(hidden)})  # fmt: skip
    yield Check("CUDA-aware MPI", Status.NOT_APPLICABLE, "not probed: this version keeps arrays "
                "on the host")  # fmt: skip
    for package in ("cupy", "cupy-cuda12x", "cupy-cuda13x"):
        try:
            found = version(package)
        except PackageNotFoundError:
            continue
        yield Check("CuPy", Status.OK, f"{package} {found}", facts={"cupy": found})
        return
    status = Status.WARN if devices else Status.NOT_APPLICABLE
    yield Check("CuPy", status, "not installed: arrays stay on the host",
                "pip install 'mpipar[cuda12]'" if devices else "")  # fmt: skip


def check_slurm(here: Here) -> Check:
    """Whether a Slurm is here, and whether its ``srun`` speaks the library's language.

    Parameters
    ----------
    here : Here
        Where to look.

    Returns
    -------
    Check
        What was found.
    """
    if shutil.which("srun", path=here.environment.get("PATH")) is None:
        return Check("Slurm", Status.NOT_APPLICABLE, "no srun on PATH")
    plugins = _answer(here, "srun", "--mpi=list")
    if plugins is None:
        return Check("Slurm", Status.NOT_APPLICABLE, "srun is there, but no cluster answers")
    wanted = "pmix" if here.library.name.family == "Open MPI" else "pmi2"
    found = [name for name in ("pmix", "pmi2", "none") if name in plugins.split()]
    facts = {"plugins": found}
    if wanted in found:
        return Check("Slurm", Status.OK, f"srun --mpi={wanted} fits {here.library.name}",
                     facts=facts)  # fmt: skip
    return Check("Slurm", Status.WARN, f"srun offers {', '.join(found) or plugins.strip()}; "
                 f"{here.library.name} needs {wanted}",
                 "start the ranks by `mpipar run` from the batch script", facts)  # fmt: skip


def _answer(here: Here, *command: str) -> str | None:
    try:
        child = subprocess.run(
            command,
            env=dict(here.environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=20,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return child.stdout if child.returncode == 0 else None
