"""How one collective goes through node memory: arrival, checks, and the algorithm it takes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Generator, Sequence
from typing import Any

import numpy as np

from mpipar.comm.base import Communicator
from mpipar.comm.call import Array, Call, Op
from mpipar.comm.local import check_exchange, mismatch, refusal
from mpipar.comm.node.flags import (
    ARRIVE,
    FIRST_WORD,
    INPUT,
    OUTPUT,
    SIGNATURE,
    SLOT_BYTES,
    STAGE,
    STEP,
    TEXT_BYTES,
    WORDS,
    Flags,
)
from mpipar.comm.node.host import Host
from mpipar.comm.node.meeting import Meeting, Reach, Scratch, Script, Stages, Wait, Waits
from mpipar.comm.node.move import Blocks, move, move_small
from mpipar.comm.node.paths import Paths
from mpipar.comm.node.process_memory import Far
from mpipar.comm.node.reduce import reduce_slices, reduce_small
from mpipar.comm.request import Request
from mpipar.errors import CountOutOfRange

_MAX_SCRIPTS = 32
_REDUCES = (Op.ALL_REDUCE, Op.REDUCE, Op.REDUCE_SCATTER)


class NodeCalls:
    """The programs of a group's collectives.

    Parameters
    ----------
    inner : Communicator
        The transport, for what it does better.
    host : Host
        Memory of this node.
    flags : Flags
        Of the group.
    paths : Paths
        Which algorithm for which call.
    pids : sequence of int or None
        Processes by rank, where they may copy from each other.
    """

    def __init__(
        self,
        inner: Communicator,
        host: Host,
        flags: Flags,
        paths: Paths,
        pids: Sequence[int] | None,
    ) -> None:
        self.inner, self.host, self.flags, self.paths = inner, host, flags, paths
        self.rank, self.size = flags.rank, flags.n
        self.memory = host.arena.memory
        self._pids = pids
        self._stages: Stages | None = None
        self._stage_failed = False
        self.scratch = Scratch()
        self._codes: dict[Any, int] = {}
        self.shared_places: set[int] = set()

    def close(self) -> None:
        """Give the stage back; no peer looks at it any more."""
        if self._stages is not None:
            self.host.arena.give(self._stages.offsets[self.rank])
            self._stages = None

    def use(self, paths: Paths) -> None:
        """Choose by another table from the next call on."""
        self.paths = paths
        self._codes.clear()

    def program(self, call: Call) -> Waits:
        """A collective from its arrival to its end."""
        flags, path = self.flags, self.paths.choose(call)
        source = call.input
        if path == "flags" and source is not None:
            slot = flags.slots[self.rank][(flags.sequence + 1) & 1]
            slot[: source.nbytes] = source.view(np.uint8)
        yield ARRIVE, flags.arrive((self.code(call, path), *self.places(call, path)))
        yield from self.after_arrival(call, path)

    def after_arrival(self, call: Call, path: str, kept: dict[Any, Script] | None = None) -> Waits:
        """The rest of a collective; what it did is put into `kept`, to be done again."""
        yield from self._agree(call, self.code(call, path))
        key = self.heard(path)
        meeting = self._meeting(call)
        if call.op is Op.ALL_TO_ALL and not call.uniform:
            yield from self._exchange_counts(meeting)
        script: Script | None = None
        if path == "flags":
            script = self._small(meeting)
        elif path != "mpi":
            script = yield from self._large(meeting)
        if script is None and kept is not None and not meeting.is_shared_result:
            script = [(self.inner.prepared(call), ())]
        if script is None:
            yield from self._hand_over(meeting)
            return
        if kept is not None and call.uniform:
            if len(kept) >= _MAX_SCRIPTS:  # peers whose arrays lie elsewhere every time
                kept.clear()
            kept[key] = script
        for item in script:
            if item is None:
                yield STEP, self.flags.next_step()
            else:
                item[0](*item[1])

    def heard(self, path: str) -> tuple[Any, ...]:
        """All that the other ranks said of the present call, and which slot it uses if it does."""
        start = FIRST_WORD + WORDS * (self.flags.sequence & 1)
        key = [start if path == "flags" else 0]
        for line in self.flags.peers:
            key += (line[start], line[start + 1], line[start + 2])
        return tuple(key)

    def _small(self, meeting: Meeting) -> Script:
        call = meeting.call
        whole = call.input if call.input is not None else call.output
        if call.op is Op.BARRIER or whole is None:
            return []
        parity = self.flags.sequence & 1
        areas = [slot[parity] for slot in self.flags.slots]
        if call.op in _REDUCES:
            n_bytes = whole.nbytes
            return reduce_small(meeting, [area[:n_bytes].view(whole.dtype) for area in areas])
        end = SLOT_BYTES // whole.itemsize * whole.itemsize
        return move_small(meeting, [area[:end].view(whole.dtype) for area in areas])

    def _large(self, meeting: Meeting) -> Generator[Wait | Request, None, Script | None]:
        """Where the arrays lie decides, alike on every rank, how they are read and written."""
        compiled = reduce_slices if meeting.call.op in _REDUCES else move
        if not _needs_stage(meeting):
            return compiled(meeting)
        way = self.paths.ordinary(meeting.call)
        if way == "mpi":
            return None
        if way == "copy" and self._pids is not None:
            sends = meeting.sends
            meeting = self._meeting(meeting.call, far=True)
            meeting.sends = sends
        if _needs_stage(meeting):
            if not (yield from self._set_stages()):
                return None
            meeting.stages = self._stages
        return compiled(meeting)

    def _meeting(self, call: Call, far: bool = False) -> Meeting:
        """What the ranks said about their arrays."""
        flags, memory = self.flags, self.memory
        inputs, outputs = flags.said(INPUT), flags.said(OUTPUT)
        types = [x.dtype for x in (call.input, call.output) if x is not None]
        pids = self._pids if far else None

        def reach(place: int, rank: int, dtype: np.dtype[Any]) -> Reach | None:
            if place >= 0:
                return memory.view(place, (memory.n_bytes - place) // dtype.itemsize, dtype)
            if pids is not None and place < -1:
                return Far(pids[rank], -place, dtype)
            return None

        first, last = (types[0], types[-1]) if types else (np.dtype(np.uint8),) * 2
        return Meeting(
            call,
            flags,
            [reach(place, rank, first) for rank, place in enumerate(inputs)],
            [reach(place, rank, last) for rank, place in enumerate(outputs)],
            [place if place >= 0 else -1 - rank for rank, place in enumerate(outputs)],
            self._stages,
            self.scratch,
            self.paths.chunk_bytes(self.size),
        )

    def places(self, call: Call, path: str) -> tuple[int, int]:
        """Where the arrays of this rank lie, as far as peers need to know it.

        A small message needs to know of shared results only; addresses in this process matter to
        copies by the kernel only, and what does not change leaves what was done before right.
        """
        if path == "flags":
            known = bool(self.shared_places) and self.where(call.output) in self.shared_places
            return -1, self.where(call.output) if known else -1
        source, target = self.where(call.input), self.where(call.output)
        if self._pids is None or self.paths.ordinary(call) != "copy":
            return max(source, -1), max(target, -1)
        return source, target

    def where(self, array: Array | None) -> int:
        """Offset in the node's memory, or minus the address in this process; -1 for nothing."""
        if array is None or array.size == 0:
            return -1
        memory = self.memory
        address: int = array.__array_interface__["data"][0]
        offset = address - memory.address
        return offset if 0 <= offset < memory.n_bytes else -address

    def code(self, call: Call, path: str) -> int:
        """The signature as a number that is equal on all ranks that make the same call."""
        key = (call.op, call.reduce_op, call.dtype, call.agreed, call.root, call.deterministic,
               call.error is None, path)  # fmt: skip
        code = self._codes.get(key)
        if code is None:
            text = f"{call.signature} {path} {self.paths.fingerprint}".encode()
            code = int.from_bytes(hashlib.blake2b(text, digest_size=7).digest())
            if len(self._codes) > 1000:
                self._codes.clear()
            if call.error is None:
                self._codes[key] = code
        return code

    def collected(self, call: Call, found: list[list[Array] | None]) -> Waits:
        """Put into `found` the inputs of all ranks; None where one is not in node memory."""
        code = self.code(call, "views")
        yield ARRIVE, self.flags.arrive((code, self.where(call.input), -1))
        yield from self.collected_after_arrival(call, code, found)

    def collected_after_arrival(
        self, call: Call, code: int, found: list[list[Array] | None]
    ) -> Waits:
        """The rest of `collected`."""
        yield from self._agree(call, code)
        places, source = self.flags.said(INPUT), call.input
        if source is None or min(places) < 0:
            found.append(None)
        else:
            found.append([self.memory.view(p, source.size, source.dtype) for p in places])

    def _agree(self, call: Call, code: int) -> Waits:
        """Go on if all ranks made this call; else tell each other, and raise alike everywhere."""
        codes, error = self.flags.said(SIGNATURE), call.error
        if error is None and all(other == code for other in codes):
            return
        said = [type(error).__name__, str(error)] if error is not None else ["", call.signature]
        text = json.dumps(said).encode()
        if len(text) > TEXT_BYTES - 8:
            text = json.dumps([said[0], said[1][:600]]).encode()  # six bytes a letter at most
        self.flags.write_text(text)
        yield STEP, self.flags.next_step()
        rows = [json.loads(text) for text in self.flags.texts()]
        refused = [(rank, *row) for rank, row in enumerate(rows) if row[0]]
        if refused:
            raise refusal(refused, self.size)
        if len({row[1] for row in rows}) > 1:
            raise mismatch([row[1] for row in rows])
        raise mismatch([f"{row[1]} (algorithms: {self.paths.fingerprint})" for row in rows])

    def _exchange_counts(self, meeting: Meeting) -> Waits:
        call, n = meeting.call, self.size
        counts = [*(call.counts or ()), *(call.recv_counts or ())]
        self.flags.write_text(np.array(counts, np.int64).tobytes())
        yield STEP, self.flags.next_step()
        rows = [np.frombuffer(text, np.int64).tolist() for text in self.flags.texts()]
        meeting.sends = [row[:n] for row in rows]
        wrong = check_exchange(meeting.sends, [row[n:] for row in rows])
        if wrong is not None:
            raise wrong

    def _set_stages(self) -> Generator[Wait | Request, None, bool]:
        """Make the stages of the group at the first call that needs them."""
        if self._stages is None and not self._stage_failed:
            chunk, arena = self.paths.chunk_bytes(self.size), self.host.arena
            try:
                mine = arena.take(Stages.n_bytes(self.size, chunk))
            except CountOutOfRange:
                mine = -1
            self.flags.describe(STAGE, mine)
            yield STEP, self.flags.next_step()
            offsets = self.flags.said(STAGE)
            if min(offsets) >= 0:
                self._stages = Stages(arena.memory, offsets, chunk)
            else:
                self._stage_failed = True
                if mine >= 0:
                    arena.give(mine)
        return self._stages is not None

    def _hand_over(self, meeting: Meeting) -> Waits:
        """Let the transport make the call; it never sees memory that ranks share for a result."""
        call, shared = meeting.call, meeting.is_shared_result
        passed = call
        if shared and call.output is not None:
            passed = call._replace(output=np.empty_like(call.output))
        request = self.inner.submit(passed)
        if not call.blocking:
            yield request
        if shared and call.output is not None and passed.output is not None:
            yield STEP, self.flags.next_step()
            call.output[...] = passed.output
            yield STEP, self.flags.next_step()


def _needs_stage(meeting: Meeting) -> bool:
    """Whether some array can be reached by its own rank only."""
    call, n = meeting.call, meeting.n
    if call.op in _REDUCES:
        takers: Sequence[int] = range(n) if call.root is None else [call.root]
        if call.op is Op.REDUCE_SCATTER:
            takers = []
        return any(x is None for x in meeting.inputs) or any(
            meeting.outputs[d] is None for d in takers
        )
    table = Blocks(call, n, meeting.sends)
    if meeting.is_shared_result:
        return False
    return any(
        meeting.inputs[s] is None and meeting.outputs[d] is None and table.between(s, d).n > 0
        for s in range(n)
        for d in range(n)
        if s != d
    )
