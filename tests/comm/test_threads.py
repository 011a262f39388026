"""`ThreadWorld` itself: repeatable, never hanging, and able to do harm on request."""

import threading
import time
from typing import Any

import numpy as np
import pytest

from mpipar.comm import Call, Communicator, IdentityCommunicator, Op, ThreadWorld
from mpipar.errors import CollectiveTimeout, CountOutOfRange, RankFailed


def test_results_come_in_rank_order() -> None:
    assert ThreadWorld(4).run(lambda c: c.rank * 10) == [0, 10, 20, 30]
    assert ThreadWorld(2).run(lambda c, x, y: (c.rank, x, y), 1, "a") == [(0, 1, "a"), (1, 1, "a")]


def test_a_world_of_none_is_refused() -> None:
    with pytest.raises(CountOutOfRange, match="1 or more, got 0"):
        ThreadWorld(0)


def arrivals(seed: int | None) -> list[tuple[int, int]]:
    """In which order ranks make their calls."""
    order: list[tuple[int, int]] = []

    def body(c: Communicator) -> None:
        for k in range(6):
            order.append((k, c.rank))
            c.barrier()

    ThreadWorld(4, seed=seed).run(body)
    return order


def test_a_run_is_repeatable_and_a_seed_changes_it() -> None:
    assert arrivals(None) == arrivals(None)
    assert arrivals(1) == arrivals(1)
    assert len({tuple(arrivals(seed)) for seed in range(8)}) > 4


def test_one_rank_runs_at_a_time() -> None:
    running, most = [0], [0]

    def body(c: Communicator) -> None:
        for _ in range(20):
            running[0] += 1
            most[0] = max(most[0], running[0])
            time.sleep(0)
            running[0] -= 1
            c.barrier()

    ThreadWorld(4).run(body)
    assert most == [1]


def test_a_deadlock_is_told_at_once_with_who_waits_for_what() -> None:
    def body(c: Communicator) -> None:
        c.recv(np.empty(1), (c.rank + 1) % c.size, tag=3)

    start = time.monotonic()
    with pytest.raises(CollectiveTimeout, match="no rank can go on") as info:
        ThreadWorld(3).run(body)
    assert time.monotonic() - start < 5
    for rank in range(3):
        assert f"rank {rank} waits in recv" in str(info.value)


def test_crossed_sends_deadlock_only_without_buffers() -> None:
    def body(c: Communicator) -> float:
        c.send(np.ones(1), 1 - c.rank)
        return float(c.recv(np.empty(1), 1 - c.rank)[0])

    assert ThreadWorld(2, synchronous_sends=False).run(body) == [1.0, 1.0]
    with pytest.raises(CollectiveTimeout, match="waits in send"):
        ThreadWorld(2, synchronous_sends=True).run(body)


def test_synchronous_sends_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPIPAR_SYNC_SENDS", "1")
    assert ThreadWorld(2).synchronous_sends
    monkeypatch.delenv("MPIPAR_SYNC_SENDS")
    assert not ThreadWorld(2).synchronous_sends


def test_a_rank_that_raises_ends_the_waits_of_the_others() -> None:
    def body(c: Communicator) -> None:
        if c.rank == 1:
            raise KeyError("a mistake")
        c.barrier()

    with pytest.raises(KeyError) as info:
        ThreadWorld(3).run(body)
    assert info.value.__notes__ == ["raised on rank 1 of 3"]
    ends = ThreadWorld(3).run(body, return_errors=True)
    assert isinstance(ends[0], RankFailed)
    assert "rank 1 raised KeyError: 'a mistake'" in str(ends[2])


@pytest.mark.parametrize("leave", [SystemExit(0), SystemExit(3), KeyboardInterrupt()])
def test_a_rank_that_leaves_ends_the_waits_of_the_others(leave: BaseException) -> None:
    def body(c: Communicator) -> None:
        if c.rank == 0:
            raise leave
        c.all_reduce(1)

    ends = ThreadWorld(2).run(body, return_errors=True)
    assert ends[0] is leave
    assert isinstance(ends[1], RankFailed)


def test_a_rank_that_returns_early_is_missed() -> None:
    def body(c: Communicator) -> None:
        if c.rank:
            c.barrier()

    with pytest.raises(CollectiveTimeout, match="rank 1 waits in barrier"):
        ThreadWorld(2).run(body)


def test_a_rank_that_only_computes_meets_the_deadline() -> None:
    stop = threading.Event()

    def body(c: Communicator) -> None:
        if c.rank == 1:
            stop.wait(20)
        c.barrier()

    with pytest.raises(CollectiveTimeout, match="rank 1 is computing") as info:
        ThreadWorld(2, deadline_s=0.2).run(body)
    stop.set()
    assert "test_threads.py" in str(info.value)


def faulty(fault: str, rank: int, op: Op, n: int = 2, **words: Any) -> ThreadWorld:
    return ThreadWorld(
        n, on_call=lambda r, call: fault if (r, call.op) == (rank, op) else None, **words
    )


def pass_on(c: Communicator) -> float:
    if c.rank == 0:
        c.send(np.ones(1), 1)
        return 0.0
    return float(c.recv(np.empty(1), 0)[0])


def test_injected_loss_crash_and_delay() -> None:
    assert ThreadWorld(2).run(pass_on) == [0.0, 1.0]
    with pytest.raises(CollectiveTimeout, match="rank 1 waits in recv"):
        faulty("drop", 0, Op.SEND).run(pass_on)
    with pytest.raises(RankFailed, match="rank 0 was made to crash in send"):
        faulty("crash", 0, Op.SEND).run(pass_on)
    assert faulty("delay", 0, Op.SEND).run(pass_on) == [0.0, 1.0]


def test_every_call_is_seen_with_its_sizes() -> None:
    calls: list[tuple[int, Op, int]] = []

    def see(rank: int, call: Call) -> None:
        calls.append((rank, call.op, call.n_bytes))

    ThreadWorld(2, on_call=see).run(lambda c: c.all_reduce(np.zeros(4)))
    assert sorted(calls) == [(0, Op.ALL_REDUCE, 32), (1, Op.ALL_REDUCE, 32)]


def test_the_identity_is_a_world_of_one() -> None:
    comm = IdentityCommunicator()
    assert (comm.rank, comm.size, comm.info.is_root) == (0, 1, True)
    request = comm.begin_recv(np.empty(2), 0, tag=1)
    comm.send(np.array([1.0, 2.0]), 0, tag=1)
    assert request.wait().tolist() == [1.0, 2.0]
    with pytest.raises(CollectiveTimeout, match="nothing was sent by rank 0"):
        comm.recv(np.empty(1), 0)
    sub = comm.split(0)
    assert sub is not None
    assert sub.all_gather(5).tolist() == [5]
    assert comm.split(None) is None
