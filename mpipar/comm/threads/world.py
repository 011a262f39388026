"""`ThreadWorld`: n ranks as threads of one process, for tests, docs and notebooks.

One rank runs at a time and hands on where it calls the communicator, so a run is repeatable: in
rank order, or in a random order fixed by a seed. When no rank can go on the world says at once
who waits for what, instead of hanging.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import traceback
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from mpipar.comm.base import Communicator
from mpipar.comm.call import Call, CommInfo, Op
from mpipar.comm.local import agree, check_message, complete, split_order
from mpipar.comm.node.memory import Memory
from mpipar.comm.request import ENDED, Request
from mpipar.comm.threads.node import over_nodes
from mpipar.comm.threads.rendezvous import Box, Meeting, Slot
from mpipar.comm.threads.turns import Turns
from mpipar.errors import CollectiveTimeout, CountOutOfRange, ParallelismError, RankFailed, rebuild

Fault = Callable[[int, Call], "str | None"]


class ThreadWorld:
    """A world of n ranks inside this process.

    Parameters
    ----------
    n_ranks : int
        Number of ranks.
    seed : int, optional
        Order in which ranks run; without it they take turns in rank order.
    deadline_s : float, optional
        Seconds after which a run that computes without calling the communicator is given up; by
        default ``MPIPAR_DEADLINE_S``, or 120.
    synchronous_sends : bool, optional
        A send ends only when its message is taken; by default as ``MPIPAR_SYNC_SENDS=1`` says.
    on_call : callable, optional
        ``on_call(world rank, call)`` may return ``"drop"`` (the message is lost), ``"crash"`` (the
        rank fails there) or ``"delay"`` (every other rank goes first); None lets the call pass.
    node_size : int, optional
        Ranks that share the memory of a simulated node, through which their calls then go; by
        default ``MPIPAR_NODE_SIZE``, or none: ranks meet without memory between them.

    Examples
    --------
    >>> ThreadWorld(3).run(lambda comm: int(comm.all_reduce(comm.rank)))
    [3, 3, 3]
    """

    def __init__(
        self,
        n_ranks: int,
        *,
        seed: int | None = None,
        deadline_s: float | None = None,
        synchronous_sends: bool | None = None,
        on_call: Fault | None = None,
        node_size: int | None = None,
    ) -> None:
        if not isinstance(n_ranks, int) or n_ranks < 1:
            raise CountOutOfRange("number of ranks", "1 or more", n_ranks)
        self.n_ranks = n_ranks
        if deadline_s is None:
            deadline_s = float(os.environ.get("MPIPAR_DEADLINE_S", "120"))
        self.deadline_s = deadline_s
        if synchronous_sends is None:
            synchronous_sends = os.environ.get("MPIPAR_SYNC_SENDS") == "1"
        self.synchronous_sends = synchronous_sends
        self.on_call = on_call
        self.seeded = seed is not None
        if node_size is None:
            node_size = int(os.environ.get("MPIPAR_NODE_SIZE", "0"))
        self.node_size = node_size
        self._random = None if seed is None else random.Random(seed)

    def run(
        self, function: Callable[..., Any], *arguments: Any, return_errors: bool = False
    ) -> list[Any]:
        """Call ``function(comm, *arguments)`` on every rank.

        Parameters
        ----------
        function : callable
            Gets this rank's world communicator first.
        *arguments
            Passed on, the same objects on every rank.
        return_errors : bool
            Put a rank's exception into the result instead of raising the first one.

        Returns
        -------
        list
            What the ranks returned, in rank order.

        Raises
        ------
        Exception
            That of the lowest rank that failed by itself, with a note that names it.
        """
        turn = Turns(self.n_ranks, self._random)
        state = _State(self, turn)
        results: list[Any] = [None] * self.n_ranks
        errors: list[BaseException | None] = [None] * self.n_ranks

        def body(rank: int) -> None:
            turn.wait(rank)
            try:
                everyone = tuple(range(self.n_ranks))
                comm: Communicator = ThreadCommunicator(state, everyone, rank, "world")
                if state.memories and isinstance(comm, ThreadCommunicator):
                    comm = over_nodes(comm, state.memories, self.node_size)
                results[rank] = function(comm, *arguments)
            except BaseException as error:
                errors[rank] = error
                state.failed[rank] = error
            finally:
                turn.leave(rank)

        threads = [
            threading.Thread(target=body, args=(r,), name=f"rank {r}", daemon=True)
            for r in range(self.n_ranks)
        ]
        for thread in threads:
            thread.start()
        turn.start()
        if not turn.finished.wait(self.deadline_s):
            frame = sys._current_frames().get(threads[turn.running].ident or 0)
            place = "".join(traceback.format_stack(frame)[-3:])
            raise CollectiveTimeout(
                f"the {self.n_ranks} ranks have not ended within {self.deadline_s:g} s; "
                f"rank {turn.running} is computing in:\n{place}"
            )
        if return_errors:
            return [r if e is None else e for r, e in zip(results, errors, strict=True)]
        own = [r for r, e in enumerate(errors) if e is not None and not isinstance(e, RankFailed)]
        for rank in own or [r for r, e in enumerate(errors) if e is not None]:
            error = errors[rank]
            if error is not None:
                error.add_note(f"raised on rank {rank} of {self.n_ranks}")
                raise error
        return results


class _State:
    """What the ranks of one run share."""

    def __init__(self, world: ThreadWorld, turns: Turns) -> None:
        self.world = world
        self.turns = turns
        self.failed: dict[int, BaseException] = {}
        self.waiting: dict[int, str] = {}
        self.verdict: ParallelismError | None = None
        self.meetings: dict[tuple[Any, ...], Meeting] = {}
        self.mail: dict[tuple[Any, ...], Box] = defaultdict(Box)
        size = world.node_size
        self.memories = [Memory.private(size) for _ in range(0, world.n_ranks, size or 1) if size]
        turns.stuck = self.give_up

    def give_up(self) -> None:
        """No rank can go on: every waiting rank gets the reason."""
        waits = "; ".join(f"rank {r} waits in {w}" for r, w in sorted(self.waiting.items()))
        if self.failed:
            rank, error = next(iter(self.failed.items()))
            kind = type(error).__name__
            self.verdict = RankFailed(f"rank {rank} raised {kind}: {error}; {waits}")
        else:
            self.verdict = CollectiveTimeout(f"no rank can go on: {waits}")


class ThreadCommunicator(Communicator):
    """A group inside a `ThreadWorld`; made by `ThreadWorld.run` and by `split`.

    Parameters
    ----------
    state : object
        What the ranks of one run share.
    ranks : tuple of int
        World ranks of the group.
    rank : int
        Rank inside the group.
    name : str
        Shown in messages.
    key : tuple
        Tells groups apart, equal on all their ranks.
    """

    def __init__(
        self,
        state: _State,
        ranks: tuple[int, ...],
        rank: int,
        name: str,
        key: tuple[Any, ...] = (),
    ) -> None:
        super().__init__(CommInfo(rank, len(ranks)), name)
        self.ranks = ranks
        self._state = state
        self._key = key
        self._n_calls = 0

    def submit(self, call: Call) -> Request:
        """Meet the other ranks.

        Parameters
        ----------
        call : Call
            Any call.

        Returns
        -------
        Request
            Ended if the call is blocking.
        """
        fault = self.arriving(call)
        if call.op in (Op.SEND, Op.RECV):
            ready, collect = self._message(call, fault == "drop")
        else:
            ready, collect = self._meet(call)
        if call.blocking:
            self._wait(call, ready)
            collect()
            return ENDED

        def advance() -> bool:
            if not ready():
                self._hand_on(1)
            if ready():
                collect()
                return True
            return False

        place = (*self._key, self._n_calls - 1)
        return Request(
            call, advance, lambda: self._missing(call, place), block=lambda: self._wait(call, ready)
        )

    def _missing(self, call: Call, place: tuple[Any, ...]) -> str:
        meeting = self._state.meetings.get(place)
        absent = [call.peer] if call.op in (Op.SEND, Op.RECV) else []
        if meeting is not None and not absent:
            absent = [rank for rank, other in enumerate(meeting.calls) if other is None]
        return f"; not arrived: ranks {', '.join(map(str, absent))}" if absent else ""

    @property
    def world_ranks(self) -> tuple[int, ...]:
        """The ranks of the group, as ranks of the world."""
        return self.ranks

    @property
    def deadline_s(self) -> float:
        """Longest wait for a call, in seconds."""
        return self._state.world.deadline_s

    def wait_until(self, call: Call, ready: Callable[[], bool]) -> None:
        """Hand on until `ready()`, which has no effects; the world says so if it never comes.

        Parameters
        ----------
        call : Call
            What is waited for.
        ready : callable
            Without effects.
        """
        self._wait(call, ready)

    def arriving(self, call: Call) -> str | None:
        """What the world does to a call before it is made: others first, or a planted fault.

        Parameters
        ----------
        call : Call
            About to be made.

        Returns
        -------
        str or None
            The fault, if any.
        """
        world, me = self._state.world, self.ranks[self.rank]
        fault = world.on_call(me, call) if world.on_call else None
        if fault == "crash":
            raise RankFailed(f"rank {me} was made to crash in {call}")
        if fault == "delay" or world.seeded:
            self._hand_on(1 if fault != "delay" else world.n_ranks)
        return fault

    def rest(self) -> None:
        """Let others run once."""
        self._hand_on(1)

    def _hand_on(self, n_turns: int) -> None:
        """Let others run first."""
        for _ in range(n_turns):
            self._state.turns.block(self.ranks[self.rank], lambda: True)

    def _wait(self, call: Call, ready: Callable[[], bool]) -> None:
        state, me = self._state, self.ranks[self.rank]
        if ready():
            return
        state.waiting[me] = f"{call} of {self.name}"
        state.turns.block(me, lambda: state.verdict is not None or ready())
        del state.waiting[me]
        if not ready() and state.verdict is not None:
            raise rebuild(type(state.verdict).__name__, str(state.verdict))

    def _meet(self, call: Call) -> tuple[Callable[[], bool], Callable[[], None]]:
        key = (*self._key, self._n_calls)
        self._n_calls += 1
        meeting = self._state.meetings.setdefault(key, Meeting(self.size))
        meeting.calls[self.rank] = call
        present = [c for c in meeting.calls if c is not None]
        if len(present) == self.size:
            del self._state.meetings[key]
            meeting.error = agree(present)
            if meeting.error is None:
                complete(present)
            meeting.done = True

        def collect() -> None:
            if meeting.error is not None:
                raise rebuild(type(meeting.error).__name__, str(meeting.error))

        return lambda: meeting.done, collect

    def _message(self, call: Call, drop: bool) -> tuple[Callable[[], bool], Callable[[], None]]:
        if call.error is not None:
            raise call.error
        sends = call.op is Op.SEND
        pair = (self.rank, call.peer) if sends else (call.peer, self.rank)
        box = self._state.mail[(*self._key, *pair, call.tag)]
        if sends:
            copy = None if call.input is None else call.input.copy()
            slot = Slot() if drop else box.send(Call(Op.SEND, copy, agreed=call.agreed))
            synchronous = self._state.world.synchronous_sends
            return lambda: slot.taken or not synchronous, lambda: None
        slot = box.recv()

        def collect() -> None:
            if slot.sent is not None:
                check_message(slot.sent, call)

        return lambda: slot.sent is not None, collect

    def split(self, color: int | None, key: int = 0, purpose: str = "split") -> Communicator | None:
        """Make one group per color. Collective over this group.

        Parameters
        ----------
        color, key, purpose
            As in `Communicator.split`.

        Returns
        -------
        Communicator or None
            The group of this rank.
        """
        number = self._n_calls
        order = split_order(self.all_gather_json([color, key, purpose]), color)
        if color is None:
            return None
        return ThreadCommunicator(
            self._state,
            tuple(self.ranks[r] for r in order),
            order.index(self.rank),
            f"{self.name}/{purpose}[{color}]",
            (*self._key, number, color),
        )
