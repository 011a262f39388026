"""Tables of environments as launchers really set them, and what is read from them."""

import pytest

from mpipar.errors import LaunchError
from mpipar.launch.environment import (
    LOCAL_RANK_VARIABLES,
    Launched,
    LibraryName,
    check_before_start,
    check_launch,
    detect,
    identify_library,
    in_allocation,
    local_rank,
    thread_settings,
)

BATCH = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "PMIX_RANK": "3",
}
HYDRA = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "2", "MPI_LOCALNRANKS": "4"}
# the daemon's step, on a node that is not the first
DAEMON = {**STEP, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "0"}

LAUNCHES = {
    "nothing": ({}, None, None),
    "batch script's own shell": (BATCH, None, 0),
    "Open MPI": (OPEN_MPI, Launched("Open MPI mpirun", "OMPI_COMM_WORLD_SIZE", 4, 3), 1),
    "Open MPI in a batch script": (
        {**BATCH, **OPEN_MPI},
        Launched("Open MPI mpirun", "OMPI_COMM_WORLD_SIZE", 4, 3),
        1,
    ),
    "Open MPI on another node of a Slurm job": (
        {**DAEMON, **OPEN_MPI},
        Launched("Open MPI mpirun", "OMPI_COMM_WORLD_SIZE", 4, 3),
        1,
    ),
    "Hydra": (HYDRA, Launched("MPICH mpiexec", "PMI_SIZE", 4, 2), 2),
    "Hydra in a Slurm job": (
        {**DAEMON, **HYDRA},
        Launched("MPICH mpiexec", "PMI_SIZE", 4, 2),
        2,
    ),
    "srun pmix": (
        {**STEP, "PMIX_RANK": "5"},
        Launched("srun --mpi=pmix", "SLURM_STEP_NUM_TASKS", 8, 5),
        1,
    ),
    "srun pmi2": (
        {**STEP, "PMI_RANK": "5", "PMI_SIZE": "8", "PMI_FD": "9"},
        Launched("srun --mpi=pmi2", "SLURM_STEP_NUM_TASKS", 8, 5),
        1,
    ),
    "srun none": (STEP, Launched("srun --mpi=none", "SLURM_STEP_NUM_TASKS", 8, 5), 1),
    "Flux, which speaks PMI": (
        {"FLUX_JOB_SIZE": "6", "FLUX_TASK_RANK": "4", "FLUX_TASK_LOCAL_ID": "0", **HYDRA},
        Launched("Flux", "FLUX_JOB_SIZE", 6, 4),
        2,
    ),
    "PALS": (
        {"PALS_RANKID": "9", "PALS_LOCAL_RANKID": "3", "PMI_SIZE": "12", "PMI_RANK": "9"},
        Launched("PALS mpiexec", "PMI_SIZE", 12, 9),
        3,
    ),
    "jsrun, which speaks Open MPI": (
        {"JSM_NAMESPACE_SIZE": "6", "JSM_NAMESPACE_RANK": "2", "OMPI_COMM_WORLD_RANK": "2"},
        Launched("jsrun", "JSM_NAMESPACE_SIZE", 6, 2),
        None,
    ),
    "MVAPICH": (
        {
            "MV2_COMM_WORLD_SIZE": "2",
            "MV2_COMM_WORLD_RANK": "1",
            "MV2_COMM_WORLD_LOCAL_RANK": "1",
        },
        Launched("MVAPICH mpirun", "MV2_COMM_WORLD_SIZE", 2, 1),
        1,
    ),
    "prterun without Open MPI": (
        {"PMIX_RANK": "1"},
        Launched("prterun", "PMIX_RANK", None, 1),
        None,
    ),
    "a size that is no number": (
        {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "many"},
        Launched("Open MPI mpirun", "OMPI_COMM_WORLD_SIZE", None, 3),
        1,
    ),
}


@pytest.mark.parametrize("case", LAUNCHES)
def test_launcher_and_local_rank(case: str) -> None:
    environment, launched, local = LAUNCHES[case]
    assert detect(environment) == launched
    assert local_rank(environment) == local


def test_local_rank_order_is_the_documented_one() -> None:
    everything = {name: str(i) for i, name in enumerate(LOCAL_RANK_VARIABLES)}
    for i, name in enumerate(LOCAL_RANK_VARIABLES):
        assert local_rank(everything) == i
        del everything[name]
    assert LOCAL_RANK_VARIABLES[-1] == "SLURM_LOCALID"
    assert len(LOCAL_RANK_VARIABLES) == 8


OMPI5 = "Open MPI v5.0.11, package: Open MPI root@host Distribution, ident: 5.0.11"
MPICH5 = "MPICH Version:      5.0.2\nMPICH Release date: Fri Sep 25 20:45:26 UTC 2026"

LIBRARIES = {
    OMPI5: LibraryName("Open MPI", (5, 0)),
    "Open MPI v4.1.4, package: Debian OpenMPI": LibraryName("Open MPI", (4, 1)),
    MPICH5: LibraryName("MPICH", (5, 0)),
    "MPI VERSION    : CRAY MPICH version 8.1.28.15 (ANL base 3.4a2)": LibraryName("MPICH", (8, 1)),
    "Intel(R) MPI Library 2021.10 for Linux* OS": LibraryName("Intel MPI", (2021, 10)),
    "MVAPICH2 Version      :\t2.3.7": LibraryName("MVAPICH", (2, 3)),
    "MVAPICH Version:      4.0": LibraryName("MVAPICH", (4, 0)),
    "something else": LibraryName("unknown MPI", (0, 0)),
}


@pytest.mark.parametrize("text", LIBRARIES)
def test_library_names(text: str) -> None:
    assert identify_library(text) == LIBRARIES[text]


# environment, library text -> words that the refusal must hold
REFUSED = {
    "Open MPI library under Hydra": (
        HYDRA,
        OMPI5,
        ["MPICH mpiexec", "PMI_SIZE=4", "world of 1", "Open MPI 5.0", "mpipar run -n 4"],
    ),
    "MPICH library under Open MPI's mpirun": (
        OPEN_MPI,
        MPICH5,
        ["OMPI_COMM_WORLD_SIZE=4", "MPICH 5.0", "mpipar run -n 4"],
    ),
    "Open MPI 5 under srun --mpi=pmi2": (
        {**STEP, "PMI_RANK": "5", "PMI_SIZE": "8"},
        OMPI5,
        ["srun --mpi=pmi2 started 8", "SLURM_STEP_NUM_TASKS=8", "`srun --mpi=pmix -n 8 train.py`"],
    ),
    "Open MPI 5 under srun --mpi=none": (STEP, OMPI5, ["`srun --mpi=pmix -n 8 train.py`"]),
    "MPICH under srun --mpi=none": (STEP, MPICH5, ["`srun --mpi=pmi2 -n 8 train.py`"]),
    "a later rank of a launcher that announces no size": (
        {"PMIX_RANK": "1"},
        MPICH5,
        ["PMIX_RANK=1", "MPICH 5.0"],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_singletons_by_mistake_are_refused(case: str) -> None:
    environment, text, words = REFUSED[case]
    with pytest.raises(LaunchError) as caught:
        check_launch(environment, 1, text, program="train.py")
    for word in [*words, "MPIPAR_SINGLETON=1"]:
        assert word in str(caught.value)
    check_launch({**environment, "MPIPAR_SINGLETON": "1"}, 1, text)


@pytest.mark.parametrize(
    ("environment", "world_size"),
    [
        ({}, 1),
        (BATCH, 1),  # a plain python in a batch script is one process
        ({**STEP, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, 1),
        (OPEN_MPI, 4),
        (HYDRA, 4),
        (STEP, 8),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}, 1),
    ],
)
def test_right_launches_pass(environment: dict[str, str], world_size: int) -> None:
    check_launch(environment, world_size, OMPI5)


WHEEL = f"{MPICH5}\nMPICH configure:    --with-device=ch4:ucx,ofi --with-pm=hydra:gforker"


@pytest.mark.parametrize(
    ("environment", "command"),
    [
        (OPEN_MPI, "`mpipar run -n 4 -- PROGRAM ...`"),
        ({**STEP, "PMIX_RANK": "5"}, "`srun --mpi=pmi2 -n 8 PROGRAM ...`"),
    ],
)
def test_an_mpich_without_pmix_is_refused_before_it_aborts(
    environment: dict[str, str], command: str
) -> None:
    with pytest.raises(LaunchError) as caught:
        check_before_start(environment, WHEEL)
    assert command in str(caught.value)
    check_before_start(environment, f"{WHEEL} --with-pmix=/usr")
    check_before_start(environment, MPICH5)  # how it was built is unknown
    check_before_start(environment, OMPI5)
    check_before_start({**environment, "PMI_RANK": "0"}, WHEEL)
    check_before_start({}, WHEEL)


def test_allocation() -> None:
    assert in_allocation(BATCH)
    assert in_allocation({"PBS_JOBID": "1.server"})
    assert not in_allocation(OPEN_MPI)


def test_threads_are_one_unless_the_user_chose() -> None:
    assert thread_settings({})["OPENBLAS_NUM_THREADS"] == "1"
    assert set(thread_settings({}).values()) == {"1"}
    assert thread_settings({}, 4)["OMP_NUM_THREADS"] == "4"
    assert thread_settings({"OMP_NUM_THREADS": "3"}) == {}
    assert "MKL_NUM_THREADS" not in thread_settings({"MKL_NUM_THREADS": "2"})
