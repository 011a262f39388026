"""What the environment says before MPI starts: launcher, size, rank, threads. Pure functions.

Every function takes a mapping such as ``os.environ`` and starts nothing. Variables as observed
under each launcher; ``SLURM_LOCALID`` comes last because under ``mpirun`` inside a Slurm job it is
0 for every rank.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from mpipar.errors import LaunchError

SINGLETON_VARIABLE: Final = "MPIPAR_SINGLETON"

LOCAL_RANK_VARIABLES: Final = (
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "PMI_LOCAL_RANK",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "PALS_LOCAL_RANKID",
    "FLUX_TASK_LOCAL_ID",
    "JSM_NAMESPACE_LOCAL_RANK",
    "SLURM_LOCALID",
)

THREAD_VARIABLES: Final = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)

# (name, variable of the size, variable of the rank); the first whose rank is set wins. A launcher
# that also speaks another's language (jsrun, PALS and Flux set PMI or OMPI variables as well)
# stands before it.
_LAUNCHERS: Final = (
    ("jsrun", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK"),
    ("PALS mpiexec", "PMI_SIZE", "PALS_RANKID"),
    ("Flux", "FLUX_JOB_SIZE", "FLUX_TASK_RANK"),
    ("MVAPICH mpirun", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
    ("Open MPI mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
)

_ALLOCATIONS: Final = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "COBALT_JOBID", "PE_HOSTFILE")

_LIBRARIES: Final = (
    ("Open MPI", re.compile(r"Open MPI v?(\d+)\.(\d+)")),
    ("Intel MPI", re.compile(r"Intel\(R\) MPI Library (?:.*Version )?(\d+)\.(\d+)", re.DOTALL)),
    ("MVAPICH", re.compile(r"MVAPICH\d?\D*(\d+)\.(\d+)")),
    ("MPICH", re.compile(r"MPICH [Vv]ersion\s*:?\s*(\d+)\.(\d+)")),
)


@dataclass(frozen=True)
class Launched:
    """Which launcher started this process, and what it announced.

    Attributes
    ----------
    launcher : str
        Name of the launcher, such as "Open MPI mpirun" or "srun --mpi=pmix".
    variable : str
        The variable that gives the number of ranks (or, without one, that gave the launcher away).
    size, rank : int or None
        As announced; None where the launcher says nothing.
    """

    launcher: str
    variable: str
    size: int | None
    rank: int | None


@dataclass(frozen=True)
class LibraryName:
    """Family and version of an MPI library.

    Attributes
    ----------
    family : str
        "Open MPI", "MPICH", "Intel MPI", "MVAPICH" or "unknown MPI".
    version : tuple of int
        Major and minor number; (0, 0) if unknown.
    """

    family: str
    version: tuple[int, int]

    def __str__(self) -> str:
        number = f" {self.version[0]}.{self.version[1]}" if any(self.version) else ""
        return self.family + number


def identify_library(text: str) -> LibraryName:
    """Family and version from the text of ``MPI_Get_library_version``.

    Parameters
    ----------
    text : str
        The whole text, or its first line.

    Returns
    -------
    LibraryName
        "unknown MPI" with version (0, 0) if no known family is named.
    """
    for family, pattern in _LIBRARIES:
        if found := pattern.search(text):
            return LibraryName(family, (int(found[1]), int(found[2])))
    return LibraryName("Open MPI" if "Open MPI" in text else "unknown MPI", (0, 0))


def _integer(environment: Mapping[str, str], name: str) -> int | None:
    try:
        return int(environment[name])
    except (KeyError, ValueError):
        return None


def detect(environment: Mapping[str, str]) -> Launched | None:
    """Which launcher started this process.

    Parameters
    ----------
    environment : mapping of str to str
        Such as ``os.environ``.

    Returns
    -------
    Launched or None
        None for a process that no launcher started; also for the plain shell of a Slurm batch
        script, which has Slurm's variables but is no step.
    """
    for name, size, rank in _LAUNCHERS:
        if rank in environment:
            return _launched(environment, name, size, rank)
    in_step = "SLURM_STEP_ID" in environment and "SLURM_PROCID" in environment
    if "PMI_RANK" in environment and ("MPI_LOCALRANKID" in environment or not in_step):
        return _launched(environment, "MPICH mpiexec", "PMI_SIZE", "PMI_RANK")
    if in_step:
        name = f"srun --mpi={_slurm_plugin(environment)}"
        return _launched(environment, name, "SLURM_STEP_NUM_TASKS", "SLURM_PROCID")
    if "PMIX_RANK" in environment:  # PRRTE without its Open MPI personality announces no size
        return _launched(environment, "prterun", "PRTE_SIZE", "PMIX_RANK")
    return None


def _launched(environment: Mapping[str, str], name: str, size: str, rank: str) -> Launched:
    variable = size if size in environment else rank
    return Launched(name, variable, _integer(environment, size), _integer(environment, rank))


def _slurm_plugin(environment: Mapping[str, str]) -> str:
    if "PMIX_RANK" in environment:
        return "pmix"
    return "pmi2" if "PMI_RANK" in environment or "PMI_FD" in environment else "none"


def local_rank(environment: Mapping[str, str]) -> int | None:
    """Rank among the processes of this node, as announced before MPI starts.

    Parameters
    ----------
    environment : mapping of str to str
        Such as ``os.environ``.

    Returns
    -------
    int or None
        From the first of `LOCAL_RANK_VARIABLES` that is set, else None. After MPI has started
        the shared-memory split counts; the two may be permutations of each other: never mix them.
    """
    for name in LOCAL_RANK_VARIABLES:
        if name in environment:
            return _integer(environment, name)
    return None


def in_allocation(environment: Mapping[str, str]) -> bool:
    """Whether a batch system gave this process its nodes.

    Parameters
    ----------
    environment : mapping of str to str
        Such as ``os.environ``.

    Returns
    -------
    bool
        True inside a Slurm, PBS, LSF, Cobalt or Grid Engine job.
    """
    return any(name in environment for name in _ALLOCATIONS)


def thread_settings(environment: Mapping[str, str], n_threads: int = 1) -> dict[str, str]:
    """Variables that give a rank `n_threads` threads, where the user has not chosen.

    Parameters
    ----------
    environment : mapping of str to str
        Such as ``os.environ``.
    n_threads : int
        Threads a rank.

    Returns
    -------
    dict of str to str
        To be added. Empty if ``OMP_NUM_THREADS`` is set, which the other libraries follow.
    """
    if "OMP_NUM_THREADS" in environment:
        return {}
    return {name: str(n_threads) for name in THREAD_VARIABLES if name not in environment}


def right_command(
    environment: Mapping[str, str], library: LibraryName, size: int, program: str = "PROGRAM ..."
) -> str:
    """The command that would start `size` ranks of `library` here.

    Parameters
    ----------
    environment : mapping of str to str
        Such as ``os.environ``; decides between ``srun`` and ``mpipar run``.
    library : LibraryName
        The MPI library that the ranks load.
    size : int
        Number of ranks.
    program : str
        What the ranks run.

    Returns
    -------
    str
        One or two commands, joined by "or".
    """
    own = f"`mpipar run -n {size} -- {program}`"
    if "SLURM_JOB_ID" in environment:
        plugin = "pmix" if library.family == "Open MPI" else "pmi2"
        return f"`srun --mpi={plugin} -n {size} {program}` or, from the batch script, {own}"
    return own


def check_launch(
    environment: Mapping[str, str], world_size: int, library: str, program: str = "PROGRAM ..."
) -> None:
    """Refuse the classic mistake: N processes that each are rank 0 of 1.

    Not collective; pure. To be called right after MPI has started, before any work.

    Parameters
    ----------
    environment : mapping of str to str
        Such as ``os.environ``. ``MPIPAR_SINGLETON=1`` says that one process is meant.
    world_size : int
        Size of ``MPI_COMM_WORLD`` as MPI sees it.
    library : str
        Text of ``MPI_Get_library_version``.
    program : str
        What the ranks run, for the command in the message.

    Raises
    ------
    LaunchError
        If the launcher announced several ranks and MPI sees one. Names the launcher's variable,
        the size MPI saw, the library and the command that would be right.
    """
    launched = detect(environment)
    if world_size != 1 or launched is None or environment.get(SINGLETON_VARIABLE) == "1":
        return
    size, name = launched.size, identify_library(library)
    if size is None and (launched.rank or 0) > 0:  # no size announced, yet not the first
        size = (launched.rank or 0) + 1
    if size is None or size < 2:
        return
    raise LaunchError(
        f"every rank is 0 of 1: {launched.launcher} started {size} processes "
        f"({launched.variable}={environment[launched.variable]}), but MPI sees a world of 1, "
        f"because the library loaded here is {name} and was not reached by that launcher.\n"
        f"Use {right_command(environment, name, size, program)}.\n"
        f"If one process is meant, set {SINGLETON_VARIABLE}=1."
    )


def check_before_start(environment: Mapping[str, str], library: str) -> None:
    """Refuse a launch that the library would abort while it starts.

    Not collective; pure. To be called before MPI is initialised; afterwards `check_launch`.

    Parameters
    ----------
    environment : mapping of str to str
        Such as ``os.environ``.
    library : str
        Whole text of ``MPI_Get_library_version``, which MPI allows before it is initialised.

    Raises
    ------
    LaunchError
        If an MPICH that was built without PMIx meets a launcher that speaks PMIx only (Open MPI's
        ``mpirun``, ``srun --mpi=pmix``): every rank would end with "unsupported PMI version".
    """
    launched, name = detect(environment), identify_library(library)
    speaks_pmix_only = "PMIX_RANK" in environment and "PMI_RANK" not in environment
    is_without_pmix = name.family == "MPICH" and "configure" in library and "pmix" not in library
    if launched is None or not (speaks_pmix_only and is_without_pmix):
        return
    size = launched.size or 1
    raise LaunchError(
        f"{launched.launcher} started {size} processes ({launched.variable}="
        f"{environment[launched.variable]}), but the library loaded here is {name}, built without "
        f"PMIx, which is all that launcher speaks.\n"
        f"Use {right_command(environment, name, size)}."
    )
