"""Random calls by the thousand end with what they began with; a planted leak is caught."""

import gc
import os
import random
from typing import Any

import numpy as np
import pytest

from mpipar.comm import Communicator, ReduceOp, ThreadWorld

SHORT, FULL = 2_000, 100_000
FORMS = ("plain", "arena", "shared", "begin", "prepared", "views", "channel", "split", "moves")


def held(comm: Communicator) -> dict[str, int]:
    """What a leak would raise."""
    gc.collect()
    arena = comm.host.arena  # type: ignore[attr-defined]
    groups = getattr(comm, "inner", None)
    live = getattr(getattr(groups, "_groups", None), "live", {})
    return {
        "segments": arena.n_segments,
        "blocks": arena.n_blocks,
        "communicators": len(live),
        "requests": len(comm.host.pending),  # type: ignore[attr-defined]
        "files": len(os.listdir("/proc/self/fd")),
    }


def one_call(comm: Communicator, rng: random.Random, turn: int) -> None:
    """One random call, the same on every rank, checked against NumPy."""
    n, size = comm.size, rng.choice([1, 3, 100, 5000, 20_000])
    form, value = rng.choice(FORMS), turn % 7 + 1
    x: Any = np.full(size, value * (comm.rank + 1), np.float32)
    want = value * n * (n + 1) / 2
    if form == "plain":
        algorithm = rng.choice(["", "flags", "stage", "copy", "mpi"])
        comm.force(algorithm)  # type: ignore[attr-defined]
        assert (comm.all_reduce(x, out=x if turn % 2 else None) == want).all()
        comm.force("")  # type: ignore[attr-defined]
    elif form == "arena":
        mine = comm.empty(size)
        mine[...] = x
        assert (comm.all_reduce(mine, out=mine) == want).all()
        comm.free(mine)
    elif form == "shared":
        out = comm.empty_shared(size)
        assert (comm.all_reduce(x, out=out) == want).all()
        comm.free(out)
    elif form == "begin":
        requests = [comm.begin_all_reduce(x) for _ in range(rng.randint(1, 4))]
        for request in rng.sample(requests, len(requests)):
            assert (request.wait() == want).all()
    elif form == "prepared":
        out = np.empty_like(x)
        call = comm.prepare("all_reduce", x, out=out)  # type: ignore[arg-type]
        for _ in range(2):
            assert (call() == want).all()
    elif form == "views":
        for rank, view in enumerate(comm.views(x)):
            assert (view == value * (rank + 1)).all()
    elif form == "channel" and n > 1:
        if comm.rank == 0:
            sender = comm.channel_to(1, size, n_slots=1)
            sender.send(x)
            sender.close()
        elif comm.rank == 1:
            receiver = comm.channel_from(0, size, n_slots=1)
            assert (receiver.recv(np.empty_like(x)) == value).all()
            receiver.close()
    elif form == "split":
        group = comm.split(comm.rank % 2, purpose=f"soak {turn % 3}")
        assert group is not None
        assert (group.all_reduce(np.ones(9), ReduceOp.MAX) == 1).all()
        group.close()
    else:
        assert comm.all_gather(x)[0] == value
        root = turn % n
        assert (comm.broadcast(x, root) == value * (root + 1)).all()


def soak(comm: Communicator, n_calls: int, leak: bool = False) -> dict[str, int]:
    """How much more is held after `n_calls` calls than after the first tenth of them."""
    rng = random.Random(5)
    before: dict[str, int] = {}
    for turn in range(n_calls):
        if turn == n_calls // 10:
            before = held(comm)
        one_call(comm, rng, turn)
        if leak and turn == n_calls // 2:
            comm.empty(10)
    after = held(comm)
    return {name: after[name] - before[name] for name in after if after[name] != before[name]}


@pytest.mark.parametrize(
    ("n", "n_calls"), [(2, SHORT), (3, SHORT // 4), pytest.param(2, FULL, marks=pytest.mark.slow)]
)
def test_nothing_is_left_behind(n: int, n_calls: int) -> None:
    assert ThreadWorld(n, node_size=n, deadline_s=3600).run(soak, n_calls) == [{}] * n


def test_a_planted_leak_is_caught() -> None:
    assert ThreadWorld(2, node_size=2).run(soak, 60, True) == [{"blocks": 1}] * 2
