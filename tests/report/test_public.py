"""Public reports: only a reviewed public trace becomes one."""

from __future__ import annotations

import dataclasses
import json

import pytest

from mpipar.comm.trace_types import CollectiveTrace, ParallelTraceVisibility
from mpipar.errors import InvalidPublicReport
from mpipar.report import (
    PublicParallelismDecision,
    PublicParallelismReport,
    ReviewedCollectiveTrace,
)
from mpipar.units import (
    Bytes,
    CommunicationBytes,
    ParallelStrategy,
    TensorElement,
    TensorLine,
    WorldSize,
    shard_tensor_line,
)

PUBLIC, RESTRICTED, PRIVATE = ParallelTraceVisibility


@pytest.fixture
def trace() -> CollectiveTrace:
    line = TensorLine.from_values([1, 2, 3, 4])
    plan = shard_tensor_line(line, WorldSize(2), ParallelStrategy.DATA_PARALLEL)
    return CollectiveTrace.all_reduce(plan, CommunicationBytes(64))


def test_a_reviewed_public_trace_is_published(trace):
    reviewed = ReviewedCollectiveTrace(trace, PUBLIC)
    assert reviewed.release_decision is PublicParallelismDecision.PUBLISHABLE
    report = PublicParallelismReport.from_reviewed_trace(reviewed)
    assert report.trace is trace
    assert str(report.kind) == "all-reduce"
    assert report.reduced_value == TensorElement(10.0)
    assert str(report.communication_estimate) == "128 bytes"
    assert report.exact_bytes_per_rank == (Bytes(64), Bytes(64))
    assert report == PublicParallelismReport(reviewed)


def test_the_record_of_a_report_is_plain_data_and_whole(trace):
    report = PublicParallelismReport(ReviewedCollectiveTrace(trace, PUBLIC))
    assert json.loads(json.dumps(report.as_record())) == {
        "kind": "all-reduce",
        "strategy": "data-parallel",
        "visibility": "public",
        "world_size": 2,
        "reduced_value": 10.0,
        "bytes_per_rank": 64,
        "communication_estimate_bytes": 128,
        "exact_bytes_per_rank": [64, 64],
    }


@pytest.mark.parametrize("visibility", [RESTRICTED, PRIVATE])
def test_restricted_and_private_traces_are_blocked(trace, visibility):
    reviewed = ReviewedCollectiveTrace(trace, visibility)
    assert reviewed.release_decision is PublicParallelismDecision.BLOCKED
    for publish in (PublicParallelismReport.from_reviewed_trace, PublicParallelismReport):
        with pytest.raises(InvalidPublicReport, match=f"the trace is {visibility}; only"):
            publish(reviewed)


def test_there_is_no_way_round_the_review(trace):
    with pytest.raises(InvalidPublicReport, match="CollectiveTrace has no review"):
        PublicParallelismReport(trace)
    with pytest.raises(InvalidPublicReport, match=r"visibility must be .* got str"):
        ReviewedCollectiveTrace(trace, "public")
    with pytest.raises(InvalidPublicReport, match="trace must be a CollectiveTrace, got dict"):
        ReviewedCollectiveTrace({}, PUBLIC)
    report = PublicParallelismReport(ReviewedCollectiveTrace(trace, PUBLIC))
    private = ReviewedCollectiveTrace(trace, PRIVATE)
    with pytest.raises(InvalidPublicReport):
        dataclasses.replace(report, reviewed=private)
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.reviewed = private
    with pytest.raises(dataclasses.FrozenInstanceError):
        private.visibility = PUBLIC
    with pytest.raises(InvalidPublicReport, match="no other forms"):
        type("Bypass", (ReviewedCollectiveTrace,), {})
    with pytest.raises(InvalidPublicReport, match="no other forms"):
        type("Bypass", (PublicParallelismReport,), {"__post_init__": lambda self: None})
