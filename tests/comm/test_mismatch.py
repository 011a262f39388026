"""Wrong and mismatched calls: one exception on every rank, and the communicator works on."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mpipar.comm import Communicator, ReduceOp
from mpipar.errors import (
    CollectiveMismatch,
    CountOutOfRange,
    EmptyInput,
    LayoutError,
    ParallelismError,
    UnsupportedArray,
)

pytestmark = pytest.mark.ranks(2, 3, 4)
Calls = Callable[[Communicator], Any]


def last(comm: Communicator) -> bool:
    """The rank that makes the mistake."""
    return comm.rank == comm.size - 1


def told_everywhere(comm: Communicator, call: Calls, kind: type[Exception], *says: str) -> str:
    """Every rank raises the same error, and the next calls are right."""
    with pytest.raises(kind) as info:
        call(comm)
    message = str(info.value)
    for word in says:
        assert word in message
    messages = comm.all_gather_json([type(info.value).__name__, message])
    assert len({tuple(m) for m in messages}) == 1, messages
    assert comm.all_reduce(np.ones(3)).tolist() == [comm.size] * 3
    assert comm.all_gather(comm.rank).tolist() == list(range(comm.size))
    return message


MISMATCHES: dict[str, tuple[Calls, list[str]]] = {
    "dtype": (
        lambda c: c.all_reduce(np.zeros(4, np.float32 if last(c) else np.float64)),
        ["float32", "float64"],
    ),
    "shape of equal size": (
        lambda c: c.all_reduce(np.zeros((2, 3) if last(c) else (3, 2))),
        ["(2, 3)", "(3, 2)"],
    ),
    "size": (lambda c: c.all_reduce(np.zeros(5 + last(c))), ["(5,)", "(6,)"]),
    "operation": (
        lambda c: c.all_reduce(1.0, ReduceOp.MAX if last(c) else ReduceOp.SUM),
        ["max", "sum"],
    ),
    "verb": (
        lambda c: c.barrier() if last(c) else c.all_reduce(1),
        ["barrier", "all_reduce"],
    ),
    "root": (lambda c: c.broadcast(1.0, root=int(last(c))), ["root 0", "root 1"]),
    "dim": (
        lambda c: c.reduce_scatter(np.zeros((4, 4)), dim=int(last(c))),
        ["dim 0", "dim 1"],
    ),
    "order of calls": (
        lambda c: (
            [c.all_reduce(np.zeros(2)), c.all_gather(np.zeros(2))]
            if last(c)
            else [c.all_gather(np.zeros(2)), c.all_reduce(np.zeros(2))]
        ),
        ["all_reduce", "all_gather"],
    ),
    "rows of all_gather": (
        lambda c: c.all_gather(np.zeros((2, 3 + last(c)))),
        ["(*, 3) dim 0", "(*, 4) dim 0"],
    ),
    "extent of all_gather": (
        lambda c: c.all_gather(np.zeros(2 + last(c))),
        ["counts"],
    ),
    "deterministic": (
        lambda c: c.all_reduce(1.0, deterministic=last(c)),
        ["deterministic"],
    ),
}


@pytest.mark.parametrize("what", MISMATCHES)
def test_calls_that_differ(comm: Communicator, what: str) -> None:
    call, says = MISMATCHES[what]
    message = told_everywhere(comm, call, CollectiveMismatch, "ranks made different calls", *says)
    assert f"rank {comm.size - 1}: " in message


MISTAKES: dict[str, tuple[Calls, type[Exception], list[str]]] = {
    "a bad root": (
        lambda c: c.broadcast(1, root=c.size if last(c) else 0),
        CountOutOfRange,
        ["root"],
    ),
    "a bad root everywhere": (
        lambda c: c.gather(1, root=-1),
        CountOutOfRange,
        ["root must be in range 0..", "got -1"],
    ),
    "a root that is no whole number": (
        lambda c: c.broadcast(1, root=1.0 if last(c) else 0),  # type: ignore[arg-type]
        UnsupportedArray,
        ["root=1.0 is no whole number; 0..", "would do"],
    ),
    "a root that is a truth": (
        lambda c: c.broadcast(1, root=True),
        UnsupportedArray,
        ["root=True is no whole number"],
    ),
    "a mask": (
        lambda c: c.all_reduce(np.ma.masked_equal([1, 2], 2) if last(c) else np.ones(2, int)),
        UnsupportedArray,
        ["masked array", "filled"],
    ),
    "a wrong dim": (
        lambda c: c.all_gather(np.zeros((2, 2)), dim=2 if last(c) else 0),
        CountOutOfRange,
        ["dim", "shape (2, 2)"],
    ),
    "counts that do not sum": (
        lambda c: c.reduce_scatter(np.zeros(8), counts=[1] * c.size),
        LayoutError,
        ["sum to 8", "would do"],
    ),
    "counts on one rank": (
        lambda c: c.scatter(np.zeros(3), counts=[9] * c.size),
        LayoutError,
        ["sum to 3"],
    ),
    "nothing at the root": (
        lambda c: c.scatter(None if c.rank == 0 else np.zeros(3)),
        EmptyInput,
        ["rank 0 is the root and gave no array"],
    ),
    "a root that only some know": (
        lambda c: c.scatter(np.zeros(4), root=c.size if last(c) else 0),
        ParallelismError,
        ["root"],
    ),
    "an object": (
        lambda c: c.all_reduce(np.array([object()]) if last(c) else np.array([1.0])),
        UnsupportedArray,
        ["Python objects"],
    ),
    "out of another shape": (
        lambda c: c.all_reduce(np.zeros(3), out=np.zeros(4) if last(c) else None),
        LayoutError,
        ["(4,)", "(3,)"],
    ),
    "out of another type": (
        lambda c: c.broadcast(np.zeros(3), out=np.zeros(3, "f4") if last(c) else None),
        LayoutError,
        ["float32", "float64"],
    ),
    "a read-only out": (
        lambda c: c.all_reduce(np.zeros(2), out=np.broadcast_to(0.0, 2) if last(c) else None),
        UnsupportedArray,
        ["read-only"],
    ),
    "an unknown operation": (
        lambda c: c.all_reduce(1.0, "median"),  # type: ignore[arg-type]
        UnsupportedArray,
        ["median"],
    ),
    "bool sum on one rank": (
        lambda c: c.all_reduce(np.zeros(2, bool) if last(c) else np.zeros(2)),
        UnsupportedArray,
        ["ambiguous"],
    ),
    "no JSON": (
        lambda c: c.all_gather_json({1, 2} if last(c) else 1),
        UnsupportedArray,
        ["no JSON value"],
    ),
    "no JSON at the root": (
        lambda c: c.broadcast_json(object()),
        UnsupportedArray,
        ["no JSON value"],
    ),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_of_one_rank_is_everyones(comm: Communicator, what: str) -> None:
    call, kind, says = MISTAKES[what]
    told_everywhere(comm, call, kind, *says)


def test_blocks_that_do_not_fit_each_other(comm: Communicator) -> None:
    def call(c: Communicator) -> Any:
        sends, takes = [1] * c.size, [1] * c.size
        if last(c):
            takes[0] = 2
        return c.all_to_all(np.zeros(c.size), send_counts=sends, recv_counts=takes)

    message = told_everywhere(comm, call, CollectiveMismatch, "sends 1 elements")
    assert f"to rank {comm.size - 1}, which expects 2" in message


def test_a_begun_call_tells_at_its_wait(comm: Communicator) -> None:
    def call(c: Communicator) -> Any:
        return c.begin_all_reduce(np.zeros(3 + last(c))).wait()

    told_everywhere(comm, call, CollectiveMismatch, "(3,)", "(4,)")
    with pytest.raises(ParallelismError):
        comm.begin_all_to_all(np.zeros(comm.size), send_counts=[1] * comm.size).wait()
    assert comm.all_reduce(1) == comm.size


def test_a_message_of_another_shape_or_type_is_refused(comm: Communicator) -> None:
    """The receiver tells; the sender is done, and later messages are not touched."""
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for wrong in (np.zeros(4), np.zeros((3, 1)), np.zeros(3, np.float32), np.zeros(2)):
        first = comm.begin_send(wrong, after, tag=3)
        second = comm.begin_send(np.full(3, 7.0), after, tag=3)
        with pytest.raises(CollectiveMismatch, match="expects shape"):
            comm.recv(np.empty(3), before, tag=3)
        assert comm.recv(np.empty(3), before, tag=3).tolist() == [7.0] * 3
        first.wait()
        second.wait()


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda c: c.send(1.0, dest=c.size), "dest must be in range"),
        (lambda c: c.send(1.0, dest=-1), "dest must be in range"),
        (lambda c: c.recv(np.zeros(1), source=99), "source must be in range"),
        (lambda c: c.send(1.0, dest=0, tag=-1), "tag must be in range"),
        (lambda c: c.recv(np.zeros(1), 0, tag=2**15), "tag must be in range"),
        (lambda c: c.recv([0.0], source=0), "must be a NumPy array"),
        (lambda c: c.recv(np.broadcast_to(0.0, 3), source=0), "read-only"),
    ],
)
def test_a_wrong_message_is_refused_where_it_is_made(
    comm: Communicator, call: Calls, says: str
) -> None:
    with pytest.raises(ParallelismError, match=says):
        call(comm)
    assert comm.all_reduce(1) == comm.size


def test_the_check_sees_errors_that_differ(comm: Communicator) -> None:
    """The planted fault: every rank raises, but not the same."""

    def call(c: Communicator) -> Any:
        c.barrier()
        raise CollectiveMismatch(f"of rank {c.rank} only")

    with pytest.raises(AssertionError, match="of rank 1 only"):
        told_everywhere(comm, call, CollectiveMismatch)
