"""What is measured: each operation in each form, with its inputs and its right answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mpipar.bench.raw import Raw
from mpipar.comm.base import Communicator
from mpipar.comm.call import Array
from mpipar.comm.channel import Receiver, Sender

OPS = ("all_reduce", "reduce_scatter", "broadcast", "all_gather", "all_to_all", "send_recv")
FORMS = {
    "all_reduce": (
        "shared",
        "own",
        "own in place",
        "ordinary",
        "ordinary in place",
        "ordinary to shared",
    ),
    "reduce_scatter": ("own", "ordinary"),
    "broadcast": ("own", "ordinary", "shared", "view"),
    "all_gather": ("shared", "own", "ordinary", "view"),
    "all_to_all": ("own", "ordinary", "view"),
    "send_recv": ("copied", "in the slot"),
}
SMALL = 32 * 1024


@dataclass
class Method:
    """One form of one operation, on a set of buffers that rotate.

    Parameters
    ----------
    name : str
        Shown.
    inputs : list of ndarray
        One a set; rewritten before each timed call where inputs are dirty.
    calls : sequence of callable
        One a set; return the array, or the arrays, of the result, where `results` does not.
    free : callable
        Gives buffers back. Collective.
    results : sequence of ndarray or None, optional
        Where the result of each set lies; None for a method without one.
    """

    name: str
    inputs: list[Array]
    calls: Sequence[Callable[[], Any]]
    free: Callable[[], None]
    results: Sequence[Array | None] | None = None


def pattern(rank: int, n: int) -> Array:
    """One rank's input: small whole numbers, so that sums are exact in any order.

    Parameters
    ----------
    rank, n : int
        Of the rank, and number of elements.

    Returns
    -------
    ndarray
        float32.
    """
    return (np.arange(n) % 5 + rank + 1).astype(np.float32)


def expected(op: str, rank: int, size: int, n: int) -> Array | None:
    """What a rank must get, by NumPy.

    Parameters
    ----------
    op : str
        Name of the operation.
    rank, size, n : int
        Of the rank, of the group, and elements of one rank's input.

    Returns
    -------
    ndarray or None
        None for a rank that gets nothing.
    """
    rows = [pattern(r, n) for r in range(size)]
    block = n // size
    mine = slice(rank * block, (rank + 1) * block)
    total: Array = np.sum(rows, 0)
    if op in ("all_reduce", "reduce_scatter"):
        return total if op == "all_reduce" else total[mine]
    if op == "all_gather":
        return np.concatenate(rows)
    if op == "all_to_all":
        return np.concatenate([row[mine] for row in rows])
    return rows[0] if op == "broadcast" or rank == 1 else None


def last_level_cache() -> int:
    """Bytes of the largest cache of this machine; 32 MiB where it does not tell.

    Returns
    -------
    int
        Bytes.
    """
    found = [32 * 2**20]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        if text.endswith("K"):
            found.append(int(text[:-1]) * 1024)
    return max(found[1:], default=found[0])


def n_sets(n_bytes: int) -> int:
    """How many sets of buffers it takes to leave the cache; one for small messages.

    Parameters
    ----------
    n_bytes : int
        Of one buffer.

    Returns
    -------
    int
        At least 1.
    """
    return 1 if n_bytes <= SMALL else max(2, min(256, int(1.5 * last_level_cache()) // n_bytes))


def output_size(op: str, size: int, n: int) -> int:
    """Elements of one rank's result."""
    return n * size if op == "all_gather" else n // size if op == "reduce_scatter" else n


def raw_method(raw: Raw, op: str, n: int, in_place: bool = False) -> Method:
    """The operation by mpi4py.

    Parameters
    ----------
    raw : Raw
        On the measured ranks.
    op : str
        Name of the operation.
    n : int
        Elements of one rank's input.
    in_place : bool
        For an all-reduce.

    Returns
    -------
    Method
        Named "raw".
    """
    sets = range(n_sets(4 * n))
    xs = [np.empty(n, np.float32) for _ in sets]
    outs = [np.empty(0 if in_place else output_size(op, raw.size, n), np.float32) for _ in sets]
    pairs = zip(xs, outs, strict=True)
    calls = [raw.in_place(x) if in_place else raw.call(op, x, out) for x, out in pairs]
    takes = op == "broadcast" or in_place or (op == "send_recv" and raw.rank != 1)
    name = "raw in place" if in_place else "raw"
    return Method(name, xs, calls, lambda: None, xs if takes else outs)


def our_method(comm: Communicator, op: str, form: str, n: int) -> Method:
    """The operation by this library. Collective.

    Parameters
    ----------
    comm : Communicator
        The measured ranks.
    op, form : str
        A key and a value of `FORMS`.
    n : int
        Elements of one rank's input.

    Returns
    -------
    Method
        Named by its form.
    """
    if op == "send_recv":
        return _channel(comm, form, n)
    sets, size = range(n_sets(4 * n)), output_size(op, comm.size, n)
    ordinary = form.startswith("ordinary")
    xs = [np.empty(n, np.float32) if ordinary else comm.empty(n) for _ in sets]
    held: list[Array] = [] if ordinary else [*xs]
    if form == "view":
        calls = [_view_call(comm, op, x) for x in xs]
    else:
        if form.endswith("shared"):
            outs = [comm.empty_shared(size) for _ in sets]
        elif op == "broadcast" or form.endswith("in place"):
            outs = xs
        else:
            outs = [np.empty(size, np.float32) if ordinary else comm.empty(size) for _ in sets]
        held += outs if outs is not xs else []
        calls = [_verb_call(comm, op, x, out) for x, out in zip(xs, outs, strict=True)]

    def free() -> None:
        for array in held:
            comm.free(array)

    return Method(form, xs, calls, free)


def _verb_call(comm: Communicator, op: str, x: Array, out: Array) -> Callable[[], Any]:
    verb = getattr(comm, op)
    return lambda: verb(x, out=out)


def _view_call(comm: Communicator, op: str, x: Array) -> Callable[[], Any]:
    block = x.size // comm.size
    mine = slice(comm.rank * block, (comm.rank + 1) * block)
    if op == "broadcast":
        return lambda: comm.views(x)[:1]
    if op == "all_gather":
        return lambda: comm.views(x)
    return lambda: [view[mine] for view in comm.views(x)]


def _channel(comm: Communicator, form: str, n: int) -> Method:
    """From rank 0 to rank 1; "in the slot" the sender has computed into it before it sends."""
    sets = range(n_sets(4 * n))
    xs = [np.empty(n, np.float32) for _ in sets]
    in_slot, n_slots = form == "in the slot", max(2, len(sets))
    calls: list[Callable[[], Any]]
    if comm.rank == 0:
        sender = comm.channel_to(1, n, n_slots=n_slots)
        calls = [partial(_filled, sender, x, in_slot) for x in xs]
        return Method(form, xs, calls, sender.close)
    if comm.rank > 1:
        return Method(form, xs, [partial(np.ravel, x) for x in xs], lambda: None)
    receiver = comm.channel_from(0, n, n_slots=n_slots)
    calls = [partial(_taken, receiver) if in_slot else partial(receiver.recv, x) for x in xs]
    return Method(form, xs, calls, receiver.close)


def _filled(sender: Sender, x: Array, in_slot: bool) -> Array:
    if not in_slot:
        sender.send(x)
        return x
    slot = sender.acquire()
    sender.commit()
    return slot


def _taken(receiver: Receiver) -> Array:
    """An array where it lies; released before it is read, since no slot is used again so soon."""
    view = receiver.get()
    receiver.release()
    return view
