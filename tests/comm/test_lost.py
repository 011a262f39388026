"""Waits of any kind end when a rank of the node was killed."""

import time
from collections.abc import Iterator

import pytest

from mpipar.comm import request as module
from mpipar.comm.call import Call, Op
from mpipar.comm.request import Request, set_lost
from mpipar.errors import RankFailed


@pytest.fixture(autouse=True)
def nobody_lost() -> Iterator[None]:
    yield
    set_lost(str)


def test_a_wait_for_a_lost_rank_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_GRACE_S", 0.05)
    set_lost(lambda: "rank 3 was killed")
    start = time.monotonic()
    with pytest.raises(RankFailed, match=r"barrier .*will not end: rank 3 was killed"):
        Request(Call(Op.BARRIER), lambda: False).wait()
    assert 0.05 <= time.monotonic() - start < 5


def test_a_call_that_ends_in_time_is_not_disturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_GRACE_S", 30)
    set_lost(lambda: "rank 3 was killed")
    end = time.monotonic() + 0.05
    Request(Call(Op.BARRIER), lambda: time.monotonic() > end).wait()
