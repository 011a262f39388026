"""The cache between real ranks, with the same bodies as on threads."""

from tests.distributed_cache.test_founding import (  # noqa: F401
    test_events_travel_and_a_flush_ends_what_was_before,
)
from tests.distributed_cache.test_model_based import (  # noqa: F401
    test_programs_on_a_fabric_that_loses_nothing,
)
from tests.distributed_cache.test_plans import *  # noqa: F403
from tests.distributed_cache.test_transfer import (  # noqa: F401
    test_a_cancelled_transfer_leaves_nothing_on_either_side,
    test_a_group_agrees_on_the_length_before_it_accepts,
    test_a_new_epoch_begins_everywhere_with_nothing,
    test_a_restarted_holder_ends_the_pins_and_the_reader_fails_cleanly,
    test_a_shorter_chain_comes_where_less_is_held_or_there_is_less_room,
    test_bytes_in_flight_are_bounded_over_all_transfers,
    test_layouts_that_do_not_fit_are_refused_on_every_rank,
    test_prefill_on_one_rank_and_decode_on_the_others,
    test_replicas_of_a_shard_share_the_readers,
    test_two_heads_to_two_stages,
)
