"""Groups: split, close, their count, and what happens to the unwary."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpipar.comm import Communicator
from mpipar.errors import CollectiveMismatch, CountOutOfRange, RankFailed
from tests.comm.cases import MODES, in_mode

pytestmark = pytest.mark.ranks(1, 2, 3, 4)


def made(group: Communicator | None) -> Communicator:
    assert group is not None
    return group


def real(comm: Communicator) -> Any:
    """The MPI transport of a group; skips on threads."""
    inner = getattr(comm, "inner", comm)
    if not hasattr(inner, "engine"):
        pytest.skip("threads have no MPI communicators")
    return inner


def test_colors_make_groups_and_keys_order_them(comm: Communicator) -> None:
    color = comm.rank % 2
    with made(comm.split(color, key=-comm.rank)) as group:
        members = [r for r in reversed(range(comm.size)) if r % 2 == color]
        assert group.size == len(members)
        assert group.rank == members.index(comm.rank)
        assert group.all_gather(comm.rank).tolist() == members


def test_equal_keys_keep_the_order(comm: Communicator) -> None:
    with made(comm.split(0)) as group:
        assert (group.rank, group.size) == (comm.rank, comm.size)


def test_none_joins_no_group(comm: Communicator) -> None:
    group = comm.split(0 if comm.rank == 0 else None)
    assert (group is None) == (comm.rank != 0)
    if group is not None:
        assert group.all_reduce(3) == 3
        group.close()
    assert comm.all_reduce(1) == comm.size


def test_groups_of_groups(comm: Communicator) -> None:
    with made(comm.split(comm.rank // 2)) as pair, made(pair.split(pair.rank)) as single:
        assert single.size == 1
        assert single.all_reduce(comm.rank) == comm.rank
        assert pair.all_reduce(1) == pair.size


def test_groups_do_not_mix_their_calls(comm: Communicator) -> None:
    with made(comm.split(0, purpose="a")) as a, made(comm.split(0, purpose="b")) as b:
        first = a.begin_all_reduce(np.full(3, 1.0))
        second = b.begin_all_reduce(np.full(3, 10.0))
        if comm.rank % 2:
            got = [second.wait(), first.wait()][::-1]
        else:
            got = [first.wait(), second.wait()]
        assert [g[0] for g in got] == [comm.size, 10 * comm.size]
        after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        sent = [a.begin_send(np.array([1]), after), b.begin_send(np.array([2]), after)]
        assert b.recv(np.empty(1, int), before) == 2
        assert a.recv(np.empty(1, int), before) == 1
        for request in sent:
            request.wait()


def test_closing_twice_does_nothing_and_a_closed_group_refuses(comm: Communicator) -> None:
    group = made(comm.split(0, purpose="closed"))
    group.close()
    group.close()
    real(group)
    with pytest.raises(RankFailed, match="is closed"):
        group.all_reduce(1)


@pytest.mark.parametrize("mode", MODES)
def test_calls_under_way_outlive_the_close(comm: Communicator, mode: str) -> None:
    """Two steps on a communicator that was freed meanwhile: a crash in Open MPI."""
    group = in_mode(comm, mode)
    request = group.begin_all_reduce(np.full(3000, comm.rank), deterministic=True)
    message = group.begin_recv(np.empty(3), 0, tag=1) if comm.rank == 1 else None
    if comm.rank == 0 and comm.size > 1:
        group.send(np.ones(3), 1, tag=1)
    group.close()
    assert (request.wait() == sum(range(comm.size))).all()
    assert message is None or message.wait().tolist() == [1.0] * 3


@pytest.mark.ranks(2, 3, 4)
def test_purposes_must_agree_within_a_color(comm: Communicator) -> None:
    with pytest.raises(CollectiveMismatch, match="has the purposes"):
        comm.split(0, purpose="a" if comm.rank == 0 else "b")
    assert comm.all_reduce(1) == comm.size


def test_a_group_of_one_rank_set_and_purpose_is_shared(comm: Communicator) -> None:
    first, second = made(comm.split(0, purpose="same")), made(comm.split(0, purpose="same"))
    other = made(comm.split(0, purpose="other"))
    if hasattr(first, "mpi"):
        assert first.mpi == second.mpi
        assert first.mpi != other.mpi
    first.close()
    assert second.all_reduce(1) == comm.size
    second.close()
    other.close()


# -- no growth ----------------------------------------------------------------------------------


def mesh(comm: Communicator, rows: int) -> Iterator[Communicator]:
    """The groups of a mesh of two axes."""
    yield made(comm.split(comm.rank // rows, purpose="mesh rows"))
    yield made(comm.split(comm.rank % rows, purpose="mesh columns"))


def census(comm: Communicator) -> tuple[int, int]:
    """Open communicators and file descriptors of this process."""
    n_open = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    return len(real(comm)._groups.live), n_open


def soak(comm: Communicator, n_meshes: int) -> None:
    for k in range(n_meshes):
        groups = list(mesh(comm, 1 + k % 2))
        if k % 50 == 0:
            assert groups[0].all_reduce(1) == groups[0].size
        for group in groups:
            group.close()


@pytest.mark.deadline(120)
def test_meshes_made_and_closed_leave_nothing(comm: Communicator) -> None:
    soak(comm, 5)
    before = census(comm)
    soak(comm, 300)
    assert census(comm) == before
    assert comm.all_reduce(1) == comm.size


@pytest.mark.slow
@pytest.mark.deadline(600)
@pytest.mark.ranks(2, 4)
def test_five_thousand_meshes_leave_nothing(comm: Communicator) -> None:
    soak(comm, 5)
    before = census(comm)
    soak(comm, 5000)
    assert census(comm) == before


def test_the_census_sees_a_group_and_a_file_left_open(comm: Communicator) -> None:
    """The planted fault of the two tests above."""
    before = census(comm)
    group = made(comm.split(0, purpose="left open"))
    with open(os.devnull) as file:
        after = census(comm)
        assert after[0] == before[0] + 1
        assert after[1] >= before[1] + 1
        assert file.fileno() > 0
    group.close()
    assert census(comm) == before


def test_the_budget_is_a_clear_error_on_every_rank(comm: Communicator) -> None:
    settings = real(comm)._groups.settings
    allowed = settings.max_communicators
    settings.max_communicators = len(real(comm)._groups.live) + 3
    groups = []
    try:
        groups += [made(comm.split(0, purpose=f"budget {k}")) for k in range(3)]
        with pytest.raises(CountOutOfRange, match="MPIPAR_MAX_COMMUNICATORS"):
            comm.split(0, purpose="budget 3")
        groups.pop().close()
        groups.append(made(comm.split(0, purpose="budget again")))
    finally:
        settings.max_communicators = allowed
        for group in groups:
            group.close()
    assert comm.all_reduce(1) == comm.size
