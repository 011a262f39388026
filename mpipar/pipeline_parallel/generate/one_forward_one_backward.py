"""1F1B, the memory-saving order of PipeDream-Flush (Narayanan et al. 2021)."""

from __future__ import annotations

from mpipar.pipeline_parallel.action import Kind
from mpipar.pipeline_parallel.generate.assemble import check_sizes, in_turn, one_stage_per_rank
from mpipar.pipeline_parallel.schedule import Schedule


def one_forward_one_backward(n_ranks: int, n_microbatches: int) -> Schedule:
    """Rank r runs p - 1 - r forwards ahead, then one forward and one backward in turn.

    Parameters
    ----------
    n_ranks, n_microbatches : int
        Any numbers from 1.

    Returns
    -------
    Schedule
        One stage per rank; as long as GPipe, but rank r holds p - r activations at most.
    """
    check_sizes(n_ranks, n_microbatches)
    kinds = []
    for rank in range(n_ranks):
        ahead = min(n_ranks - 1 - rank, n_microbatches)
        kinds.append(in_turn(n_microbatches, (Kind.F, 0), (Kind.B, ahead)))
    return one_stage_per_rank("1f1b", n_microbatches, kinds)
