"""The rungs of the ladder on real ranks."""

from tests.docs.test_ladder import (  # noqa: F401
    test_a_rung_runs_on_any_ranks_and_shows_before_and_after,
)
