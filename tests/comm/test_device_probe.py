"""What an MPI can do on device memory is found by children that may die."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from mpipar.comm.mpi.probe import ITEMS, capability, probe
from mpipar.errors import LaunchError

# An MPI that dies of a segmentation fault at one item, is silent at another, and does the others.
MPI = """
import os, signal, sys
for item in sys.argv[2:]:
    if item.startswith(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGSEGV)
    if not item.startswith("gather"):
        print("mpipar can " + item, flush=True)
"""


def child(deadly: str, started: list[int] | None = None):
    def attempt(items: Sequence[str]) -> tuple[str, bool]:
        if started is not None:
            started.append(len(items))
        done = subprocess.run([sys.executable, "-c", MPI, deadly, *items], capture_output=True,
                              text=True, check=False)  # fmt: skip
        assert done.returncode in (0, -11)
        return done.stdout, done.returncode == 0

    return attempt


def test_what_dies_or_is_wrong_is_left_out_and_the_rest_is_found() -> None:
    started: list[int] = []
    found = probe(ITEMS, child("all_gather", started))
    assert found == [i for i in ITEMS if not i.startswith(("all_gather", "gather"))]
    assert started == [len(ITEMS), len(ITEMS) - 5, len(ITEMS) - 6]


def test_an_mpi_that_cannot_send_device_memory_is_not_tried_further() -> None:
    started: list[int] = []
    assert probe(ITEMS, child("send", started)) == []
    assert started == [len(ITEMS)]


def test_an_mpi_that_dies_again_and_again_is_given_up() -> None:
    items = [*ITEMS[:2], *(f"bad {i}" for i in range(20)), "good"]
    assert probe(items, child("bad")) == list(ITEMS[:2])


def test_the_answer_is_kept_for_this_mpi_and_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    started: list[int] = []
    first = capability("model A", child("nothing", started))
    assert capability("model A", child("send", started)) == first
    assert len(started) == 1
    assert capability("model B", child("send", started)) == []
    assert [f.name.startswith("device-") for f in (tmp_path / "mpipar").iterdir()] == [True]


def test_without_a_launcher_nothing_is_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def absent(items: Sequence[str]) -> tuple[str, bool]:
        raise LaunchError("no launcher of that MPI is here")

    assert capability("model C", absent) == []
    assert len(capability("model C", child("nothing"))) == len(ITEMS) - 2


# Makes the double known to the ranks of the probe; its memory may be made to lie nowhere.
SITE = """
import sys
if "mpipar.comm.mpi.probe" in " ".join(sys.orig_argv):
    from mpipar.comm.mpi import library
    from tests.comm import device_double
    if {is_bad}:
        def seen(x):
            return {{"shape": x.shape, "typestr": x.dtype.str, "version": 3, "data": (4096, False)}}
        device_double.DoubleArray.__cuda_array_interface__ = property(seen)
"""


@pytest.mark.parametrize("is_bad", [False, True])
def test_real_ranks_try_every_kind_of_call_and_may_die_of_it(
    is_bad: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(SITE.format(is_bad=is_bad))
    root = Path(__file__).resolve().parents[2]
    monkeypatch.setenv("PYTHONPATH", f"{root}{os.pathsep}{tmp_path}")
    monkeypatch.setenv("MPIPAR_PROBE_LIBRARY", "tests")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert capability("double") == ([] if is_bad else list(ITEMS))
