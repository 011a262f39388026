"""What a transport gives the collectives of a node, and the queue of calls under way."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from mpipar.comm.call import Call
from mpipar.comm.node.arena import Arena
from mpipar.comm.node.flags import ARRIVE, STEP, Fence, Flags
from mpipar.comm.node.meeting import Waits
from mpipar.comm.request import Request


class Group(Protocol):
    """A group of node memory as a host sees it."""

    name: str
    inner: Any
    flags: Flags
    calls: Queue

    def progress(self) -> None:
        """Move pending calls on without waiting for any of them."""

    def move_on(self) -> None:
        """The same for this group's calls in node memory only."""


class Movable(Protocol):
    """What has calls under way that every wait of this rank moves on."""

    @property
    def calls(self) -> Any:
        """Says whether something can go on (``can_go_on``)."""

    def progress(self) -> None:
        """Move pending calls on without waiting for any of them."""

    def move_on(self) -> None:
        """The same, for what lies in node memory or goes in steps."""


class Host(Protocol):
    """Memory and waiting on this node, for one rank.

    Attributes
    ----------
    arena : Arena
        This rank's region.
    fence : callable or None
        Orders data and counters where the processor does not.
    n_spins : int
        Polls before the first yield.
    turns : bool
        Whether ranks run one at a time, so that every wait must hand on.
    pending : list of Movable
        Groups of this rank with calls under way, moved on by every wait.
    """

    arena: Arena
    fence: Fence | None
    n_spins: int
    turns: bool
    pending: list[Movable]

    def process_ids(self, inner: Any) -> Sequence[int] | None:
        """Processes by rank of a group, where they may copy from each other."""

    def adopt(self, group: Group) -> None:
        """Know of a fresh group."""

    def arriving(self, group: Group, call: Call) -> None:
        """A call is about to be made."""

    def rest(self, group: Group) -> None:
        """Let others run, where ranks take turns."""

    def block(self, group: Group, call: Call, ready: Callable[[], bool]) -> None:
        """Wait until `ready()`, which has no effects; fail if a peer never comes."""

    def finish(self, group: Group, request: Request) -> None:
        """Wait for a request of the transport; calls under way on other groups go on."""


class Door:
    """Lets one thread at a time in: a token that is there or not, cheaper than a lock."""

    def __init__(self) -> None:
        self.tokens: list[None] = [None]

    def enter(self) -> bool:
        """Go in, unless another thread is inside (`pop` is atomic)."""
        try:
            self.tokens.pop()
        except IndexError:
            return False
        return True

    def leave(self) -> None:
        """Let the next one in."""
        self.tokens.append(None)


class Pending:
    """One call under way: its program and what it waits for."""

    def __init__(self, call: Call, program: Waits) -> None:
        self.call, self.done = call, False
        self.error: BaseException | None = None
        self.wait: tuple[int, int] | Request | None = None
        self._program = program

    def settle(self, flags: Flags) -> bool:
        """Go on as far as possible without waiting; an error is kept for the one who waits."""
        try:
            while self._ready(flags):
                self.wait = next(self._program, None)
                if self.wait is None:
                    self.done = True
                    break
        except Exception as error:
            self.error, self.done = error, True
        return self.done

    def _ready(self, flags: Flags) -> bool:
        if isinstance(self.wait, Request):
            return self.wait.test()
        return self.wait is None or flags.reached(*self.wait)


class Queue:
    """The calls of a group that are under way, carried out in their order.

    Parameters
    ----------
    group : Group
        Whose calls.
    host : Host
        How this rank waits.
    """

    def __init__(self, group: Group, host: Host) -> None:
        self._group, self._host = group, host
        self.under_way: deque[Pending] = deque()
        self.halted: list[BaseException] = []

    def __len__(self) -> int:
        return len(self.under_way)

    def add(self, pending: Pending) -> None:
        """Put a call behind the others, and begin it if it is the first."""
        self.under_way.append(pending)
        if self._group not in self._host.pending:
            self._host.pending.append(self._group)
        self.advance()

    def advance(self) -> None:
        """Go on as far as possible without waiting."""
        while self.under_way and self.under_way[0].settle(self._group.flags):
            self.under_way.popleft()
        if not self.under_way and self._group in self._host.pending:
            self._host.pending.remove(self._group)

    @property
    def can_go_on(self) -> bool:
        """Whether `advance` would do something; without effects."""
        wait = self.under_way[0].wait if self.under_way else None
        return isinstance(wait, tuple) and self._group.flags.reached(*wait)

    def drain(self, last: Pending | None = None) -> None:
        """End the calls in order, up to `last` or all of them."""
        self.advance()
        while self.under_way and not (last is not None and last.done):
            first = self.under_way[0]
            if isinstance(first.wait, Request):
                self._host.finish(self._group, first.wait)
            elif first.wait is not None:
                self.await_flag(first.call, *first.wait)
            self.advance()

    def run(self, call: Call, program: Waits) -> None:
        """Carry a blocking call out, after those under way."""
        if self.under_way:
            self.drain()
        for what in program:
            if isinstance(what, Request):
                self._host.finish(self._group, what)
            else:
                self.await_flag(call, *what)

    def await_flag(self, call: Call, word: int, value: int) -> None:
        """Wait until all peers have come so far; a broken wait makes the group unusable."""
        flags = self._group.flags
        for _ in range(self._host.n_spins):
            if flags.reached(word, value):
                return
        try:
            self._host.block(self._group, call, lambda: flags.reached(word, value))
        except BaseException as error:
            self.halted.append(error)
            raise

    def clear(self) -> None:
        """Forget all calls, after they were broken off."""
        self.under_way.clear()
        self.halted.clear()
        if self._group in self._host.pending:
            self._host.pending.remove(self._group)

    def missing(self) -> str:
        """Who has not come as far as this rank, for the message of a deadline."""
        flags = self._group.flags
        absent = flags.absent(ARRIVE, flags.sequence) or flags.absent(STEP, flags.step)
        return f"; not arrived: ranks {', '.join(map(str, absent))}" if absent else ""
