"""Moves between the ranks of a node: gathers, scatters, broadcasts and all-to-all as blocks.

Every operation is a table of blocks, one for each pair of ranks. A block is copied once: by its
receiver where the source can be reached, by its sender where only the target can, by both a part
each where the operation would leave ranks idle; else it passes through the sender's stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from mpipar.comm.call import Array, Call, Op
from mpipar.comm.node.meeting import Meeting, Script, copy_little, store

_ONE_SIDED = (Op.BROADCAST, Op.SCATTER, Op.GATHER)
_SAME_FOR_ALL = (Op.BROADCAST, Op.ALL_GATHER, Op.GATHER)


class Block(NamedTuple):
    """What one rank gives another: elements of the flat input and output."""

    start: int
    target: int
    n: int


class Blocks:
    """The table of blocks of a call.

    Parameters
    ----------
    call : Call
        Of any rank.
    n : int
        Number of ranks.
    sends : sequence of sequence of int, optional
        For an uneven all_to_all.
    """

    def __init__(self, call: Call, n: int, sends: Sequence[Sequence[int]] | None = None) -> None:
        self.op, self.root = call.op, call.root
        self.counts = call.counts or ()
        self.offsets = list(accumulate(self.counts, initial=0))
        whole = call.output if call.output is not None else call.input
        self.size = 0 if whole is None else whole.size
        if call.op is Op.ALL_TO_ALL:
            self.sends = [self.counts] * n if sends is None else sends
            self.starts = [list(accumulate(row, initial=0)) for row in self.sends]
            columns = list(zip(*self.sends, strict=True))
            self.targets = [list(accumulate(column, initial=0)) for column in columns]

    def between(self, source: int, dest: int) -> Block:
        """What `source` gives `dest`."""
        if self.op is Op.ALL_TO_ALL:
            starts, targets = self.starts[source], self.targets[dest]
            return Block(starts[dest], targets[source], self.sends[source][dest])
        if self.op is Op.BROADCAST:
            return Block(0, 0, self.size if source == self.root else 0)
        if self.op is Op.SCATTER:
            count = self.counts[dest] if source == self.root else 0
            return Block(self.offsets[dest], 0, count)
        count = self.counts[source] if self.root in (None, dest) else 0
        return Block(0, self.offsets[source], count)


def _pairs(block: Block, source: Array | None, target: Array | None) -> list[tuple[Array, Array]]:
    """Where a block between two arrays of this process goes to and lies; in place is none."""
    if source is None or target is None or source is target or block.n == 0:
        return []
    start, place, n = block
    return [(target[place : place + n], source[start : start + n])]


def move_small(meeting: Meeting, rows: Sequence[Array]) -> Script:
    """All blocks for this rank out of the slots of its peers.

    Parameters
    ----------
    meeting : Meeting
        The call.
    rows : sequence of ndarray
        Inputs of all ranks; only what a rank has is looked at.

    Returns
    -------
    list
        Steps.
    """
    call, me = meeting.call, meeting.rank
    table = Blocks(call, meeting.n, meeting.sends)
    script: Script = []
    for source in range(meeting.n):
        row = call.input if source == me else rows[source]
        for pair in _pairs(table.between(source, me), row, call.output):
            script.append(copy_little(*pair))
    return script


def move(meeting: Meeting) -> Script:
    """Moves of any size.

    Parameters
    ----------
    meeting : Meeting
        The call, with what each rank said about its arrays.

    Returns
    -------
    list
        Steps; None where all ranks must have come as far.
    """
    me, n, call = meeting.rank, meeting.n, meeting.call
    work = _Moves(meeting)
    own = _pairs(work.table.between(me, me), call.input, call.output)
    script: Script = [(np.copyto, pair) for pair in own]
    for step in range(1, n):
        script += work.pull((me - step) % n)
        script += work.push((me + step) % n)
    for turn in range(work.n_rounds):
        script += [*work.offer(turn), None, *work.collect(turn)]
    return [*script, None] if work.touches_peers else script


class _Moves:
    """One call's blocks: which way each of them goes."""

    def __init__(self, meeting: Meeting) -> None:
        call, n = meeting.call, meeting.n
        self.meeting, self.call, self.me, self.n = meeting, call, meeting.rank, n
        self.table = Blocks(call, n, meeting.sends)
        self.shared = meeting.is_shared_result
        whole = call.output if call.output is not None else call.input
        self.dtype = np.dtype(np.uint8) if whole is None else whole.dtype
        self.chunk = max(1, meeting.chunk_bytes // self.dtype.itemsize)
        pairs = [(s, d) for s in range(n) for d in range(n) if s != d]
        counts = [(self.table.between(s, d).n, self.cut(s, d)) for s, d in pairs]
        staged = max((count for count, cut in counts if cut is None), default=0)
        self.n_rounds = -(-staged // self.chunk)
        self.touches_peers = any(count and cut is not None for count, cut in counts)

    def cut(self, source: int, dest: int) -> int | None:
        """How many elements of a block its sender writes; the receiver reads the rest."""
        count = self.table.between(source, dest).n
        reads, writes = self.meeting.inputs[source], self.meeting.outputs[dest]
        if self.shared:  # each rank's own block is everyone's
            return count
        if reads is None and writes is None:
            return None
        if reads is not None and writes is not None and self.table.op in _ONE_SIDED:
            return count // self.n
        return 0 if reads is not None else count

    def pull(self, source: int) -> Script:
        """Read what is this rank's to read of a peer's block."""
        block, cut = self.table.between(source, self.me), self.cut(source, self.me)
        there, target = self.meeting.inputs[source], self.call.output
        if cut is None or there is None or target is None or block.n <= cut:
            return []
        out = target[block.target + cut : block.target + block.n]
        part = slice(block.start + cut, block.start + block.n)
        if isinstance(there, np.ndarray):
            return [(np.copyto, (out, there[part]))]
        return [(there.read, (part, out))]

    def push(self, dest: int) -> Script:
        """Write what is this rank's to write of a block for a peer."""
        block, cut = self.table.between(self.me, dest), self.cut(self.me, dest)
        there, source = self.meeting.outputs[dest], self.call.input
        if not cut or there is None or source is None or self.shared:
            return []
        part = slice(block.target, block.target + cut)
        return [store(there, part, source[block.start : block.start + cut])]

    def offer(self, turn: int) -> Script:
        """Put a chunk of each staged block into the stage, once where it is the same for all."""
        script: Script = []
        if self.call.input is None:
            return script
        for dest in range(self.n):
            if dest == self.me or self.cut(self.me, dest) is not None:
                continue
            piece = self.call.input[self._part(self.table.between(self.me, dest), turn, 0)]
            which = self._slot(dest)
            slot = self.meeting.slot(self.me, turn, which, piece.size, self.dtype)
            script.append((np.copyto, (slot, piece)))
            if which == self.n and piece.size:
                break
        return script

    def collect(self, turn: int) -> Script:
        """Take a chunk of each staged block out of its sender's stage."""
        script: Script = []
        if self.call.output is None:
            return script
        for source in range(self.n):
            if source == self.me or self.cut(source, self.me) is not None:
                continue
            out = self.call.output[self._part(self.table.between(source, self.me), turn, 1)]
            slot = self.meeting.slot(source, turn, self._slot(self.me), out.size, self.dtype)
            script.append((np.copyto, (out, slot)))
        return script

    def _slot(self, dest: int) -> int:
        return self.n if self.table.op in _SAME_FOR_ALL else dest

    def _part(self, block: Block, turn: int, side: int) -> slice:
        low = min(turn * self.chunk, block.n)
        high = min(low + self.chunk, block.n)
        return slice(block[side] + low, block[side] + high)
