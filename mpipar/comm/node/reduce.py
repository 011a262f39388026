"""Reductions between the ranks of a node: every rank reduces one slice of the array, for all.

A chunk of a slice is read from every rank, reduced in rank order while it is in the cache, and
written at once to everyone who needs it. Arrays in node-shared memory are read and written where
they lie; others pass through stages, two chunks deep, or through the kernel (`process_memory`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from mpipar.comm.arrays import accumulation_dtype, reduce_rows
from mpipar.comm.call import Array, Call, Op, ReduceOp
from mpipar.comm.node.meeting import Meeting, Script, copy_little, store
from mpipar.units.remainder import spread_sizes


def _minimum(a: Array, b: Array, out: Array) -> None:
    np.minimum(a, b, out=out)


def _maximum(a: Array, b: Array, out: Array) -> None:
    np.maximum(a, b, out=out)


_UFUNCS: dict[ReduceOp, Callable[..., Any]] = {
    ReduceOp.SUM: np.add,
    ReduceOp.PRODUCT: np.multiply,
    ReduceOp.MIN: _minimum,
    ReduceOp.MAX: _maximum,
}


def reduction(rows: Sequence[Array], op: ReduceOp, out: Array, scratch: Array) -> Script:
    """Steps that reduce equal flat arrays in rank order; like `reduce_rows`, without temporaries.

    Parameters
    ----------
    rows : sequence of ndarray
        One a rank.
    op : ReduceOp
        The reduction.
    out : ndarray
        May be one of `rows`.
    scratch : ndarray
        Like a row; for partial results where `out` is a row, and so written last.

    Returns
    -------
    list
        Functions and arguments.
    """
    dtype, ufunc = rows[0].dtype, _UFUNCS.get(op)
    wide = accumulation_dtype(dtype, op)
    if ufunc is None or len(rows) < 2 or wide != out.dtype or dtype != wide:
        return [(reduce_rows, (list(rows), op, out))]
    steps: Script = []
    partial = scratch if any(np.may_share_memory(out, row) for row in rows) else out
    total = rows[0]
    for row in rows[1:-1]:
        steps.append((ufunc, (total, row, partial)))
        total = partial
    return [*steps, (ufunc, (total, rows[-1], out))]


def slices(call: Call, n: int) -> list[tuple[int, int]]:
    """Which elements each rank reduces.

    Parameters
    ----------
    call : Call
        A reduction.
    n : int
        Number of ranks.

    Returns
    -------
    list of (int, int)
        First and last (excluded) element of each rank.
    """
    counts = call.counts
    if counts is None:
        counts = spread_sizes(0 if call.input is None else call.input.size, n)
    stops = accumulate(counts)
    return [(stop - count, stop) for stop, count in zip(stops, counts, strict=True)]


def reduce_small(meeting: Meeting, rows: Sequence[Array]) -> Script:
    """A whole reduction out of the slots of all ranks, on every rank that wants it.

    Parameters
    ----------
    meeting : Meeting
        The call.
    rows : sequence of ndarray
        Inputs of all ranks.

    Returns
    -------
    list
        Steps.
    """
    call, op = meeting.call, meeting.call.reduce_op or ReduceOp.SUM
    target = call.output
    if target is None or call.root not in (None, meeting.rank) or rows[0].size == 0:
        return []
    if call.op is Op.REDUCE_SCATTER:
        low, high = slices(call, meeting.n)[meeting.rank]
        rows = [row[low:high] for row in rows]
    scratch, quietly = np.empty_like(rows[0]), meeting.buffers.quietly
    if not meeting.is_shared_result:
        return quietly(reduction(rows, op, target, scratch))
    private = np.empty_like(target)  # peers may read the result already: write final values only
    return [*quietly(reduction(rows, op, private, scratch)), copy_little(target, private)]


def reduce_slices(meeting: Meeting) -> Script:
    """A reduction of any size.

    Parameters
    ----------
    meeting : Meeting
        The call, with what each rank said about its arrays.

    Returns
    -------
    list
        Steps; None where all ranks must have come as far.
    """
    source, target = meeting.call.input, meeting.call.output
    if source is None or target is None:
        return []
    work = _Slices(meeting, source, target)
    script: Script = []
    for turn in range(work.n_rounds + work.stages_results):
        if turn < work.n_rounds:
            script += work.offer(turn)
        if work.stages_inputs or (work.stages_results and turn):
            script.append(None)
        if turn < work.n_rounds:
            script += work.reduce(turn)
        if work.stages_results and turn:
            script += work.collect(turn - 1)
    return [*script, None] if work.touches_peers else script


class _Slices:
    """One reduction by slices: who reads and writes what, chunk by chunk."""

    def __init__(self, meeting: Meeting, source: Array, target: Array) -> None:
        call = meeting.call
        self.meeting, self.source, self.target = meeting, source, target
        self.me, self.n = meeting.rank, meeting.n
        self.op = call.reduce_op or ReduceOp.SUM
        self.bounds = slices(call, self.n)
        self.scatters = call.op is Op.REDUCE_SCATTER
        takers = range(self.n) if call.root is None else [call.root]
        takers = [] if self.scatters else list(takers)
        self.takes = self.me in takers
        outputs = meeting.outputs
        self.stages_inputs = any(x is None for x in meeting.inputs)
        self.stages_results = any(outputs[d] is None for d in takers)
        places = {meeting.places[d]: there for d in takers if (there := outputs[d]) is not None}
        places.pop(meeting.places[self.me], None)
        self.pushes = list(places.values())
        reads = any(x is not None for x in meeting.inputs)
        self.touches_peers = reads or any(outputs[d] is not None for d in takers)
        self.chunk = max(1, meeting.chunk_bytes // max(source.itemsize, target.itemsize))
        self.n_rounds = -(-max(high - low for low, high in self.bounds) // self.chunk)

    def part(self, owner: int, turn: int) -> slice:
        """The elements of one chunk of a rank's slice."""
        low, high = self.bounds[owner]
        start = min(low + turn * self.chunk, high)
        return slice(start, min(start + self.chunk, high))

    def others(self) -> Iterator[int]:
        """The other ranks, each rank beginning with its neighbour."""
        return ((self.me + i) % self.n for i in range(1, self.n))

    def offer(self, turn: int) -> Script:
        """Put into the stage what the owners of the other slices need of this rank."""
        if self.meeting.inputs[self.me] is not None:
            return []
        pieces = [(owner, self.source[self.part(owner, turn)]) for owner in self.others()]
        slot = self.meeting.slot
        return [(np.copyto, (slot(self.me, turn, o, x.size, x.dtype), x)) for o, x in pieces]

    def reduce(self, turn: int) -> Script:
        """Reduce one chunk of the own slice and hand it out."""
        meeting, part = self.meeting, self.part(self.me, turn)
        n = part.stop - part.start
        if n == 0:
            return []
        script: Script = []
        rows = [self._row(rank, part, turn, script) for rank in range(self.n)]
        slot = meeting.slot(self.me, turn, self.n, n, self.target.dtype)
        if self.scatters:
            low = self.bounds[self.me][0]
            out = self.target[part.start - low : part.stop - low]
        elif self.takes:
            out = self.target[part]
        else:
            out = slot if self.stages_results else meeting.scratch(n, self.target.dtype, -1)
        steps = reduction(rows, self.op, out, meeting.scratch(n, self.source.dtype, -2))
        script += meeting.buffers.quietly(steps)
        script += [store(there, part, out) for there in self.pushes]
        if self.stages_results and out is not slot:
            script.append((np.copyto, (slot, out)))
        return script

    def _row(self, rank: int, part: slice, turn: int, script: Script) -> Array:
        """One chunk of one rank's input, read by a step of `script` where it must be copied."""
        if rank == self.me:
            return self.source[part]
        there, dtype = self.meeting.inputs[rank], self.source.dtype
        n = part.stop - part.start
        if there is None:
            return self.meeting.slot(rank, turn, self.me, n, dtype)
        if isinstance(there, np.ndarray):
            return there[part]
        copy = self.meeting.scratch(n, dtype, rank)
        script.append((there.read, (part, copy)))
        return copy

    def collect(self, turn: int) -> Script:
        """Take the reduced chunks of the other slices out of their owners' stages."""
        if not self.takes or self.meeting.outputs[self.me] is not None:
            return []
        pieces = [(owner, self.target[self.part(owner, turn)]) for owner in self.others()]
        slot = self.meeting.slot
        return [(np.copyto, (x, slot(o, turn, self.n, x.size, x.dtype))) for o, x in pieces]
