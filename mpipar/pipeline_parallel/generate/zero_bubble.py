"""ZB-H1 and ZB-H2 (Qi et al., arXiv 2401.10241): weight gradients fill the bubble."""

from __future__ import annotations

from mpipar.pipeline_parallel.action import Kind
from mpipar.pipeline_parallel.generate.assemble import check_sizes, in_turn, one_stage_per_rank
from mpipar.pipeline_parallel.schedule import Schedule


def zb_h1(n_ranks: int, n_microbatches: int) -> Schedule:
    """1F1B's order with each W put off until p - 1 forwards later: 1F1B's memory.

    Parameters
    ----------
    n_ranks, n_microbatches : int
        Any numbers from 1.

    Returns
    -------
    Schedule
        One stage per rank, at most p activations on each.
    """
    return _handmade("zb-h1", n_ranks, n_microbatches, 1)


def zb_h2(n_ranks: int, n_microbatches: int) -> Schedule:
    """Twice the forwards ahead of 1F1B: no bubble at F = I = W, twice the memory.

    Parameters
    ----------
    n_ranks, n_microbatches : int
        Any numbers from 1.

    Returns
    -------
    Schedule
        One stage per rank, at most 2 p - 1 activations on each.
    """
    return _handmade("zb-h2", n_ranks, n_microbatches, 2)


def _handmade(name: str, n_ranks: int, n_microbatches: int, factor: int) -> Schedule:
    check_sizes(n_ranks, n_microbatches)
    put_off = factor * (n_ranks - 1)
    kinds = []
    for rank in range(n_ranks):
        ahead = min(factor * (n_ranks - 1 - rank), n_microbatches)
        kinds.append(in_turn(n_microbatches, (Kind.F, 0), (Kind.I, ahead), (Kind.W, put_off)))
    return one_stage_per_rank(name, n_microbatches, kinds)
