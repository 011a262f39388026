"""Reports that may be published: each is built from a trace that was reviewed as public."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, final

from mpipar.comm.trace_types import CollectiveKind, CollectiveTrace, ParallelTraceVisibility
from mpipar.errors import InvalidPublicReport
from mpipar.report.redact import redacted
from mpipar.units import Bytes, CommunicationBytes, TensorElement


class PublicParallelismDecision(Enum):
    """What a review came to."""

    PUBLISHABLE = "publishable"
    BLOCKED = "blocked"


@final
@dataclass(frozen=True)
class ReviewedCollectiveTrace:
    """A trace and what its reviewer decided about it.

    Attributes
    ----------
    trace : CollectiveTrace
        What was reviewed.
    visibility : ParallelTraceVisibility
        Who may see it; a mere word is refused with `InvalidPublicReport`.
    """

    trace: CollectiveTrace
    visibility: ParallelTraceVisibility

    def __init_subclass__(cls) -> None:
        raise InvalidPublicReport("review", "it has no other forms")

    def __post_init__(self) -> None:
        fields: dict[str, type] = {"trace": CollectiveTrace, "visibility": ParallelTraceVisibility}
        for name, kind in fields.items():
            found = type(getattr(self, name))
            if found is not kind:
                wrong = f"{name} must be a {kind.__name__}, got {found.__name__}"
                raise InvalidPublicReport("review", wrong)

    @property
    def release_decision(self) -> PublicParallelismDecision:
        """Publishable when the visibility is public, else blocked."""
        if self.visibility is ParallelTraceVisibility.PUBLIC:
            return PublicParallelismDecision.PUBLISHABLE
        return PublicParallelismDecision.BLOCKED


@final
@dataclass(frozen=True)
class PublicParallelismReport:
    """A trace that everybody may see; anything but a reviewed public trace is refused.

    Attributes
    ----------
    reviewed : ReviewedCollectiveTrace
        The trace with its review; `InvalidPublicReport` unless that made it publishable.
    """

    reviewed: ReviewedCollectiveTrace

    def __init_subclass__(cls) -> None:
        raise InvalidPublicReport("report", "it has no other forms")

    def __post_init__(self) -> None:
        given: object = self.reviewed
        if not isinstance(given, ReviewedCollectiveTrace):
            raise InvalidPublicReport("public report", f"a {type(given).__name__} has no review")
        if self.reviewed.release_decision is not PublicParallelismDecision.PUBLISHABLE:
            raise InvalidPublicReport(
                "public report",
                f"the trace is {self.reviewed.visibility}; only a trace that was reviewed as "
                f"{ParallelTraceVisibility.PUBLIC} can be published",
            )

    @classmethod
    def from_reviewed_trace(cls, reviewed: ReviewedCollectiveTrace) -> PublicParallelismReport:
        """Publish a trace that was reviewed as public; the constructor by its founding name.

        Parameters
        ----------
        reviewed : ReviewedCollectiveTrace
            The trace with its review.

        Returns
        -------
        PublicParallelismReport
            The report.

        Raises
        ------
        InvalidPublicReport
            For a restricted or private trace, and for anything that was not reviewed.
        """
        return cls(reviewed)

    @property
    def trace(self) -> CollectiveTrace:
        """The published trace."""
        return self.reviewed.trace

    @property
    def kind(self) -> CollectiveKind:
        """Kind of the collective."""
        return self.trace.kind

    @property
    def reduced_value(self) -> TensorElement:
        """Sum that the collective preserves."""
        return self.trace.reduced_value

    @property
    def communication_estimate(self) -> CommunicationBytes:
        """Large-world estimate of the bytes that a rank sends."""
        return self.trace.communication_estimate

    @property
    def exact_bytes_per_rank(self) -> tuple[Bytes, ...]:
        """Bytes that each rank sends."""
        return self.trace.exact_bytes_per_rank

    def as_record(self) -> dict[str, Any]:
        """Give the report as plain data, passed through the allow-list of `redacted`.

        Returns
        -------
        dict
            Numbers, words and lists, ready for JSON.
        """
        record = {
            "kind": self.kind,
            "strategy": self.trace.input.strategy,
            "visibility": self.reviewed.visibility,
            "world_size": int(self.trace.input.world_size),
            "reduced_value": float(self.reduced_value),
            "bytes_per_rank": int(self.trace.bytes_per_rank),
            "communication_estimate_bytes": int(self.communication_estimate),
            "exact_bytes_per_rank": [int(sent) for sent in self.exact_bytes_per_rank],
        }
        return redacted(record)
