"""Between pytest's reports and outcomes of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from _pytest._code.code import TerminalRepr

from mpipar.testing.verdict import BROKEN_OFF, FAILED, IDLE, PASSED, SKIPPED, XFAILED, Outcome


def outcome_of(reports: Sequence[Any]) -> Outcome:
    """How a test went on this rank so far.

    Parameters
    ----------
    reports : sequence of pytest.TestReport
        Of its phases, in order; the last one decides.

    Returns
    -------
    Outcome
        With the whole text of a failure and what was captured.
    """
    if not reports:
        return Outcome(PASSED)
    report = reports[-1]
    if hasattr(report, "wasxfail"):
        return Outcome(PASSED if report.passed else XFAILED, str(report.wasxfail))
    if report.passed:
        return Outcome(PASSED)
    if report.skipped:
        reason = str(report.longrepr[2]).removeprefix("Skipped: ")
        return Outcome(IDLE if reason.startswith("idle:") else SKIPPED, reason)
    if str(report.longrepr).startswith("[XPASS(strict)]"):
        return Outcome(PASSED)
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = str(crash.message if crash else report.longreprtext).strip().splitlines()
    text = "\n".join([report.longreprtext, *(f"{name}\n{body}" for name, body in report.sections)])
    kind = BROKEN_OFF if report.mpipar_broken_off else FAILED
    return Outcome(kind, f"{report.when}: {lines[0] if lines else 'failed'}", text)


class Joint(TerminalRepr):
    """The failures of all ranks, as one report.

    Parameters
    ----------
    line : str
        Who failed, and why.
    outcomes : sequence of Outcome
        One a rank.
    """

    def __init__(self, line: str, outcomes: Sequence[Outcome]) -> None:
        self.line = line
        self.outcomes = outcomes
        self.reprcrash = SimpleNamespace(message=line, path="", lineno=0)

    def toterminal(self, tw: Any) -> None:
        """Write it: own failures in full, one line for ranks that were broken off."""
        own = any(o.kind == FAILED for o in self.outcomes)
        for rank, outcome in enumerate(self.outcomes):
            if outcome.text and (outcome.kind == FAILED or not own):
                tw.sep("-", f"rank {rank} of {len(self.outcomes)}")
                tw.line(outcome.text)
        tw.line(self.line, red=True)


def set_outcome(report: Any, kind: str, why: Any) -> None:
    """Make a report say what all ranks together say.

    Parameters
    ----------
    report : pytest.TestReport
        Of this rank.
    kind : str
        A kind of `Outcome`.
    why : Joint or str
        What is shown.
    """
    if kind == FAILED:
        report.outcome, report.longrepr = "failed", why
        report.sections = []
        vars(report).pop("wasxfail", None)
    elif kind == XFAILED and not hasattr(report, "wasxfail"):
        report.outcome, report.wasxfail = "skipped", str(why)
        report.longrepr = why
    elif kind == XFAILED:
        report.outcome = "skipped"
