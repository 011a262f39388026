"""Requests: pending calls that own their arrays until they are waited for."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from mpipar.comm.call import Call, Op
from mpipar.errors import CollectiveTimeout, EmptyInput, RankFailed

_log = logging.getLogger("mpipar")
_SPINS = 100
_GRACE_S, _LOOK_S = (
    1.0,
    0.25,
)  # of a wait, before it looks whether a rank is lost, and between looks


class Request:
    """A call that may still be under way.

    The arrays of the call belong to the request (and to the communicator, which keeps unfinished
    requests) until `wait` or a true `test`. Dropping an unfinished request is reported to the
    logger ``mpipar`` and harms nothing.

    Parameters
    ----------
    call : Call
        What was asked.
    advance : callable or None
        Moves the call on without waiting and says whether it has ended; None for a call that has
        ended already.
    explain : callable or None
        Says who has not arrived, for the message of a deadline.
    deadline_s : float
        Seconds that `wait` waits unless told otherwise.
    block : callable or None
        Waits for the call in the transport's own way, before the first look of `wait`.
    """

    __slots__ = ("_advance", "_block", "_deadline_s", "_explain", "_result", "call", "finish")

    def __init__(
        self,
        call: Call,
        advance: Callable[[], bool] | None = None,
        explain: Callable[[], str] | None = None,
        deadline_s: float = 600.0,
        block: Callable[[], None] | None = None,
    ) -> None:
        self.call = call
        self.finish: Callable[[], Any] | None = None
        self._advance = advance
        self._explain = explain
        self._deadline_s = deadline_s
        self._block = block
        self._result: Any = None

    def test(self) -> bool:
        """Move the call on without waiting.

        Returns
        -------
        bool
            Whether it has ended; then `wait` returns at once.

        Raises
        ------
        ParallelismError
            What the call found wrong.
        """
        if self._advance is not None:
            try:
                if not self._advance():
                    return False
            except BaseException:
                self._advance = None
                self.finish = None
                raise
            self._advance = None
        if self.finish is not None:
            self._result, self.finish = self.finish(), None
        return True

    def wait(self, timeout_s: float | None = None) -> Any:
        """Wait for the end of the call.

        Parameters
        ----------
        timeout_s : float, optional
            Deadline in seconds; by default that of the communicator.

        Returns
        -------
        array, tuple or None
            What the blocking verb of the same name returns.

        Raises
        ------
        CollectiveTimeout
            If the deadline passes; the message names the ranks that have not arrived.
        RankFailed
            If a rank of this node was killed while this one waits.
        """
        if self._advance is not None and self._block is not None and timeout_s is None:
            self._block()
        if not self.test():
            limit = self._deadline_s if timeout_s is None else timeout_s
            start = time.monotonic()
            stop, look = start + limit, start + _GRACE_S
            spins = 0
            while not self.test():
                spins += 1
                if _others is not None:
                    _others()
                if spins > _SPINS:
                    pause(spins - _SPINS)
                    now = time.monotonic()
                    if now > look:
                        look = now + _LOOK_S
                        if lost := _lost():
                            raise RankFailed(f"{self.call} will not end: {lost}")
                    if now > stop:
                        missing = self._explain() if self._explain else ""
                        raise CollectiveTimeout(
                            f"{self.call} has not ended within {limit:g} s{missing}"
                        )
        return self._result

    def missing(self) -> str:
        """Who has not arrived, for the message of a deadline; empty where that is not known.

        Returns
        -------
        str
            Beginning with a semicolon.
        """
        return self._explain() if self._explain else ""

    def __del__(self) -> None:
        """Report an unfinished request; its arrays stay with the communicator."""
        if getattr(self, "_advance", None) is not None and not sys.is_finalizing():
            _log.warning("request dropped before it ended: %s", self.call)


ENDED = Request(Call(Op.BARRIER))
"""What a transport returns for a blocking call that has ended."""


_lost: Callable[[], str] = str  # nobody, where no board tells


def set_lost(lost: Callable[[], str]) -> None:
    """Set what tells long waits of this process that a rank of the job is lost.

    Parameters
    ----------
    lost : callable
        Gives a sentence, or "".
    """
    global _lost
    _lost = lost


_others: Callable[[], None] | None = None


def set_others(others: Callable[[], None]) -> None:
    """Set what moves all other calls under way of this process on, while one is waited for.

    Parameters
    ----------
    others : callable
        Does not wait.
    """
    global _others
    _others = others


_look_out: Callable[[], None] | None = None


def set_look_out(look_out: Callable[[], None] | None) -> None:
    """Set what every wait of this process calls while it waits; its exception ends the wait.

    Parameters
    ----------
    look_out : callable or None
        None for nothing.
    """
    global _look_out
    _look_out = look_out


def pause(n_turns: int) -> None:
    """Let others run while waiting: yields first, sleeps when the wait is long, and then longer.

    Parameters
    ----------
    n_turns : int
        How many turns this wait has already taken.
    """
    if _look_out is not None:
        _look_out()
    if n_turns < 2000:
        os.sched_yield()
    else:
        time.sleep(min(0.001, 0.0002 + 4e-6 * (n_turns - 2000)))


def wait_all(requests: Sequence[Request]) -> list[Any]:
    """Wait for every request.

    Parameters
    ----------
    requests : sequence of Request
        In any order.

    Returns
    -------
    list
        Their results, in the given order.
    """
    return [request.wait() for request in requests]


def wait_any(requests: Sequence[Request], timeout_s: float = 600.0) -> int:
    """Wait until one request has ended.

    Parameters
    ----------
    requests : sequence of Request
        At least one.
    timeout_s : float
        Deadline in seconds.

    Returns
    -------
    int
        Index of the first one found finished; its `wait` returns at once.

    Raises
    ------
    CollectiveTimeout
        If none ends in time.
    """
    if not requests:
        raise EmptyInput("wait_any", "no request was given; at least one is needed")
    stop = time.monotonic() + timeout_s
    turn = 0
    while True:
        for index, request in enumerate(requests):
            if request.test():
                return index
        turn += 1
        pause(turn)
        if time.monotonic() > stop:
            raise CollectiveTimeout(f"none of {len(requests)} requests ended in {timeout_s:g} s")
