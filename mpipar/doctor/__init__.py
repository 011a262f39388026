"""What is wrong here: checks of this machine, of the launcher and of the ranks of a job."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpipar.doctor.check import Check, Status, public_block, report_lines
    from mpipar.doctor.here import check_here
    from mpipar.doctor.ranks import check_ranks

_HOMES = {
    "Check": "check",
    "Status": "check",
    "check_here": "here",
    "check_ranks": "ranks",
    "public_block": "check",
    "report_lines": "check",
}

__all__ = ["Check", "Status", "check_here", "check_ranks", "public_block", "report_lines"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
