"""The bodies of `tests/distributed_cache/test_replay.py` that take ranks, on real ones."""

from tests.distributed_cache.test_replay import (  # noqa: F401
    test_ranks_that_share_the_caches_out_count_the_same,
    test_the_whole_trace_on_four_ranks_of_two_caches,
)
