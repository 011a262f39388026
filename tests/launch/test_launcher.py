"""Launchers as small scripts that say who they are: found beside the library, verified, refused."""

import os
from pathlib import Path

import pytest

from mpipar.errors import LaunchError
from mpipar.launch.environment import LibraryName
from mpipar.launch.launcher import find_launcher, identify_launcher, rank_settings
from mpipar.launch.library import Library, choose_library, loaded_library

OPEN_MPI_5 = LibraryName("Open MPI", (5, 0))
OPEN_MPI_4 = LibraryName("Open MPI", (4, 1))
MPICH = LibraryName("MPICH", (5, 0))
SAYS = {
    "ompi5": "mpirun (Open MPI) 5.0.11",
    "ompi4": "mpirun.real (OpenRTE) 4.1.4",
    "mpich": "HYDRA build details:\n    Version:                                 4.3.1",
    "intel": "Intel(R) MPI Library for Linux* OS, Version 2021.10 Build 20230619",
    "other": "a text editor",
}


def double(path: Path, says: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{SAYS[says]}\nEND\n")
    path.chmod(0o755)
    return path


def library(prefix: Path, name: LibraryName) -> Library:
    return Library(name, prefix / "lib" / "libmpi.so.40")


@pytest.mark.parametrize(
    ("says", "name"),
    [
        ("ompi5", LibraryName("Open MPI", (5, 0))),
        ("ompi4", LibraryName("Open MPI", (4, 1))),
        ("mpich", LibraryName("MPICH", (4, 3))),
        ("intel", LibraryName("Intel MPI", (2021, 10))),
        ("other", LibraryName("unknown MPI", (0, 0))),
    ],
)
def test_a_launcher_is_known_by_its_version(tmp_path: Path, says: str, name: LibraryName) -> None:
    assert identify_launcher(double(tmp_path / "mpiexec", says), os.environ).name == name


def test_the_one_beside_the_library_comes_before_path(tmp_path: Path) -> None:
    beside = double(tmp_path / "a" / "bin" / "mpirun", "ompi5")
    double(tmp_path / "b" / "mpirun", "ompi5")
    environment = {"PATH": f"{tmp_path / 'b'}{os.pathsep}{os.environ['PATH']}"}
    assert find_launcher(library(tmp_path / "a", OPEN_MPI_5), environment).path == beside


def test_path_is_searched_for_the_one_that_fits(tmp_path: Path) -> None:
    double(tmp_path / "first" / "mpirun", "mpich")
    fits = double(tmp_path / "second" / "mpirun", "ompi5")
    path = os.pathsep.join([str(fits.parent.parent / "first"), str(fits.parent), "/bin"])
    assert find_launcher(library(tmp_path / "x", OPEN_MPI_5), {"PATH": path}).path == fits


def test_both_wheels_in_one_place(tmp_path: Path) -> None:
    """The MPICH wheel has overwritten mpirun; Open MPI's own program behind it is still there."""
    for name in ("mpirun", "mpiexec", "mpiexec.hydra"):
        double(tmp_path / "bin" / name, "mpich")
    double(tmp_path / "bin" / "ompirun_wrapper", "ompi5")
    found = find_launcher(library(tmp_path, OPEN_MPI_5), {"PATH": "/bin"})
    assert found.path.name == "ompirun_wrapper"
    assert found.environment == {"OPAL_PREFIX": str(tmp_path)}
    assert find_launcher(library(tmp_path, MPICH), {"PATH": "/bin"}).path.name == "mpiexec.hydra"


@pytest.mark.parametrize(
    ("says", "name"),
    [("mpich", OPEN_MPI_5), ("ompi4", OPEN_MPI_5), ("ompi5", MPICH), ("other", MPICH)],
)
def test_another_mpis_launcher_is_refused(tmp_path: Path, says: str, name: LibraryName) -> None:
    wrong = double(tmp_path / "bin" / "mpiexec", says)
    with pytest.raises(LaunchError) as caught:
        find_launcher(library(tmp_path, name), {"PATH": "/bin"})
    for word in (str(wrong), str(name), "0 of 1", "--mpi"):
        assert word in str(caught.value)


def test_no_launcher_at_all(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="found none"):
        find_launcher(library(tmp_path, MPICH), {"PATH": str(tmp_path)})


def test_a_launcher_that_hangs_or_cannot_start_is_unknown(tmp_path: Path) -> None:
    broken = tmp_path / "mpiexec"
    broken.write_text("#!/no/such/interpreter\n")
    broken.chmod(0o755)
    assert identify_launcher(broken, os.environ).name.family == "unknown MPI"


def test_settings_for_open_mpi_5_on_one_node() -> None:
    settings = rank_settings(OPEN_MPI_5, {}, n_ranks=4, n_cores=2, is_root=True)
    assert settings["PRTE_MCA_rmaps_default_mapping_policy"] == ":oversubscribe"
    assert settings["OMPI_MCA_mpi_yield_when_idle"] == "1"
    assert settings["OMPI_ALLOW_RUN_AS_ROOT"] == settings["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] == "1"
    assert settings["OPENBLAS_NUM_THREADS"] == "1"
    assert settings["OMPI_MCA_osc"] == "^ucx"
    assert "OMPI_MCA_rmaps_base_oversubscribe" not in settings


def test_settings_for_open_mpi_4_and_as_a_user() -> None:
    settings = rank_settings(OPEN_MPI_4, {}, n_ranks=2, n_cores=2)
    assert settings["OMPI_MCA_rmaps_base_oversubscribe"] == "1"
    assert not [name for name in settings if name.startswith(("PRTE", "OMPI_ALLOW"))]
    assert "OMPI_MCA_mpi_yield_when_idle" not in settings


def test_settings_inside_an_allocation() -> None:
    slurm = {"SLURM_JOB_ID": "7"}
    settings = rank_settings(OPEN_MPI_5, slurm, n_ranks=8, n_cores=2)
    assert settings["PRTE_MCA_hwloc_default_binding_policy"] == "none"
    assert "PRTE_MCA_rmaps_default_mapping_policy" not in settings  # all ranks on the first node
    assert "OMPI_MCA_pml" not in settings  # the network is needed there
    assert rank_settings(MPICH, slurm, 8, 2)["SLURM_MPI_TYPE"] == "none"
    assert (
        rank_settings(MPICH, {**slurm, "SLURM_MPI_TYPE": "pmix"}, 8, 2)["SLURM_MPI_TYPE"] == "none"
    )
    assert "SLURM_MPI_TYPE" not in rank_settings(MPICH, {}, 8, 2)


def test_the_users_own_settings_stay() -> None:
    own = {"OMPI_MCA_pml": "ucx", "OPENBLAS_NUM_THREADS": "4", "PYTHONFAULTHANDLER": "0"}
    assert not own.keys() & rank_settings(OPEN_MPI_5, own, 2, 2).keys()


def test_choice_of_the_library(tmp_path: Path) -> None:
    assert choose_library(None) == {}
    assert choose_library("OpenMPI")["MPI4PY_LIBMPI"].endswith(f"{os.pathsep}libmpi.so.40")
    assert "libmpi.so.12" in choose_library("mpich")["MPI4PY_LIBMPI"]
    (tmp_path / "lib").mkdir()
    file = tmp_path / "lib" / "libmpi.so.12"
    file.touch()
    assert choose_library(str(tmp_path)) == {"MPI4PY_LIBMPI": str(file.parent)}
    assert choose_library(str(file)) == {"MPI4PY_LIBMPI": str(file)}
    with pytest.raises(LaunchError, match="neither mpich, openmpi nor an existing"):
        choose_library("lam")


def python_double(tmp_path: Path, script: str) -> str:
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_the_librarys_name_and_file_come_from_a_child(tmp_path: Path) -> None:
    says = python_double(
        tmp_path, """echo noise; echo 'mpipar["MPICH Version: 4.2.1", "/x/lib/l"]'"""
    )
    assert loaded_library(os.environ, says) == Library(
        LibraryName("MPICH", (4, 2)), Path("/x/lib/l")
    )


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (
            "echo \"ModuleNotFoundError: No module named 'mpi4py'\" >&2; exit 1",
            "mpi4py is not inst",
        ),
        ("echo 'RuntimeError: cannot load MPI library' >&2; exit 1", "cannot load MPI library"),
        ("kill -SEGV $$", "exit code -11"),
        ("sleep 5", "did not end within 0.2 s"),
    ],
)
def test_no_library_is_said_clearly(tmp_path: Path, script: str, words: str) -> None:
    with pytest.raises(LaunchError, match=words):
        loaded_library(
            os.environ, python_double(tmp_path, script), timeout_s=0.2 if "sl" in script else 20
        )
