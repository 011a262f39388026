"""Node memory: blocks, pools, growth, and what happens when it is too small."""

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mpipar.comm import Communicator, ThreadWorld
from mpipar.comm.node.arena import Arena, region_limit
from mpipar.comm.node.memory import Memory
from mpipar.errors import CountOutOfRange, UnsupportedArray

MIB = 2**20


def arena(region: int = 64 * MIB, index: int = 0) -> Arena:
    return Arena(Memory.private(2, region), index)


def test_blocks_are_aligned_apart_and_counted() -> None:
    room = arena()
    arrays = [room.empty(n, np.float32) for n in (1, 3, 1000, 70_001)]
    for i, array in enumerate(arrays):
        assert array.ctypes.data % 64 == 0
        array[...] = i
    assert [int(a[0]) for a in arrays] == [int(a[-1]) for a in arrays] == [0, 1, 2, 3]
    assert room.n_blocks == 4
    for array in arrays:
        room.give(room.memory.locate(array))
    assert (room.n_blocks, room.n_bytes) == (0, 0)


def test_freed_blocks_are_used_again_without_growing() -> None:
    room = arena()
    places = set()
    for _ in range(200):
        offset = room.take(3 * MIB)
        places.add(offset)
        room.give(offset)
    assert len(places) == 1
    assert room.n_segments == 1


def test_a_block_is_freed_once() -> None:
    room = arena()
    offset = room.take(100)
    room.give(offset)
    with pytest.raises(CountOutOfRange, match="block to be freed"):
        room.give(offset)


def test_regions_of_ranks_never_meet() -> None:
    memory = Memory.private(3, 16 * MIB)
    offsets = [Arena(memory, i).take(5 * MIB) for i in range(3)]
    assert [o // (16 * MIB) for o in offsets] == [0, 1, 2]


def test_too_small_names_size_and_setting() -> None:
    room = arena(4 * MIB)
    room.take(3 * MIB)
    with pytest.raises(CountOutOfRange, match=r"MPIPAR_ARENA_BYTES.*shm") as caught:
        room.take(2 * MIB)
    assert str(5 * MIB) in str(caught.value)
    assert room.n_blocks == 1


def test_a_full_file_system_is_told_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    room = arena()

    def full(start: int, n_bytes: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(room.memory, "back", full)
    with pytest.raises(CountOutOfRange, match=r"No space left on device.*64 MiB"):
        room.take(MIB)


def test_the_limit_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPIPAR_ARENA_BYTES", "12345678")
    assert region_limit(4) == 12345678
    monkeypatch.delenv("MPIPAR_ARENA_BYTES")
    assert region_limit(4) * 4 <= region_limit(1)


def _named_and_unnamed() -> list[Callable[[int], tuple[str, int]]]:
    from mpipar.comm.node.memory import _anonymous_file, _named_file

    return [_anonymous_file, _named_file]


@pytest.mark.parametrize("which", [0, 1])
def test_processes_map_one_file(which: int, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    make = _named_and_unnamed()[which]
    monkeypatch.setattr("mpipar.comm.node.memory._anonymous_file", make)
    told: list[str] = []

    def share(text: str) -> str:
        told.append(text)
        return told[0]

    first = Memory.of_node(0, 2, share, lambda k: k, 16 * MIB)
    assert first is not None
    if which == 1:  # the name is gone as soon as all have mapped the file
        assert not os.path.exists(told[0])
        return
    second = Memory.of_node(1, 2, share, lambda k: k, 16 * MIB)
    assert second is not None
    array = Arena(first, 0).empty(5, np.int32)
    array[...] = 7
    assert (second.view(first.locate(array), 5, array.dtype) == 7).all()
    assert not [n for n in os.listdir("/dev/shm") if n.startswith("mpipar-arena-")]


def test_private_memory_is_announced(caplog: pytest.LogCaptureFixture) -> None:
    def body(comm: Communicator) -> Any:
        room = comm.host.arena  # type: ignore[attr-defined]
        room._high = room._backed = room._top
        x = comm.empty(100_000, np.float64)
        x[...] = comm.rank + 1
        shared = comm.empty_shared(100_000, np.float64)
        return float(comm.all_reduce(x, out=shared)[-1])

    with caplog.at_level(logging.WARNING, logger="mpipar"):
        assert ThreadWorld(3, node_size=3).run(body) == [6.0] * 3
    assert "takes private memory instead" in caplog.text
    assert "MPIPAR_ARENA_BYTES" in caplog.text


def test_no_array_is_a_clear_refusal_on_every_rank() -> None:
    def body(comm: Communicator) -> None:
        for make in (comm.empty, comm.empty_shared):
            with pytest.raises(CountOutOfRange, match="must be in range 0 or more, got -1"):
                make((2, -1))
            for shape, dtype in ((2, object), (2, "abc"), ("abc", np.int8), (2.5, np.int8)):
                with pytest.raises(UnsupportedArray):
                    make(shape, dtype)
            assert make((0, 3)).shape == (0, 3)
        with pytest.raises(CountOutOfRange, match="what this machine can give, got 4611686018"):
            comm.empty((1 << 31, 1 << 31), np.uint8)
        assert comm.all_reduce(1) == comm.size

    for node_size in (0, 2):
        ThreadWorld(2, node_size=node_size).run(body)
