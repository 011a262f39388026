"""Interleaved measurement: every method in every round, the slowest rank counts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from mpipar.bench.methods import (
    FORMS,
    SMALL,
    Method,
    expected,
    n_sets,
    our_method,
    pattern,
    raw_method,
)
from mpipar.bench.raw import Raw
from mpipar.bench.report import Row
from mpipar.comm.base import Communicator
from mpipar.topology.cost import bus_factor


def measure(
    comm: Communicator,
    raw: Raw,
    op: str,
    n_bytes: int,
    forms: Sequence[str] | None = None,
    *,
    n_rounds: int = 7,
    dirty: bool = True,
) -> list[Row]:
    """Measure one operation at one size. Collective.

    Parameters
    ----------
    comm : Communicator
        The ranks, for this library.
    raw : Raw
        The same ranks, for mpi4py.
    op : str
        Name of the operation.
    n_bytes : int
        Of one rank's input, rounded to whole blocks.
    forms : sequence of str, optional
        Of `FORMS`; all by default.
    n_rounds : int
        Interleaved rounds.
    dirty : bool
        Whether inputs are rewritten before each call.

    Returns
    -------
    list of Row
        The raw forms first.
    """
    n = max(1, n_bytes // 4 // comm.size) * comm.size
    methods = [raw_method(raw, op, n)]
    if op == "all_reduce" and n_bytes > SMALL:
        methods.append(raw_method(raw, op, n, in_place=True))
    methods += [our_method(comm, op, form, n) for form in forms or FORMS[op]]
    methods.append(_copying(n))
    fresh = pattern(comm.rank, n)
    for method in methods:
        for x in method.inputs:
            x[...] = fresh
    wrong = [_n_wrong(method, op, raw, n, fresh) for method in methods]
    warm_up(methods, fresh)
    raw.barrier()
    times: list[list[float]] = [[] for _ in methods]
    for turn in range(n_rounds + 1):
        for method, kept in zip(methods, times, strict=True):
            seconds = one_round(method, raw, turn, fresh, dirty, n_bytes)
            kept += seconds if turn else []
    for method in methods:
        method.free()
    return _rows(comm, raw, op, n, methods, times, wrong)


def warm_up(methods: Sequence[Method], fresh: Any) -> None:
    """Make every call twice: calls on the same arrays are planned at their second sight.

    Parameters
    ----------
    methods : sequence of Method
        All that are to be measured.
    fresh : ndarray
        What inputs are rewritten with.
    """
    for _ in range(2):
        for method in methods:
            for x, call in zip(method.inputs, method.calls, strict=True):
                x[...] = fresh
                call()


def _copying(n: int) -> Method:
    """The memory bound: every rank copies its array."""
    sets = range(n_sets(4 * n))
    xs = [np.empty(n, np.float32) for _ in sets]
    out = [np.empty(n, np.float32) for _ in sets]
    calls = [partial(np.copyto, b, a) for a, b in zip(xs, out, strict=True)]
    return Method("memory bound", xs, calls, lambda: None, [None] * len(xs))


def one_round(
    method: Method, raw: Raw, turn: int, fresh: Any, dirty: bool, n_bytes: int
) -> list[float]:
    """Seconds of some calls: one by one, or small ones in a batch. Collective.

    Parameters
    ----------
    method : Method
        What is called.
    raw : Raw
        For the barrier before each timed call.
    turn : int
        Number of the round, by which the buffers rotate.
    fresh : ndarray
        What inputs are rewritten with.
    dirty : bool
        Whether they are.
    n_bytes : int
        Of one rank's input.

    Returns
    -------
    list of float
        Of this rank.
    """
    if n_bytes <= SMALL:
        call = method.calls[0]
        method.inputs[0][...] = 0  # sums in place would grow without bound
        raw.barrier()
        start = time.perf_counter()
        for _ in range(100):
            call()
        return [(time.perf_counter() - start) / 100]
    seconds = []
    n_calls = max(1, min(8, 2**22 // n_bytes))
    for i in range(n_calls):
        index = (turn * n_calls + i) % len(method.calls)
        if dirty:
            method.inputs[index][...] = fresh
        raw.barrier()
        start = time.perf_counter()
        result = method.calls[index]()
        _read(result if method.results is None else method.results[index])
        seconds.append(time.perf_counter() - start)
    return seconds


def _read(result: Any) -> None:
    """Read every element: a view leaves the copy to its reader."""
    if result is None:
        return
    for array in result if isinstance(result, list) else [result]:
        array.dot(array)


def _n_wrong(method: Method, op: str, raw: Raw, n: int, fresh: Any) -> int:
    """Wrong elements of a first call with each set of buffers."""
    want, n_wrong = expected(op, raw.rank, raw.size, n), 0
    for i, (x, call) in enumerate(zip(method.inputs, method.calls, strict=True)):
        x[...] = fresh
        raw.barrier()
        result = call()
        if method.results is not None:
            result = method.results[i]
        if result is not None and want is not None and method.name != "in the slot":
            got = np.concatenate(result) if isinstance(result, list) else result
            n_wrong += int((got != want).sum())
        raw.barrier()
    return raw.total(n_wrong)


def _rows(
    comm: Communicator,
    raw: Raw,
    op: str,
    n: int,
    methods: Sequence[Method],
    times: Sequence[list[float]],
    wrong: Sequence[int],
) -> list[Row]:
    slowest = [raw.slowest(kept) for kept in times]
    medians = [float(np.median(t)) for t in slowest]
    names = [method.name for method in methods]
    same_form = dict.fromkeys(names, medians[0])
    if "raw in place" in names:
        same_form |= {n: medians[names.index("raw in place")] for n in names if "in place" in n}
    n_bytes = 4 * n * (comm.size if op == "all_gather" else 1)
    rows = []
    for method, t, median, n_wrong in zip(methods, slowest, medians, wrong, strict=True):
        if method.name == "memory bound":
            continue
        low, high = (float(v) for v in np.percentile(t, [25, 75]))
        ratio, speed = same_form[method.name] / median, n_bytes / median
        bus = speed * bus_factor(op, comm.size)
        rows.append(
            Row(op, method.name, n_bytes, n, median, low, high, ratio, speed, bus, n_wrong,
                medians[-1])
        )  # fmt: skip
    return rows
