"""One outcome of a test from those of its ranks."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from mpipar.errors import RankFailed

PASSED, FAILED, SKIPPED, XFAILED, BROKEN_OFF, IDLE = (
    "passed",
    "failed",
    "skipped",
    "xfailed",
    "broken off",
    "idle",
)


@dataclass(frozen=True)
class Outcome:
    """How a test went on one rank.

    Attributes
    ----------
    kind : str
        One of "passed", "failed", "skipped", "xfailed", "broken off" (by another rank) and "idle".
    reason : str
        One line.
    text : str
        The whole report.
    """

    kind: str
    reason: str = ""
    text: str = ""


def kind_of(error: BaseException | None) -> str:
    """What an exception of the body means.

    Parameters
    ----------
    error : BaseException or None
        None if the body came to its end.

    Returns
    -------
    str
        A kind of `Outcome`.
    """
    if error is None:
        return PASSED
    if isinstance(error, pytest.skip.Exception):
        return SKIPPED
    if isinstance(error, pytest.xfail.Exception):
        return XFAILED
    return BROKEN_OFF if isinstance(error, RankFailed) else FAILED


def one_line(error: BaseException | None) -> str:
    """An exception as one line."""
    if error is None:
        return ""
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return first if isinstance(error, pytest.skip.Exception) else f"{type(error).__name__}: {first}"


def judge(outcomes: Sequence[Outcome]) -> tuple[str, str]:
    """The outcome of the test, and why.

    Parameters
    ----------
    outcomes : sequence of Outcome
        One a rank, in rank order.

    Returns
    -------
    tuple of str
        Kind, and a line that names ranks and reasons; empty where all ranks passed.
    """
    ranks: dict[tuple[str, str], list[int]] = {}
    for rank, outcome in enumerate(outcomes):
        if outcome.kind != IDLE:
            reason = "" if outcome.kind == BROKEN_OFF else outcome.reason
            ranks.setdefault((outcome.kind, reason), []).append(rank)
    kinds = {kind for kind, _ in ranks}
    if kinds <= {PASSED}:
        return PASSED, ""
    parts = [
        f"{kind} on rank{'s' * (len(members) > 1)} {', '.join(map(str, members))}"
        + (f" ({reason})" if reason else "")
        for (kind, reason), members in sorted(ranks.items(), key=lambda i: _WEIGHT[i[0][0]])
    ]
    line = f"{'; '.join(parts)}; {len(outcomes)} ranks"
    if len(kinds) == 1:
        kind = kinds.pop()
        return (FAILED if kind == BROKEN_OFF else kind), line
    if XFAILED in kinds and not kinds & {FAILED, SKIPPED}:
        return XFAILED, line
    return FAILED, line if FAILED in kinds else f"the ranks disagree: {line}"


_WEIGHT = {FAILED: 0, XFAILED: 1, SKIPPED: 2, BROKEN_OFF: 3, PASSED: 4}


def raise_agreed(results: Sequence[Any]) -> None:
    """Raise what the threads of one test agree on.

    Parameters
    ----------
    results : sequence
        One a rank: an exception, or anything else for a body that came to its end.

    Raises
    ------
    BaseException
        The first rank's own failure, with notes that name ranks and reasons.
    """
    __tracebackhide__ = True
    errors = [r if isinstance(r, BaseException) else None for r in results]
    kind, line = judge([Outcome(kind_of(e), one_line(e)) for e in errors])
    if kind == PASSED:
        return
    of_kind = [(r, e) for r, e in enumerate(errors) if e is not None and kind_of(e) == kind]
    if kind == FAILED and not of_kind:
        of_kind = [(r, e) for r, e in enumerate(errors) if kind_of(e) == BROKEN_OFF and e]
    if not of_kind:
        pytest.fail(line, pytrace=False)
    first = of_kind[0][1]
    if kind == FAILED:
        first.add_note(line)
        for other, error in of_kind[1:]:
            if one_line(error) != one_line(first):
                trace = "".join(traceback.format_exception(error, limit=-3))
                first.add_note(f"rank {other}:\n{trace}")
    raise first
