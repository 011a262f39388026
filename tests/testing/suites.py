"""Wrong suites that the plugin must report, and the right one beside them."""

WRONG = """
import os, sys, time
import numpy as np, pytest
import mpipar

def test_good(comm):
    assert comm.all_reduce(comm.rank) == sum(range(comm.size))

def test_fails_before_a_barrier(comm):
    if comm.rank == 1:
        assert comm.rank == 7, "a mistake of rank 1"
    comm.barrier()

def test_fails_while_a_peer_receives(comm):
    if comm.rank == 1:
        raise KeyError("nothing to send")
    if comm.rank == 0:
        comm.recv(np.empty(3), 1)

def test_raises_expected_on_one_rank_only(comm):
    if comm.rank == 0:
        with pytest.raises(ValueError):
            comm.all_reduce(np.zeros(3))
    else:
        comm.all_reduce(np.zeros(3))

def test_raises_seen_on_one_rank_only(comm):
    if comm.rank == 1:
        with pytest.raises(ValueError):
            comm.all_reduce(np.zeros(4))
    else:
        comm.all_reduce(np.zeros(3))

def test_exits_on_one_rank(comm):
    if comm.rank == 1:
        sys.exit(0)
    comm.barrier()

def test_skips_on_one_rank(comm):
    if comm.rank == 1:
        pytest.skip("no mood")

def test_every_rank_fails_in_its_own_way(comm):
    comm.barrier()
    raise RuntimeError(f"own mistake {comm.rank}")

def test_skips_everywhere(comm):
    comm.barrier()
    pytest.skip("no need")

@pytest.mark.xfail(reason="known")
def test_fails_as_expected_on_one_rank(comm):
    if comm.rank == 1:
        raise RuntimeError
    comm.barrier()

@pytest.mark.ranks(1, 2, 3)
def test_counts(comm):
    assert comm.size <= 3

@pytest.mark.ranks(9)
def test_nine_ranks(comm):
    assert comm.size == 9

@pytest.mark.mpi(min_size=2)
def test_for_pytest_mpi():
    pass

def test_good_again(comm):
    group = comm.split(0, purpose="again")
    assert group.all_gather(np.array([comm.rank])).tolist() == list(range(comm.size))
    group.close()
"""

HANG = """
import time
import pytest

def test_fails_first(comm):
    assert comm.rank != 1, "an earlier failure"

@pytest.mark.deadline(1.5)
def test_hangs(comm):
    if comm.rank == 1:
        time.sleep(100)
    comm.barrier()
"""

SETS = """
import pytest

@pytest.mark.parametrize("name", {"a", "b", "c", "d", "e", "f", "g"})
def test_of_a_set(comm, name):
    comm.barrier()
"""

ON_RANKS = """
import pytest
import mpipar

def test_the_world_is_left_in_different_places():
    world = mpipar.init()
    if world.rank == 1:
        raise KeyError("before the barrier of the world")
    world.barrier()

def test_the_world_works_again():
    world = mpipar.init()
    assert world.all_reduce(1) == world.size

def test_a_fixture_that_fails_on_one_rank(comm, half):
    comm.barrier()

@pytest.fixture
def half(comm):
    if comm.rank == 0:
        raise OSError("no such file on rank 0")

def test_leaves_a_request(comm):
    comm.begin_recv(__import__("numpy").empty(1), 0, tag=3)

def test_prints(comm):
    print("said by rank", comm.rank)
    assert comm.rank != 1

@pytest.fixture
def clumsy():
    yield
    if mpipar.init().rank == 1:
        raise OSError("in a teardown")

def test_teardown_fails_on_one_rank(comm, clumsy):
    comm.barrier()

def test_good(comm):
    assert comm.all_reduce(1) == comm.size
"""
