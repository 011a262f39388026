"""The launcher that belongs to an MPI library, and what its ranks need in their environment."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from mpipar.errors import LaunchError
from mpipar.launch.environment import LibraryName, in_allocation, thread_settings
from mpipar.launch.library import Library
from mpipar.launch.prepare import launch_threads

# `ompirun_wrapper` is what `mpirun` of the Open MPI wheel calls: it stays when the MPICH wheel in
# the same environment has overwritten `mpirun`.
_OPEN_MPI_NAMES: Final = ("mpirun", "mpiexec", "mpirun.openmpi", "ompirun_wrapper")
_HYDRA_NAMES: Final = ("mpiexec.hydra", "mpiexec", "mpirun", "mpiexec.mpich")

_VERSIONS: Final = (
    ("Open MPI", re.compile(r"\((?:Open MPI|OpenRTE)\) (\d+)\.(\d+)")),
    ("Intel MPI", re.compile(r"Intel\(R\) MPI Library.*?Version (\d+)\.(\d+)", re.DOTALL)),
    ("MPICH", re.compile(r"HYDRA.*?Version:\s+(\d+)\.(\d+)", re.DOTALL)),
)


@dataclass(frozen=True)
class Launcher:
    """A launcher program and the variables that it itself needs.

    Attributes
    ----------
    path : Path
        The program.
    name : LibraryName
        Family and version of the MPI that it starts.
    environment : mapping of str to str
        Such as ``OPAL_PREFIX``.
    """

    path: Path
    name: LibraryName
    environment: Mapping[str, str] = field(default_factory=dict)

    def command(self, n_ranks: int, program: Sequence[str]) -> list[str]:
        """The command that starts `program` on `n_ranks` ranks.

        Parameters
        ----------
        n_ranks : int
            Number of ranks.
        program : sequence of str
            Program and arguments.

        Returns
        -------
        list of str
            For `subprocess`.
        """
        return [str(self.path), "-n", str(n_ranks), *program]


def _speaks(launcher: LibraryName, library: LibraryName) -> bool:
    """Open MPI wants its own major version; all descendants of MPICH share one protocol."""
    if "Open MPI" in (launcher.family, library.family):
        majors = {launcher.version[0], library.version[0]} - {0}
        return launcher.family == library.family and len(majors) < 2
    return "unknown MPI" not in (launcher.family, library.family)


def _candidates(library: Library, environment: Mapping[str, str]) -> Iterator[Path]:
    near = [folder / "bin" for folder in library.path.parents] if library.path else []
    path = [Path(folder) for folder in environment.get("PATH", "").split(os.pathsep) if folder]
    names = _OPEN_MPI_NAMES if library.name.family == "Open MPI" else _HYDRA_NAMES
    for folder in dict.fromkeys((*near, *path)):
        for name in names:
            if os.access(folder / name, os.X_OK) and (folder / name).is_file():
                yield folder / name


def identify_launcher(path: Path, environment: Mapping[str, str]) -> Launcher:
    """Which MPI a launcher program belongs to, from its ``--version``.

    Parameters
    ----------
    path : Path
        The program.
    environment : mapping of str to str
        Environment to run it in.

    Returns
    -------
    Launcher
        Its name is "unknown MPI" if the program does not say or does not answer within 20 s.
    """
    own = {"OPAL_PREFIX": str(path.parent.parent)} if path.name == "ompirun_wrapper" else {}
    try:
        child = subprocess.run(
            [str(path), "--version"],
            env={**environment, **own},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=20,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return Launcher(path, LibraryName("unknown MPI", (0, 0)), own)
    for family, pattern in _VERSIONS:
        if found := pattern.search(child.stdout):
            return Launcher(path, LibraryName(family, (int(found[1]), int(found[2]))), own)
    return Launcher(path, LibraryName("unknown MPI", (0, 0)), own)


def find_launcher(library: Library, environment: Mapping[str, str]) -> Launcher:
    """The launcher that belongs to `library`: beside it, else on ``PATH``, verified.

    Parameters
    ----------
    library : Library
        What mpi4py loads.
    environment : mapping of str to str
        With ``PATH``.

    Returns
    -------
    Launcher
        The first one whose own version fits.

    Raises
    ------
    LaunchError
        If there is none; names each program that was looked at and what it is.
    """
    refused = []
    for path in _candidates(library, environment):
        launcher = identify_launcher(path, environment)
        if _speaks(launcher.name, library.name):
            return launcher
        refused.append(f"{path} is {launcher.name}")
    seen = f"found only: {'; '.join(refused)}" if refused else "found none beside it or on PATH"
    raise LaunchError(
        f"mpi4py loads {library}, and no launcher of that MPI is here: {seen}.\n"
        f"With another launcher every rank would be 0 of 1. Install that MPI's mpiexec, or choose "
        f"the MPI that a launcher here belongs to: --mpi openmpi, --mpi mpich or --mpi PATH."
    )


def rank_settings(
    library: LibraryName,
    environment: Mapping[str, str],
    n_ranks: int,
    n_cores: int,
    is_root: bool = False,
) -> dict[str, str]:
    """What the launcher and its ranks need in their environment; the user's own settings stay.

    Parameters
    ----------
    library : LibraryName
        The MPI library of the ranks.
    environment : mapping of str to str
        Such as ``os.environ``; what is set there stays, but for ``SLURM_MPI_TYPE`` under MPICH.
    n_ranks, n_cores : int
        Ranks to start; cores that this process may use.
    is_root : bool
        Whether the user is root, whom Open MPI refuses unless told twice.

    Returns
    -------
    dict of str to str
        Variables to add.
    """
    threads = thread_settings(environment, launch_threads(environment, n_cores))
    settings = {"PYTHONFAULTHANDLER": "1", **threads}
    if library.family == "Open MPI":
        settings |= _open_mpi_settings(library.version[0], environment, n_ranks > n_cores)
        if is_root:
            settings |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    missing = {name: value for name, value in settings.items() if name not in environment}
    if library.family != "Open MPI" and "SLURM_JOB_ID" in environment:
        # Hydra's own srun of its daemons: a site's pmix there makes every rank abort
        missing["SLURM_MPI_TYPE"] = "none"
    return missing


def _open_mpi_settings(
    major: int, environment: Mapping[str, str], is_oversubscribed: bool
) -> dict[str, str]:
    """Version 5 takes mapping and binding from PRRTE, version 4 from its own run time."""
    # Binding is none: binding each rank to a core gains nothing measurable with one thread a
    # rank, and puts two jobs that share a machine on the same cores.
    binding = (
        "PRTE_MCA_hwloc_default_binding_policy"
        if major >= 5
        else "OMPI_MCA_hwloc_base_binding_policy"
    )
    settings = {binding: "none", "OMPI_MCA_osc": "^ucx"}
    if is_oversubscribed:
        settings["OMPI_MCA_mpi_yield_when_idle"] = "1"
    if in_allocation(environment):
        return settings
    # One node: ask no network library, which takes a second of MPI_Init; and allow more ranks
    # than cores (inside an allocation that policy would put all ranks on the first node).
    settings |= {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "^ofi,uct,openib"}
    if major >= 5:
        settings["PRTE_MCA_rmaps_default_mapping_policy"] = ":oversubscribe"
    else:
        settings["OMPI_MCA_rmaps_base_oversubscribe"] = "1"
    return settings
