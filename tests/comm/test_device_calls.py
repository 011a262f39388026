"""The contract on device arrays, in every way; by doubles of device, stream and NCCL."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from mpipar.comm import Communicator, ReduceOp
from mpipar.comm.mpi.probe import ITEMS
from mpipar.comm.traced import TracedCommunicator, Tracer
from mpipar.errors import LayoutError, UnsupportedArray
from tests.comm.cases import VERBS, Case, random_case, run_case, uniform_case
from tests.comm.device_double import DoubleArray, DoubleDevice, OnDevice, landed, late, stream

pytestmark = pytest.mark.ranks(1, 2, 3)
WAYS = ("staged", "nccl", "direct")
LAYOUTS = ("C", "F", "strided", "negative", "transposed")


def group_of(comm: Communicator, way: str) -> OnDevice:
    group = comm.split(0, purpose=f"device {way}")
    assert group is not None
    engine = group.devices._engine()
    if way == "direct":
        if engine is None:
            pytest.skip("no MPI is under these ranks")
        group.devices._discover = lambda device: None  # type: ignore[method-assign]
        group.devices.capable = frozenset(ITEMS)
        group.devices._is_agreed = True
        group.devices.forced = way
    return OnDevice(group, way)


def on_device(case: Case) -> Case:
    fix = lambda given: tuple(x if x in (None, *LAYOUTS) else "C" for x in given)  # noqa: E731
    return Case(**{**vars(case), "in_layouts": fix(case.in_layouts),
                   "out_layouts": fix(case.out_layouts)})  # fmt: skip


def fits(case: Case, way: str) -> bool:
    begun = case.verb == "send" and way == "nccl"  # begun messages are another test
    return not begun and (case.dtype.kind in "biufc" and case.dtype.name != "float8_e5m2")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("verb", VERBS)
def test_random_calls_equal_numpy(comm: Communicator, verb: str, way: str) -> None:
    group, rng = group_of(comm, way), random.Random(f"{verb} {way}")
    for _ in range(25):
        case = on_device(random_case(rng, comm.size, verb))
        if fits(case, way):
            run_case(group, case)  # type: ignore[arg-type]


@pytest.mark.parametrize("verb", VERBS)
def test_chunks_overlap_and_add_up(comm: Communicator, verb: str) -> None:
    group = group_of(comm, "staged")
    group.inner.devices.stage.chunk = 600
    for dtype in ("f4", "f8"):
        for shape in ((6 * comm.size, 40), (1201,)):
            run_case(group, uniform_case(verb, comm.size, shape, dtype))  # type: ignore[arg-type]
    if verb == "all_reduce":
        log = "".join(word[0] for word in stream().log)
        assert "rrw" in log  # the next chunk is read before this one is written


@pytest.mark.parametrize("way", WAYS)
def test_the_way_that_is_asked_for_is_taken_and_copies_are_counted(
    comm: Communicator, way: str
) -> None:
    group = group_of(comm, way)
    stats = group.inner.devices.stats
    x = np.arange(1000.0) + comm.rank
    got = group.all_reduce(x)
    assert (got == comm.size * np.arange(1000.0) + sum(range(comm.size))).all()
    assert stats.calls == {w: int(w == way) for w in WAYS}
    copied = 8000 if way == "staged" else 0
    assert (stats.to_host_bytes, stats.to_device_bytes) == (copied, copied)


def test_what_nccl_would_do_differently_goes_through_the_host(comm: Communicator) -> None:
    group = group_of(comm, "nccl")
    for words in ({"op": ReduceOp.MAX}, {"deterministic": True}):
        group.all_reduce(np.ones(4), **words)
    group.all_reduce(np.ones(4, np.float16))
    assert group.inner.devices.stats.calls == {"nccl": 0, "direct": 0, "staged": 3}


@pytest.mark.parametrize("way", WAYS)
def test_in_place_and_overlapping_arrays(comm: Communicator, way: str) -> None:
    group = group_of(comm, way).inner
    x = late(np.arange(8.0))
    got = group.all_reduce(x, out=x)
    assert got is x
    assert (landed(x) == comm.size * np.arange(8.0)).all()
    whole = late(np.arange(9.0))
    group.all_reduce(whole[:8], out=whole[1:])
    assert (landed(whole) == [0, *comm.size * np.arange(8.0)]).all()


def test_a_host_array_beside_a_device_array_is_refused(comm: Communicator) -> None:
    group = group_of(comm, "staged").inner
    with pytest.raises(UnsupportedArray, match="on one side"):
        group.all_reduce(late(np.ones(3)), out=np.ones(3))
    with pytest.raises(UnsupportedArray, match="NumPy array"):
        group.all_reduce(np.ones(3), out=DoubleArray(np.ones(3)))
    with pytest.raises(UnsupportedArray, match="prepare needs"):
        group.prepare("all_reduce", late(np.ones(3)))
    with pytest.raises(LayoutError, match="out has shape"):
        group.all_reduce(late(np.ones(3)), out=DoubleArray(np.ones(4)))


def test_messages_by_nccl_when_all_have_agreed(comm: Communicator) -> None:
    group = group_of(comm, "nccl").inner
    if comm.size == 1:
        return
    x, got = late(np.full(5, comm.rank + 1.0)), DoubleArray(np.zeros(5))
    if comm.rank == 0:
        group.send(x, 1)
    elif comm.rank == 1:
        group.recv(got, 0)
        assert (landed(got) == 1.0).all()
    landed(x)
    taken = group.devices.stats.calls["nccl"]
    assert taken == int(comm.rank < 2)


def test_messages_go_through_the_host_before_all_have_agreed(comm: Communicator) -> None:
    group: Any = comm.split(0, purpose="not agreed")
    request = group.begin_send(late(np.full(3, 7.0)), comm.rank)
    got = DoubleArray(np.zeros(3))
    group.recv(got, comm.rank)
    request.wait()
    assert (landed(got) == 7.0).all()
    assert group.devices.stats.calls == {"nccl": 0, "direct": 0, "staged": 2}


@pytest.mark.parametrize("way", ["staged", "nccl"])
def test_a_record_says_which_way_a_call_went(comm: Communicator, way: str) -> None:
    tracer = Tracer(comm.rank)
    group = TracedCommunicator(group_of(comm, way).inner, tracer)
    landed(group.all_reduce(late(np.ones(6))))
    request = group.begin_broadcast(late(np.ones(6)), 0)
    landed(request.wait())
    assert [(r["op"], r["algorithm"], r["bytes"]) for r in tracer.records] == [
        ("all_reduce", way, 48),
        ("broadcast", way, 48),
    ]


def test_a_closed_group_gives_nccl_back(comm: Communicator) -> None:
    group = group_of(comm, "nccl").inner
    made = group.devices.nccl
    group.close()
    assert not made.open
    assert group.devices.ways() == ("staged",)


def test_an_unknown_way_is_refused(comm: Communicator) -> None:
    group: Any = comm.split(0, purpose="unknown way")
    with pytest.raises(UnsupportedArray, match="nccl, direct, staged would do"):
        group.devices.agree(DoubleDevice(), "fast")


def test_ranks_that_share_a_device_have_no_nccl(comm: Communicator) -> None:
    group: Any = comm.split(0, purpose="one device")
    shared = DoubleDevice()
    shared.names = lambda: ("double", "the only one")  # type: ignore[method-assign]
    if comm.size == 1:
        return
    group.devices.capable = frozenset()
    group.devices._engine = lambda: None
    with pytest.raises(UnsupportedArray, match="a device of its own"):
        group.devices.agree(shared, "nccl")


def test_the_double_finds_a_read_before_the_stream_got_there(comm: Communicator) -> None:
    group = group_of(comm, "staged").inner
    device = DoubleDevice()
    group.devices.stage._read = lambda _, x, host, __=None: _unwaited(device.begin_read(x, host))  # type: ignore
    got = group.all_reduce(late(np.ones(64)))
    assert not (landed(got) == comm.size).all()


def _unwaited(event: Any) -> Any:
    event.synchronize = lambda: None
    return event
