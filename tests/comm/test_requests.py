"""Requests: they own their arrays, end in any order, and tell who is missing."""

import gc
import logging
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from mpipar.comm import Communicator, wait_all, wait_any
from mpipar.errors import CollectiveTimeout, EmptyInput
from tests.comm.cases import MODES, in_mode

pytestmark = pytest.mark.ranks(1, 2, 3, 4)


def test_every_begun_verb_gives_what_its_blocking_form_gives(comm: Communicator) -> None:
    x = np.arange(12.0).reshape(4, 3) * (comm.rank + 1)
    pairs: list[tuple[str, dict[str, Any]]] = [
        ("all_reduce", {}),
        ("reduce_scatter", {"dim": 1}),
        ("all_gather", {"dim": -1}),
        ("all_to_all", {}),
        ("broadcast", {"root": comm.size - 1}),
    ]
    begun = [getattr(comm, f"begin_{verb}")(x, **words) for verb, words in pairs]
    results = wait_all(begun)
    for (verb, words), got in zip(pairs, results, strict=True):
        assert np.array_equal(got, getattr(comm, verb)(x, **words)), verb


@pytest.mark.parametrize("mode", MODES)
def test_many_under_way_at_once_may_be_waited_for_in_any_order(
    comm: Communicator, mode: str
) -> None:
    with in_mode(comm, mode) as group:
        n = group.size
        requests = [group.begin_all_reduce(np.full(50, k + group.rank)) for k in range(8)]
        order = range(8) if group.rank % 2 else reversed(range(8))
        for k in order:
            assert (requests[k].wait() == n * k + n * (n - 1) // 2).all()


def test_blocking_calls_may_pass_between(comm: Communicator) -> None:
    first = comm.begin_all_reduce(np.full(100, comm.rank))
    assert comm.all_reduce(1) == comm.size
    second = comm.begin_all_gather(comm.rank)
    comm.barrier()
    assert second.wait().tolist() == list(range(comm.size))
    assert (first.wait() == sum(range(comm.size))).all()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [10, 1_000_000])
def test_a_message_goes_on_while_its_sender_is_in_a_collective(
    comm: Communicator, mode: str, size: int
) -> None:
    with in_mode(comm, mode) as group:
        after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
        size = min(size, 5000) if mode == "64-byte messages" else size
        if group.size == 1:
            return
        sent = group.begin_send(np.full(size, group.rank), after)
        if group.rank == 0:
            group.barrier()
            got = group.recv(np.empty(size, int), before)
        else:
            got = group.recv(np.empty(size, int), before)
            group.barrier()
        assert (got == before).all()
        sent.wait()


@pytest.mark.parametrize("mode", MODES)
def test_a_collective_goes_on_while_a_rank_is_in_one_of_another_group(
    comm: Communicator, mode: str
) -> None:
    """All-reduces in rank order take two steps; the second must not wait for its owner's wait."""
    other = comm.split(0, purpose="another group")
    assert other is not None
    with in_mode(comm, mode) as group, other:
        request = group.begin_all_reduce(np.full(3000, group.rank), deterministic=True)
        if group.rank == 0:
            other.barrier()
            got = request.wait()
        else:
            got = request.wait()
            other.barrier()
        assert (got == sum(range(group.size))).all()


def test_a_request_owns_its_arrays(comm: Communicator) -> None:
    """Temporary arrays, dropped by the caller at once; the classic segmentation fault."""
    requests = []
    for k in range(5):
        requests.append(comm.begin_all_reduce(np.full(20_000, float(k))))
        gc.collect()
        np.full(20_000, np.nan)  # would take the memory of a freed array
    for k, request in enumerate(requests):
        assert (request.wait() == float(k) * comm.size).all()


def test_test_moves_on_and_wait_may_be_called_twice(comm: Communicator) -> None:
    request = comm.begin_all_reduce(np.ones(4))
    while not request.test():
        pass
    first = request.wait()
    assert request.test()
    assert request.wait() is first
    assert first.tolist() == [comm.size] * 4


def test_out_of_a_begun_call_is_filled_at_the_wait(comm: Communicator) -> None:
    out = np.zeros((3, 2), order="F")
    request = comm.begin_all_reduce(np.ones((3, 2)), out=out)
    assert request.wait() is out
    assert (out == comm.size).all()


@pytest.mark.ranks(2, 3, 4)
def test_wait_any_finds_the_one_that_has_come(comm: Communicator) -> None:
    if comm.rank == 0:
        peers = range(1, comm.size)
        requests = [comm.begin_recv(np.empty(2), peer, tag=9) for peer in peers]
        comm.send(np.zeros(1), comm.size - 1, tag=8)
        index = wait_any(requests)
        assert index == comm.size - 2
        assert requests[index].wait().tolist() == [comm.size - 1.0] * 2
        for peer in peers[:-1]:
            comm.send(np.zeros(1), peer, tag=8)
        assert [r.wait()[0] for r in requests] == list(map(float, peers))
    else:
        comm.recv(np.empty(1), 0, tag=8)
        comm.send(np.full(2, float(comm.rank)), 0, tag=9)


def test_wait_any_of_nothing_is_refused() -> None:
    with pytest.raises(EmptyInput, match="at least one"):
        wait_any([])


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What the library's logger says."""
    with caplog.at_level(logging.WARNING, logger="mpipar"):
        yield caplog


def test_a_dropped_request_is_reported_and_harms_nothing(
    comm: Communicator, told: pytest.LogCaptureFixture
) -> None:
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    into = np.zeros(5)
    request = comm.begin_recv(into, before, tag=4)
    del request
    gc.collect()
    assert any("request dropped before it ended: recv" in r.message for r in told.records)
    comm.send(np.full(5, 3.0), after, tag=4)
    comm.barrier()
    ping = comm.begin_recv(np.zeros(1), before, tag=5)
    comm.send(np.ones(1), after, tag=5)
    assert ping.wait().tolist() == [1.0]
    assert comm.all_reduce(1) == comm.size


def test_a_waited_request_is_not_reported(
    comm: Communicator, told: pytest.LogCaptureFixture
) -> None:
    comm.begin_all_reduce(np.ones(3)).wait()
    gc.collect()
    assert not told.records


@pytest.mark.ranks(2, 3, 4)
def test_a_timeout_names_who_has_not_arrived(comm: Communicator) -> None:
    late = comm.size - 1
    if comm.rank != late:
        start = time.monotonic()
        request = comm.begin_all_reduce(np.ones(3))
        with pytest.raises(CollectiveTimeout) as info:
            request.wait(timeout_s=0.3)
        assert time.monotonic() - start < 5
        assert f"rank {late}" in str(info.value) or f"ranks {late}" in str(info.value)
        comm.send(np.ones(1), late, tag=1)
        assert request.wait().tolist() == [comm.size] * 3
    else:
        for rank in range(late):
            comm.recv(np.empty(1), rank, tag=1)
        assert comm.all_reduce(np.ones(3)).tolist() == [comm.size] * 3


@pytest.mark.ranks(2, 3)
def test_a_receive_that_timed_out_may_still_be_waited_for(comm: Communicator) -> None:
    if comm.rank == 0:
        request = comm.begin_recv(np.empty(1), 1, tag=2)
        with pytest.raises(CollectiveTimeout, match=r"recv .* from rank 1 tag 2"):
            request.wait(timeout_s=0.2)
        comm.send(np.zeros(1), 1, tag=3)
        assert request.wait().tolist() == [5.0]
    elif comm.rank == 1:
        comm.recv(np.empty(1), 0, tag=3)
        comm.send(np.full(1, 5.0), 0, tag=2)
    comm.barrier()


@pytest.mark.parametrize("mode", MODES)
def test_exchanges_never_lean_on_buffers(comm: Communicator, mode: str) -> None:
    """Every rank sends first: hangs with raw blocking sends above the eager limit."""
    with in_mode(comm, mode) as group:
        after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
        for n_bytes in (8, 4000, 8192, 20_000 if "64" in mode else 200_000):
            sent = group.begin_send(np.full(n_bytes, group.rank, np.uint8), after)
            got = group.recv(np.empty(n_bytes, np.uint8), before)
            assert (got == before).all()
            sent.wait()


@pytest.mark.ranks(2, 3, 4)
def test_pending_calls_of_two_groups_go_on_whichever_is_waited_for(comm: Communicator) -> None:
    """On several nodes each of them takes steps, which no other rank may have to wait for."""
    first, second = (comm.split(0, purpose=name) for name in ("first", "second"))
    assert first is not None
    assert second is not None
    for size in (3, 30_000):
        calls = [(g, g.begin_all_reduce(np.full(size, 1.0 + i)))
                 for i in range(3) for g in (first, second)]  # fmt: skip
        order = calls if comm.rank % 2 else calls[::-1]
        got = {id(request): request.wait()[0] for _, request in order}
        assert [got[id(request)] for _, request in calls] == [
            comm.size * (1.0 + i) for i in range(3) for _ in range(2)
        ]
    first.close()
    second.close()
