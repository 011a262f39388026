"""Training and checkpoints over tensor-parallel ranks, with the same bodies as on threads."""

from tests.train.test_tensor_parallel import (  # noqa: F401
    test_a_run_goes_on_at_other_degrees,
    test_a_run_over_tp_is_that_of_one_rank,
    test_each_rank_writes_its_part_and_replicated_arrays_are_written_once,
    test_two_axes_are_one_rank,
)
