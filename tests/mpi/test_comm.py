"""What only real ranks can show: the way in and out, traffic apart, threads, deadlines."""

import os
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpipar.comm import Communicator, init, wrap
from mpipar.comm.mpi.groups import Settings
from mpipar.comm.world import give_up_groups, group_marks
from mpipar.errors import CollectiveMismatch, CollectiveTimeout, LaunchError, RankFailed
from tests.comm.cases import in_mode, uniform_case

WORLD = MPI.COMM_WORLD


@pytest.fixture
def group() -> Iterator[Any]:
    """A group of all ranks over MPI itself, checked, that a test may break."""
    made = init().split(0, purpose=f"test {os.environ.get('PYTEST_CURRENT_TEST', '')[:60]}")
    assert made is not None
    transport: Any = getattr(made, "inner", made)
    yield transport
    if WORLD.allreduce(transport.shared.broken is not None, MPI.LOR):
        names = [n for n in group_marks() if n.startswith(transport.shared.purpose)]
        give_up_groups(names, "a test broke it")
    else:
        made.close()


def test_init_gives_one_communicator_of_all_ranks() -> None:
    comm = init()
    assert comm is init()
    assert (comm.rank, comm.size) == (WORLD.rank, WORLD.size)
    pids = comm.all_gather(os.getpid())
    assert len(set(pids.tolist())) == comm.size


# -- the way in and out ------------------------------------------------------------------------


def test_wrap_and_back() -> None:
    theirs = WORLD.Split(0, -WORLD.rank)
    with wrap(theirs) as ours:
        assert (ours.rank, ours.size) == (theirs.rank, theirs.size)
        assert ours.all_gather(WORLD.rank).tolist() == list(reversed(range(WORLD.size)))
        out: Any = ours.mpi  # type: ignore[attr-defined]
        assert isinstance(out, MPI.Intracomm)
        assert MPI.Comm.Compare(out, theirs) == MPI.CONGRUENT
        again = wrap(out)
        assert again.all_reduce(1) == WORLD.size
        again.close()
    theirs.Free()


@pytest.mark.parametrize("what", [None, 3, MPI.COMM_NULL])
def test_what_is_no_communicator_is_not_wrapped(what: Any) -> None:
    with pytest.raises(LaunchError, match="wrap needs an mpi4py intracommunicator"):
        wrap(what)


@pytest.mark.mpi(min_size=2)
def test_our_traffic_and_theirs_never_meet() -> None:
    theirs = WORLD.Dup()
    n, rank = theirs.size, theirs.rank
    after, before = (rank + 1) % n, (rank - 1) % n
    with wrap(theirs) as ours:
        for tag in (0, 1, 77):
            mine = theirs.Isend(np.full(4, 100 + rank), after, tag)
            sent = ours.begin_send(np.full(4, rank), after, tag)
            assert ours.recv(np.empty(4, int), before, tag).tolist() == [before] * 4
            into = np.empty(4, int)
            theirs.Recv(into, before, tag)
            assert into.tolist() == [100 + before] * 4
            sent.wait()
            mine.Wait()
        begun = ours.begin_all_reduce(np.ones(3))
        total = np.empty(3)
        theirs.Allreduce(np.full(3, 2.0), total)
        assert total.tolist() == [2.0 * n] * 3
        assert begun.wait().tolist() == [n] * 3
        assert not theirs.Iprobe()
    theirs.Free()


# -- what is refused ---------------------------------------------------------------------------


@pytest.mark.mpi(min_size=2)
def test_a_split_called_by_some_ranks_only_names_the_missing(group: Any) -> None:
    last = group.size - 1
    group.deadline_s = 0.5
    if group.rank != last:
        with pytest.raises(CollectiveTimeout, match="not arrived") as info:
            group.split(0)
        assert f"{last}" in str(info.value).rpartition("not arrived: ranks ")[2]
        with pytest.raises(RankFailed, match="unusable"):
            group.all_reduce(1)
    WORLD.Barrier()


@pytest.mark.mpi(min_size=2)
def test_a_group_closed_by_some_ranks_only_is_told_at_the_next_split() -> None:
    comm = init()
    purpose = "closed by some"
    first = comm.split(0, purpose=purpose)
    assert first is not None
    transport: Any = getattr(first, "inner", first)
    if comm.rank == 0:
        transport.close()
    with pytest.raises(CollectiveMismatch, match="have closed the group"):
        comm.split(0, purpose=purpose)
    if comm.rank != 0:
        transport.close()
    assert comm.all_reduce(1) == comm.size


def test_two_threads_in_one_communicator_are_refused(group: Any) -> None:
    """The second one is told; the first one's call is not touched."""
    entered, leave = threading.Event(), threading.Event()
    program = group.engine.program

    def slowly(call: Any) -> Any:
        entered.set()
        leave.wait(10)
        return program(call)

    results: list[Any] = []
    group.engine.program = slowly
    thread = threading.Thread(target=lambda: results.append(group.all_reduce(np.full(3, 2.0))))
    thread.start()
    assert entered.wait(10)
    with pytest.raises(RankFailed, match=r"two threads call .* at the same time"):
        group.all_reduce(np.ones(3))
    leave.set()
    thread.join(20)
    group.engine.program = program
    assert results[0].tolist() == [2.0 * group.size] * 3
    assert group.all_reduce(1) == group.size


def test_threads_with_groups_of_their_own_are_safe() -> None:
    comm = init()
    groups = [comm.split(0, purpose=f"thread {k}") for k in range(2)]
    wrong: list[str] = []

    def work(k: int, mine: Communicator) -> None:
        for turn in range(30):
            got = mine.all_reduce(np.full(50, 10.0 * k + turn))
            if (got != mine.size * (10.0 * k + turn)).any():
                wrong.append(f"thread {k} turn {turn}: {got[0]}")

    threads = [threading.Thread(target=work, args=(k, g)) for k, g in enumerate(groups)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert not any(thread.is_alive() for thread in threads)
    for group in groups:
        assert group is not None
        group.close()


@pytest.mark.mpi(min_size=2)
def test_the_unchecked_mode_tells_another_size_where_the_mpi_does() -> None:
    """Unchecked is as in MPI; a message that is too long is still no silent cut."""
    with in_mode(init(), "unchecked") as comm:
        after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        for n in (4, 2):
            sent = comm.begin_send(np.ones(n), after)
            with pytest.raises(CollectiveMismatch, match="expects 24 bytes"):
                comm.recv(np.empty(3), before)
            sent.wait()


# -- settings ----------------------------------------------------------------------------------


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.startswith("MPIPAR_")]:
        monkeypatch.delenv(name)
    assert Settings.from_environment() == Settings()
    monkeypatch.setenv("MPIPAR_CHECK", "1")
    monkeypatch.setenv("MPIPAR_DEADLINE_S", "7.5")
    monkeypatch.setenv("MPIPAR_MAX_MESSAGE_BYTES", "64")
    monkeypatch.setenv("MPIPAR_SYNC_SENDS", "1")
    monkeypatch.setenv("MPIPAR_MAX_COMMUNICATORS", "9")
    assert Settings.from_environment() == Settings(True, 7.5, 64, True, 9)


def test_small_messages_really_are_small() -> None:
    """The planted fault of the chunked modes: the engine must see the limit."""
    with in_mode(init(), "64-byte messages") as comm:
        engine: Any = comm.engine  # type: ignore[attr-defined]
        assert [p.nbytes for p in engine.pieces(np.zeros(20))] == [64, 64, 32]
        assert [p.nbytes for p in engine.pieces(np.zeros(0))] == [0]
        case = uniform_case("all_reduce", comm.size, (40, 41), "f8")
        assert case.input(0).nbytes > 100 * engine.max_bytes
