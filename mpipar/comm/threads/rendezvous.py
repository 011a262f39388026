"""Where the ranks of a `ThreadWorld` meet: one collective of a group, one channel of messages."""

from __future__ import annotations

from collections import deque

from mpipar.comm.call import Call
from mpipar.errors import ParallelismError


class Meeting:
    """One collective of one group: the calls that have come, then what they gave."""

    def __init__(self, n: int) -> None:
        self.calls: list[Call | None] = [None] * n
        self.done = False
        self.error: ParallelismError | None = None


class Slot:
    """One message: sent, posted for, or both."""

    def __init__(self) -> None:
        self.sent: Call | None = None
        self.taken = False


class Box:
    """Messages of one tag between two ranks; receives match in the order of their posting."""

    def __init__(self) -> None:
        self.unmatched_sends: deque[Slot] = deque()
        self.unmatched_recvs: deque[Slot] = deque()

    def send(self, call: Call) -> Slot:
        slot = self.unmatched_recvs.popleft() if self.unmatched_recvs else Slot()
        slot.taken = slot.taken or False
        if not slot.taken:
            self.unmatched_sends.append(slot)
        slot.sent = call
        return slot

    def recv(self) -> Slot:
        if self.unmatched_sends:
            slot = self.unmatched_sends.popleft()
        else:
            slot = Slot()
            self.unmatched_recvs.append(slot)
        slot.taken = True
        return slot
