"""Prefixes from another replica, with the same body as on threads."""

from tests.generate.test_fetching import (  # noqa: F401
    test_all_other_ranks_fetch_what_rank_0_computed,
)
