"""One check: verdict, reason, what to do. Lists of them as lines, as JSON, as a public block."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final


class Status(StrEnum):
    """Verdict of a check; only `FAIL` blocks work."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    NOT_APPLICABLE = "n/a"


@dataclass(frozen=True)
class Check:
    """What one check found.

    Parameters
    ----------
    name : str
        Of the check, from the program text.
    status : Status
        Verdict.
    reason : str
        What was seen.
    fix : str
        What to do about it; "" where nothing needs doing.
    facts : mapping
        Numbers, flags, versions and words of `WORDS` that may be published.
    """

    name: str
    status: Status
    reason: str
    fix: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The same as JSON values.

        Returns
        -------
        dict
            By field.
        """
        return {**self.__dict__, "status": str(self.status), "facts": dict(self.facts)}


WORDS: Final = frozenset(
    {
        *("Open MPI", "MPICH", "Intel MPI", "MVAPICH", "unknown MPI"),
        *("Open MPI mpirun", "MPICH mpiexec", "PALS mpiexec", "jsrun", "Flux", "prterun"),
        *("srun --mpi=pmix", "srun --mpi=pmi2", "srun --mpi=none", "pmix", "pmi2", "none", "all"),
        *("linux", "darwin"),
    }
)
"""Every word that a fact may be."""

_VERSION: Final = re.compile(r"\d{1,4}(\.\d{1,5}){1,3}")


def _public(value: Any) -> Any:
    """The value itself if it can hold neither a name nor a path, else None."""
    if isinstance(value, bool | int | float):
        return value
    if isinstance(value, list | tuple):
        items = [_public(item) for item in value]
        return None if None in items else items
    is_harmless = isinstance(value, str) and (value in WORDS or _VERSION.fullmatch(value))
    return value if is_harmless else None


def guarded(name: str, check: Callable[[], Check | Iterable[Check]]) -> list[Check]:
    """Run a check; one that breaks is itself a finding and stops no other.

    Parameters
    ----------
    name : str
        Of the check, should it break.
    check : callable
        Gives one or several findings.

    Returns
    -------
    list of Check
        What it found.
    """
    try:
        found = check()
    except Exception as error:
        reason = f"the check itself broke: {type(error).__name__}: {error}"
        return [Check(name, Status.WARN, reason)]
    return [found] if isinstance(found, Check) else list(found)


def report_lines(checks: Sequence[Check]) -> str:
    """One line a check, its fix below it, and a last line that counts.

    Parameters
    ----------
    checks : sequence of Check
        In the order to be printed.

    Returns
    -------
    str
        Text.
    """
    width = max((len(check.name) for check in checks), default=0)
    lines = []
    for check in checks:
        mark = f"[{check.status}]"
        lines.append(f"{mark:<6} {check.name:<{width}}  {check.reason}")
        if check.fix:
            lines.append(f"{'':<6} {'':<{width}}  fix: {check.fix}")
    counts = {status: sum(check.status is status for check in checks) for status in Status}
    lines.append(", ".join(f"{n} {status}" for status, n in counts.items() if n) or "no checks")
    return "\n".join(lines)


def public_block(checks: Sequence[Check]) -> str:
    """A block to paste into an issue: no host, user, path, address or identifier can be in it.

    Parameters
    ----------
    checks : sequence of Check
        Their reasons are left out, and so is every fact that is neither a number nor a version
        nor one of `WORDS`.

    Returns
    -------
    str
        Markdown.
    """
    lines = ["```"]
    for check in checks:
        facts = ((name, _public(value)) for name, value in check.facts.items())
        told = ", ".join(f"{name}={value}" for name, value in facts if value is not None)
        lines.append(f"[{check.status}] {check.name}{': ' if told else ''}{told}")
    return "\n".join([*lines, "```"])
