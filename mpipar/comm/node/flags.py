"""Signals between the ranks of a node: what each has published about its calls.

Every rank has one line in node-shared memory that only it writes. A line holds

- two counters: ARRIVE (calls that this rank has come to) and STEP (steps inside calls);
- twice, by the parity of the call: a description (signature, where the arrays lie), a text area
  and a slot for small messages.

A description, text or slot of call s is overwritten by call s + 2, which a rank publishes only
after it has seen all peers arrive at s + 1; and a rank arrives at s + 1 only after it has ended s.
So two copies are enough, and small calls need one wait and no second barrier.

Memory order, in this one place: data is written, then the counter (`publish`); a reader polls the
counter, then reads the data (`reached`). No protocol here writes a word and then decides by a
single read of another's word: every decision is taken by polling until a counter is reached, so
the one order that x86 does not keep (a store, then a load) is never needed, and x86 needs no
fence. On other machines the transport gives a fence (a window sync) that stands between data and
counter on both sides. Counters are aligned 8-byte words, written in one piece.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpipar.comm.call import Array
from mpipar.comm.node.memory import Memory

ARRIVE, STEP = 0, 8
FIRST_WORD, WORDS = 16, 8  # first word of the descriptions, words of one
SIGNATURE, INPUT, OUTPUT, STAGE = range(4)
TEXT_BYTES = 4096
_HEAD_BYTES = 8 * (FIRST_WORD + 2 * WORDS)
SLOT_BYTES = 32768
LINE_BYTES = _HEAD_BYTES + 2 * (TEXT_BYTES + SLOT_BYTES)

Fence = Callable[[], object]


class Flags:
    """The lines of one group as one rank sees them.

    Parameters
    ----------
    memory : Memory
        In which all lines lie.
    offsets : sequence of int
        Of the lines, by rank.
    rank : int
        Which of them is this rank's.
    fence : callable or None
        Orders data and counters where the processor does not.
    """

    def __init__(
        self, memory: Memory, offsets: Sequence[int], rank: int, fence: Fence | None = None
    ) -> None:
        self.n = len(offsets)
        self.rank = rank
        self.fence = fence
        self.lines = [memory.words(o, _HEAD_BYTES) for o in offsets]
        self.mine = self.lines[rank]
        self.peers = [line for r, line in enumerate(self.lines) if r != rank]
        self._texts = [self._parts(memory, o + _HEAD_BYTES, TEXT_BYTES) for o in offsets]
        start = _HEAD_BYTES + 2 * TEXT_BYTES
        self.slots = [self._parts(memory, o + start, SLOT_BYTES) for o in offsets]
        self.my_slots = [memoryview(slot) for slot in self.slots[rank]]  # type: ignore[arg-type]
        self.sequence = 0
        self.step = 0
        self.written: list[object] = [None, None]
        places = [offsets[rank] + 8 * (FIRST_WORD + WORDS * parity) for parity in (0, 1)]
        self.my_words = [memoryview(memory.bytes)[p : p + 24] for p in places]  # type: ignore[arg-type]

    @staticmethod
    def _parts(memory: Memory, start: int, n_bytes: int) -> list[Array]:
        return [memory.bytes[start + i * n_bytes : start + (i + 1) * n_bytes] for i in (0, 1)]

    def publish(self, word: int, value: int) -> None:
        """Set a counter of this rank, after everything that it has written so far."""
        if self.fence is not None:
            self.fence()
        self.mine[word] = value

    def reached(self, word: int, value: int) -> bool:
        """Whether the counters of all peers have come as far as `value`."""
        for line in self.peers:
            if line[word] < value:
                return False
        if self.fence is not None:
            self.fence()
        return True

    def absent(self, word: int, value: int) -> list[int]:
        """Ranks whose counters have not come as far as `value`."""
        return [r for r, line in enumerate(self.lines) if line[word] < value]

    def arrive(self, description: Sequence[int]) -> int:
        """Publish a call; the number to wait for under `ARRIVE` is returned."""
        self.sequence = sequence = self.sequence + 1
        self.write(sequence & 1, description)
        self.publish(ARRIVE, sequence)
        return sequence

    def write(self, parity: int, description: Sequence[int]) -> None:
        """Write a description, unless this very one stands there: unwritten lines stay cached."""
        if self.written[parity] is not description:
            self.written[parity] = description
            mine = self.mine
            for word, value in enumerate(description, FIRST_WORD + WORDS * parity):
                mine[word] = value

    def describe(self, word: int, value: int) -> None:
        """Add a word to the description of the present call; read after the next step."""
        self.mine[FIRST_WORD + WORDS * (self.sequence & 1) + word] = value

    def said(self, word: int) -> list[int]:
        """What every rank wrote in one word of the description of the present call."""
        place = FIRST_WORD + WORDS * (self.sequence & 1) + word
        return [line[place] for line in self.lines]

    def next_step(self) -> int:
        """Publish the next step; the number to wait for under `STEP` is returned."""
        self.step += 1
        self.publish(STEP, self.step)
        return self.step

    def write_text(self, raw: bytes) -> None:
        """Write this rank's text of the present call; read after the next step."""
        raw = raw[: TEXT_BYTES - 8]
        area = self._texts[self.rank][self.sequence & 1]
        area[:8].view(np.int64)[0] = len(raw)
        area[8 : 8 + len(raw)] = np.frombuffer(raw, np.uint8)

    def texts(self) -> list[bytes]:
        """The texts of all ranks."""
        areas: list[Any] = [pair[self.sequence & 1] for pair in self._texts]
        return [bytes(a[8 : 8 + int(a[:8].view(np.int64)[0])]) for a in areas]
