"""Reviewed reports and the redaction of what they publish."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpipar.report.public import (
        PublicParallelismDecision,
        PublicParallelismReport,
        ReviewedCollectiveTrace,
    )
    from mpipar.report.redact import PUBLIC_FIELDS, redacted

_HOMES = {
    "PUBLIC_FIELDS": "redact",
    "PublicParallelismDecision": "public",
    "PublicParallelismReport": "public",
    "ReviewedCollectiveTrace": "public",
    "redacted": "redact",
}

__all__ = [
    "PUBLIC_FIELDS",
    "PublicParallelismDecision",
    "PublicParallelismReport",
    "ReviewedCollectiveTrace",
    "redacted",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
