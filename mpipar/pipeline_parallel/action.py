"""The letters of a pipeline schedule: kinds, actions, overlapped pairs, messages.

An action prints as stage, kind, microbatch: ``2F0``, ``3SEND_F1``, ``1REDUCE_GRAD``; a forward
and a backward that run together print as ``(0F7;7B3)OVERLAP_F_B``. This is the grammar of
PyTorch's pipelining.
"""

from __future__ import annotations

import re
from enum import IntEnum
from typing import Literal, NamedTuple, TypeAlias

from mpipar.errors import ScheduleError


class Kind(IntEnum):
    """What an action does; the value is what a schedule's `kind` array stores."""

    F = 0
    I = 1
    W = 2
    B = 3
    SEND_F = 4
    RECV_F = 5
    SEND_B = 6
    RECV_B = 7
    REDUCE_GRAD = 8

    @property
    def is_compute(self) -> bool:
        """True for F, I, W and B."""
        return self <= Kind.B

    @property
    def is_communication(self) -> bool:
        """True for the two sends and the two receives."""
        return Kind.SEND_F <= self <= Kind.RECV_B


class Message(NamedTuple):
    """The key of one transfer: unique in a step, so messages of two equal peers never mix.

    `boundary` is the lower of the two stages; direction "forward" carries an activation from
    stage `boundary` up, "backward" a gradient down to it.
    """

    direction: Literal["forward", "backward"]
    boundary: int
    microbatch: int


class Action(NamedTuple):
    """One action: a stage, a kind and a microbatch (None for REDUCE_GRAD)."""

    stage: int
    kind: Kind
    microbatch: int | None = None

    def __str__(self) -> str:
        number = "" if self.microbatch is None else str(self.microbatch)
        return f"{self.stage}{self.kind.name}{number}"

    @property
    def message(self) -> Message:
        """The message that a send or a receive moves; its two ends give the same one."""
        if not self.kind.is_communication or self.microbatch is None:
            raise ScheduleError(f"{self} moves no message: only sends and receives do")
        forward = self.kind in (Kind.SEND_F, Kind.RECV_F)
        below = self.kind in (Kind.SEND_F, Kind.RECV_B)
        return Message(
            "forward" if forward else "backward",
            self.stage if below else self.stage - 1,
            self.microbatch,
        )


class OverlappedPair(NamedTuple):
    """A forward and a backward that run together and end together."""

    forward: Action
    backward: Action

    def __str__(self) -> str:
        return f"({self.forward};{self.backward})OVERLAP_F_B"


Cell: TypeAlias = Action | OverlappedPair

_ACTION = re.compile(r"(\d+)(SEND_F|RECV_F|SEND_B|RECV_B|REDUCE_GRAD|F|I|W|B)(\d*)")
_PAIR = re.compile(r"\(([^;()]+);([^;()]+)\)OVERLAP_F_B")


def parse_action(text: str) -> Cell:
    """Read one action, the inverse of ``str``.

    Parameters
    ----------
    text : str
        Such as ``2F0`` or ``(0F7;7B3)OVERLAP_F_B``; blanks around it are ignored.

    Returns
    -------
    Action or OverlappedPair
        What the text says.

    Raises
    ------
    ScheduleError
        If the text is no action.
    """
    text = text.strip()
    if pair := _PAIR.fullmatch(text):
        first, second = parse_action(pair[1]), parse_action(pair[2])
        if isinstance(first, Action) and isinstance(second, Action):
            kinds = (first.kind, second.kind)
            if kinds not in ((Kind.F, Kind.B), (Kind.F, Kind.I)):
                raise ScheduleError(f"{text!r}: a pair is a forward, then a backward (F;B or F;I)")
            return OverlappedPair(first, second)
    match = _ACTION.fullmatch(text)
    if match is None:
        raise ScheduleError(
            f"{text!r} is no action: write stage, kind, microbatch as in 2F0 or 3SEND_F1; "
            f"kinds are {', '.join(kind.name for kind in Kind)}"
        )
    kind = Kind[match[2]]
    if (kind is Kind.REDUCE_GRAD) == bool(match[3]):
        needs = "takes no microbatch" if match[3] else "needs a microbatch"
        raise ScheduleError(f"{text!r}: {kind.name} {needs}")
    return Action(int(match[1]), kind, int(match[3]) if match[3] else None)
