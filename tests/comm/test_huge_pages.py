"""Node memory on huge pages, and the same memory where the system gives none."""

import os
import re
from pathlib import Path

import numpy as np
import pytest

from mpipar.comm.node import huge_pages
from mpipar.comm.node.arena import Arena
from mpipar.comm.node.memory import Memory

MIB = 2**20


def memory(region: int = 16 * MIB) -> Memory:
    made = Memory.of_node(0, 2, lambda text: text, lambda k: k, region)
    assert made is not None
    return made


def on_huge_pages() -> int:
    """Bytes of all shared mappings of this process that the kernel counts on huge pages."""
    found = re.findall(r"ShmemPmdMapped: +(\d+) kB", Path("/proc/self/smaps").read_text())
    return 1024 * sum(map(int, found))


def filled(room: Arena) -> None:
    """Arrays of several segments hold what is written, at their own places."""
    arrays = [room.empty(3 * MIB // 4 + i, np.float32) for i in range(4)]
    for i, array in enumerate(arrays):
        array[...] = i
    for i, array in enumerate(arrays):
        assert (array == i).all()


def test_large_arrays_lie_on_huge_pages() -> None:
    size = huge_pages.huge_page()
    if not size or not _can_collapse(size):
        pytest.skip("this kernel gives no huge pages to shared memory")
    before = on_huge_pages()
    node = memory()
    assert node.address % size == 0
    filled(Arena(node, 1))
    assert on_huge_pages() - before >= 12 * MIB


def _can_collapse(size: int) -> bool:
    """The same request on a file of our own."""
    file = os.memfd_create("probe")
    os.truncate(file, size)
    owner, buffer = huge_pages.map_file(file, size)
    address = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
    np.frombuffer(buffer, np.uint8)[0] = 1
    able = huge_pages.collapse(address, size)
    os.close(file)
    del owner
    return able


@pytest.mark.parametrize("without", ["setting", "kernel", "library"])
def test_without_them_memory_is_the_same(without: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if without == "setting":
        monkeypatch.setenv("MPIPAR_HUGE_PAGES", "0")
    if without == "kernel":
        monkeypatch.setattr("mpipar.comm.node.memory.collapse", lambda address, n_bytes: False)
    if without == "library":
        monkeypatch.setattr(huge_pages, "_found", [None])
    before = on_huge_pages()
    filled(Arena(memory(), 0))
    assert on_huge_pages() == before


def test_memory_that_is_not_there_is_an_error_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int, start: int, n_bytes: int) -> None:
        raise OSError(28, "No space left on device")

    node = memory()
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space"):
        node.back(0, 4 * MIB)


def test_a_file_that_cannot_be_mapped_is_an_error() -> None:
    file = os.open("/dev/null", os.O_RDONLY)
    with pytest.raises((OSError, ValueError)):
        huge_pages.map_file(file, 4 * MIB)
    os.close(file)


def test_small_regions_keep_their_limit() -> None:
    assert memory(5 * 4096).region_bytes == 5 * 4096
