"""Checks of GPUs: driver, visibility, CuPy, NCCL, and what the MPI can do on device memory."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import numpy as np

from mpipar.comm import Communicator
from mpipar.comm.device.arrays import Device, library
from mpipar.doctor.check import Check, Status
from mpipar.launch.devices import choose_device, read_visible
from mpipar.launch.environment import local_rank
from mpipar.topology.discover import nvml_devices

if TYPE_CHECKING:
    from mpipar.doctor.here import Here

# In a child: a broken driver kills it only. Versions are numbers such as 12080 for 12.8.
_CUPY = r"""
import json, warnings
warnings.simplefilter("ignore")
import cupy
from cupy.cuda import nccl, runtime
def told(ask):
    try:
        return ask()
    except Exception as error:
        return str(error)
print("mpipar" + json.dumps({
    "driver": told(runtime.driverGetVersion), "runtime": told(runtime.runtimeGetVersion),
    "devices": told(runtime.getDeviceCount),
    "nccl": told(nccl.get_version) if nccl.available else None,
    "works": told(lambda: float(cupy.arange(4).sum())) == 6.0}))
"""


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
    yield from _libraries(here, bool(devices))


def _libraries(here: Here, has_device: bool) -> Iterator[Check]:
    """CuPy and NCCL, and after them the MPI, which is tried with CuPy's arrays."""
    package = next((p for p in ("cupy", "cupy-cuda12x", "cupy-cuda13x") if _version(p)), None)
    if package is None:
        status = Status.WARN if has_device else Status.NOT_APPLICABLE
        yield Check("CuPy", status, "not installed: arrays stay on the host",
                    "pip install 'mpipar[cuda12]'" if has_device else "")  # fmt: skip
        yield Check("CUDA-aware MPI", Status.NOT_APPLICABLE, "not tried without CuPy")
        return
    found = _asked(here.environment, "-c", _CUPY)
    name = f"{package} {_version(package)}"
    facts = {"cupy": _version(package), **{k: v for k, v in (found or {}).items() if k != "works"}}
    if found is None or not found["works"]:
        status = Status.FAIL if has_device else Status.NOT_APPLICABLE
        why = "it does not load" if found is None else f"no usable device ({found['devices']})"
        fix = "CuPy's CUDA version must be one that the driver supports: nvidia-smi tells"
        yield Check("CuPy", status, f"{name}, but {why}", fix if has_device else "", facts)
        yield Check("CUDA-aware MPI", Status.NOT_APPLICABLE, "not tried without a usable device")
        return
    nccl = found["nccl"]
    yield Check("CuPy", Status.OK, f"{name}, CUDA {found['runtime']}, driver for "
                f"{found['driver']}, {found['devices']} devices", facts=facts)  # fmt: skip
    yield Check("NCCL", Status.OK if nccl else Status.WARN, str(nccl or "not found"),
                "" if nccl else "pip install nvidia-nccl-cu12", {"nccl": nccl or 0})  # fmt: skip
    able = _asked(here.environment, "-m", "mpipar.comm.mpi.probe", timeout_s=180.0)
    yield judge_probe(able)


def judge_probe(able: Mapping[str, Any] | None) -> Check:
    """What the try of the MPI on device memory says.

    Parameters
    ----------
    able : mapping or None
        Under "able" what worked and under "n_tried" of how many; None where the try broke.

    Returns
    -------
    Check
        Never a failure: what the MPI cannot do goes through the host.
    """
    if able is None:
        return Check("CUDA-aware MPI", Status.WARN, "the try itself broke: arrays go through the "
                     "host", "python -m mpipar.comm.mpi.probe")  # fmt: skip
    n_able, n_tried = len(able["able"]), able["n_tried"]
    facts = {"able": n_able, "tried": n_tried}
    if not n_able:
        return Check("CUDA-aware MPI", Status.OK, "no (tried): arrays go through pinned host "
                     "memory or NCCL", facts=facts)  # fmt: skip
    return Check("CUDA-aware MPI", Status.OK, f"yes (tried): {n_able} of {n_tried} kinds of call "
                 "are right on device memory", facts=facts)  # fmt: skip


def check_ways(comm: Communicator, device: Device | None = None) -> Check:
    """Add up an array on the devices of all ranks, in every way that there is. Collective.

    Parameters
    ----------
    comm : Communicator
        All ranks.
    device : Device, optional
        By default CuPy with its current device.

    Returns
    -------
    Check
        The same on every rank.
    """
    error = ""
    try:
        device = device or library("cupy")
        device.begin_write(np.ones(1), device.empty(1, np.dtype("f8"))).synchronize()
    except Exception as problem:
        error = str(problem) or type(problem).__name__
    without = [r for r, text in enumerate(comm.all_gather_json(error)) if text]
    if without or device is None:
        return Check("device arrays", Status.NOT_APPLICABLE, f"no usable device at {len(without)} "
                     f"of {comm.size} ranks")  # fmt: skip
    group = comm.split(0, purpose="doctor")
    ways = group.devices.agree(device) if group is not None else ()
    wrong = []
    for way in ways:
        each = comm.split(0, purpose=f"doctor {way}")
        if each is not None:
            each.devices.agree(device, way)
            x = device.empty(1000, np.dtype("f4"))
            device.begin_write(np.full(1000, comm.rank + 1, np.float32), x).synchronize()
            back = np.empty(1000, np.float32)
            device.begin_read(each.all_reduce(x), back).synchronize()
            wrong += [way] if (back != comm.size * (comm.size + 1) / 2).any() else []
            each.close()
    bad = sorted({way for ways in comm.all_gather_json(wrong) for way in ways})
    if bad:
        return Check("device arrays", Status.FAIL, f"wrong sums by {', '.join(bad)}",
                     "MPIPAR_DEVICE_WAY=staged avoids them; please tell us")  # fmt: skip
    return Check("device arrays", Status.OK, f"right by {', '.join(ways)}",
                 facts={"ways": len(ways)})  # fmt: skip


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _asked(
    environment: Mapping[str, str], *words: str, timeout_s: float = 60.0
) -> dict[str, Any] | None:
    """What a Python child tells in its line of JSON."""
    text = answer(environment, sys.executable, *words, timeout_s=timeout_s) or ""
    lines = [x.removeprefix("mpipar") for x in text.splitlines() if x.startswith("mpipar{")]
    return json.loads(lines[-1]) if lines else None


def answer(environment: Mapping[str, str], *command: str, timeout_s: float = 20.0) -> str | None:
    """What a command prints; None where it fails, hangs or does not exist.

    Parameters
    ----------
    environment : mapping of str to str
        Of the command.
    *command : str
        Program and arguments.
    timeout_s : float
        Seconds after which it is given up.

    Returns
    -------
    str or None
        Both of its streams.
    """
    try:
        child = subprocess.run(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return child.stdout if child.returncode == 0 else None
