"""The record of a run of real processes, with the same bodies as on threads."""

from tests.report.test_views import (  # noqa: F401
    test_a_run_of_calls_becomes_typed_traces_with_exact_bytes,
)
