"""What the launcher announced is what MPI sees; run at every rank count with every MPI."""

import os

import pytest
from mpi4py import MPI

from mpipar.launch.environment import check_launch, detect, identify_library, local_rank

WORLD = MPI.COMM_WORLD


def test_announced_size_and_rank_are_those_of_mpi() -> None:
    launched = detect(os.environ)
    assert launched is not None
    assert (launched.size, launched.rank) == (WORLD.size, WORLD.rank)
    check_launch(os.environ, WORLD.size, MPI.Get_library_version())


def test_ranks_are_distinct_processes_with_distinct_local_ranks() -> None:
    seen = WORLD.allgather((os.getpid(), local_rank(os.environ)))
    assert len({pid for pid, _ in seen}) == WORLD.size
    assert sorted(local for _, local in seen) == list(range(WORLD.size))


def test_the_launcher_and_the_library_are_one_mpi() -> None:
    launched = detect(os.environ)
    assert launched is not None
    family = identify_library(MPI.Get_library_version()).family
    assert launched.launcher.startswith(family)


@pytest.mark.mpi(min_size=2)
def test_one_blas_thread_a_rank() -> None:
    assert os.environ["OPENBLAS_NUM_THREADS"] == os.environ["OMP_NUM_THREADS"] == "1"
