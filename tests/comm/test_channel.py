"""Channels: order, back-pressure, views, and ends that do not fit; with and without node memory."""

from typing import Any

import numpy as np
import pytest

from mpipar.comm import Communicator, ThreadWorld
from mpipar.errors import CollectiveMismatch, LayoutError

NODES = [0, 2]  # ranks on a node: messages, or node memory


@pytest.mark.parametrize("node_size", NODES)
@pytest.mark.parametrize("n_slots", [1, 2, 5])
def test_arrays_come_in_order_and_unchanged(node_size: int, n_slots: int) -> None:
    def body(comm: Communicator) -> list[float]:
        if comm.rank == 0:
            sender = comm.channel_to(1, (3, 50), np.float64, n_slots)
            for i in range(9):
                slot = sender.acquire()
                slot[...] = i
                sender.commit()
            sender.close()
            return []
        receiver = comm.channel_from(0, (3, 50), np.float64, n_slots)
        seen = []
        for _ in range(9):
            view = receiver.get()
            assert not view.flags.writeable
            assert (view == view[0, 0]).all()
            seen.append(float(view[0, 0]))
            receiver.release()
        receiver.close()
        return seen

    for seed in (None, 1, 2):
        assert ThreadWorld(2, node_size=node_size, seed=seed).run(body)[1] == list(range(9))


@pytest.mark.parametrize("node_size", NODES)
@pytest.mark.parametrize("size", [0, 1, 1000, 300_001])
def test_copies_of_every_size(node_size: int, size: int) -> None:
    def body(comm: Communicator) -> None:
        want = np.arange(size, dtype=np.float32)
        if comm.rank == 0:
            sender = comm.channel_to(1, size)
            for i in range(4):
                sender.send(want + i)
            sender.close()
        else:
            receiver = comm.channel_from(0, size)
            for i in range(4):
                out = np.zeros(2 * size, np.float32)[::2]
                target = out if i % 2 else np.zeros(size, np.float32)
                assert np.array_equal(receiver.recv(target), want + i)

    ThreadWorld(2, node_size=node_size, seed=3).run(body)


def test_the_view_is_the_producers_memory_and_back_pressure_holds() -> None:
    def body(comm: Communicator) -> Any:
        if comm.rank == 0:
            sender = comm.channel_to(1, 10, np.int64, n_slots=2)
            for i in range(2):
                assert sender.ready
                sender.acquire()[...] = i
                sender.commit()
            held = not sender.ready
            comm.barrier()
            comm.barrier()
            sender.acquire()[...] = 2
            sender.commit()
            sender.close()
            return held
        receiver = comm.channel_from(0, 10, np.int64, n_slots=2)
        comm.barrier()
        view = receiver.get()
        place = comm.host.arena.memory.locate(view)  # type: ignore[attr-defined]
        region = comm.host.arena.memory.region_bytes  # type: ignore[attr-defined]
        receiver.release()
        comm.barrier()
        got = [int(receiver.get()[0]), receiver.release(), int(receiver.get()[0])]
        receiver.release()
        return place // region, got

    assert ThreadWorld(2, node_size=2).run(body) == [True, (0, [1, None, 2])]


def test_a_producer_that_is_never_read_is_told_so() -> None:
    def body(comm: Communicator) -> None:
        if comm.rank == 0:
            sender = comm.channel_to(1, 4, n_slots=1)
            for _ in range(2):
                sender.acquire()
                sender.commit()
        else:
            comm.channel_from(0, 4, n_slots=1)

    with pytest.raises(Exception, match="rank 0 waits in send"):
        ThreadWorld(2, node_size=2).run(body)


@pytest.mark.parametrize("node_size", NODES)
def test_ends_that_differ_are_refused(node_size: int) -> None:
    def body(comm: Communicator) -> None:
        if comm.rank == 0:
            comm.channel_to(1, 5).send(np.zeros(5, np.float32))
        else:
            with pytest.raises(CollectiveMismatch, match=r"\(6,\) of float32"):
                comm.channel_from(0, 6).get()

    ThreadWorld(2, node_size=node_size).run(body)


def test_another_shape_is_refused_before_anything_is_sent() -> None:
    def body(comm: Communicator) -> None:
        if comm.rank == 0:
            sender = comm.channel_to(1, 5)
            with pytest.raises(LayoutError, match=r"\(6,\)"):
                sender.send(np.zeros(6, np.float32))
            sender.send(np.ones(5, np.float32))
        else:
            assert comm.channel_from(0, 5).recv(np.zeros(5, np.float32)).sum() == 5

    ThreadWorld(2, node_size=2).run(body)


def test_keys_tell_channels_apart_and_memory_is_given_back() -> None:
    def body(comm: Communicator) -> int:
        group = comm.split(0, purpose="channels")
        assert group is not None
        blocks = comm.host.arena.n_blocks  # type: ignore[attr-defined]
        if comm.rank == 0:
            senders = [group.channel_to(1, 3, np.int64, key=k) for k in range(3)]
            for k in (2, 0, 1):
                senders[k].send(np.full(3, k))
            for sender in senders:
                sender.close()
        else:
            receivers = [group.channel_from(0, 3, np.int64, key=k) for k in range(3)]
            for k in range(3):
                assert receivers[k].recv(np.zeros(3, np.int64)).tolist() == [k] * 3
                receivers[k].close()
        group.close()
        return int(comm.host.arena.n_blocks - blocks)  # type: ignore[attr-defined]

    assert ThreadWorld(2, node_size=2).run(body) == [-1, -1]
