"""ZB-V (Qi et al., arXiv 2401.10241, section 6): two chunks per rank, there and back."""

from __future__ import annotations

from itertools import product
from typing import Any

from mpipar.pipeline_parallel.action import Kind
from mpipar.pipeline_parallel.costs import Costs
from mpipar.pipeline_parallel.generate.assemble import check_sizes
from mpipar.pipeline_parallel.generate.filling import Filling, Problem
from mpipar.pipeline_parallel.schedule import Schedule, placement


def zb_v(n_ranks: int, n_microbatches: int, *, costs: Costs | None = None) -> Schedule:
    """The V-shaped zero-bubble schedule: 1F1B's memory, no bubble at F = I = W.

    Stage s and stage 2 p - 1 - s share a rank, so the last forward and the first backward of a
    microbatch meet on rank 0. The order adapts to the costs. Four variants are built, about
    6 p m placements each (a million a second), and the one that idles least is kept.

    Parameters
    ----------
    n_ranks, n_microbatches : int
        Any numbers from 1.
    costs : Costs, optional
        Of the chunks (half a rank's share each); unit times if left out.

    Returns
    -------
    Schedule
        With ``2 * n_ranks`` stages; at most `n_ranks` whole stages' activations on each rank.
    """
    check_sizes(n_ranks, n_microbatches)
    owner = placement("v", n_ranks, 2 * n_ranks)
    problem = Problem.of(owner, n_microbatches, costs or Costs(), n_ranks)
    flags = product((True, False), repeat=2)
    variants = (_refine(problem, first, forward) for first, forward in flags)
    return min(variants, key=lambda built: built.most_idle).schedule("zb-v")


def _refine(problem: Problem, before_first: bool, before_forward: bool) -> Filling:
    """Build again while it helps, granting each rank what it idled less than the worst one."""
    built = _build(problem, before_first, before_forward, None)
    while True:
        again = _build(problem, before_first, before_forward, built.idle)
        if again.most_idle >= built.most_idle:
            return built
        built = again


def _build(
    problem: Problem, before_first: bool, before_forward: bool, granted: list[Any] | None
) -> Filling:
    """One pass: after the warm-up, every rank runs one I and then one F per round."""
    built = Filling(problem)
    n_ranks = len(built.clock)
    spare = [0] * n_ranks if granted is None else [max(granted) - idle for idle in granted]
    _warm_up(built)
    while any(done < problem.n_microbatches for done in built.count[Kind.I]):
        _backwards(built, before_first, spare)
        _forwards(built, before_forward, spare)
    built.finish()
    return built


def _warm_up(built: Filling) -> None:
    """Microbatch 0 goes there and back; ranks run ahead with what fits before it returns."""
    n_ranks, m = len(built.clock), built.problem.n_microbatches
    forward, turn = built.problem.time[Kind.F], 2 * n_ranks - 1
    done = built.count[Kind.F]
    for stage in range(n_ranks + 1):
        built.put(Kind.F, stage)
    for rank in reversed(range(n_ranks - 1)):
        arrival = built.arrival(Kind.F, turn - rank)
        ahead = (2 + 2 * rank) * built.problem.change[Kind.F][rank]
        while (
            built.memory[rank] + ahead <= built.problem.limit
            and built.clock[rank] + forward[rank] <= arrival
            and done[rank] < m - rank
        ):
            for stage in range(rank + 1):
                built.put(Kind.F, stage)
        built.put(Kind.F, turn - rank)
    second = False
    for rank in range(1, n_ranks):
        mine, before = turn - rank, turn - rank + 1
        while (
            done[rank] + done[mine] < done[rank - 1] + done[before]
            or done[mine] <= done[before] < m
        ):
            for other in range(n_ranks - 1, rank - 1, -1):
                stage = turn - other if second else other
                if done[stage] < m and built.arrival(Kind.F, stage) is not None:
                    built.put(Kind.F, stage)
            second = not second


def _backwards(built: Filling, before_first: bool, spare: list[Any]) -> None:
    """One I per rank: on its way back to stage 0 if there is one, else fresh from the loss."""
    n_ranks, m = len(built.clock), built.problem.n_microbatches
    done, turn = built.count[Kind.I], 2 * n_ranks - 1
    back: list[int] = []
    fresh: list[int] = []
    for rank in range(n_ranks):
        returns = done[rank] < done[turn - rank] and (
            rank == n_ranks - 1 or done[turn - rank] >= m or built.arrival(Kind.I, rank) is not None
        )
        (back if returns else fresh).append(rank)
    for rank in reversed(back):
        built.fill(Kind.I, rank, short=False, long=True, spare=spare[rank])
        built.put(Kind.I, rank)
    for rank in fresh:
        if done[turn - rank] >= m or built.arrival(Kind.I, turn - rank) is None:
            continue  # only with fewer microbatches than ranks
        built.fill(Kind.I, turn - rank, short=False, long=before_first, spare=spare[rank])
        built.put(Kind.I, turn - rank)


def _forwards(built: Filling, before_forward: bool, spare: list[Any]) -> None:
    """One F per rank: the second chunk if its input is there, else the first."""
    n_ranks, m = len(built.clock), built.problem.n_microbatches
    done, turn = built.count[Kind.F], 2 * n_ranks - 1
    for rank in range(n_ranks):
        stage = turn - rank
        if done[stage] >= m:
            continue
        if done[stage] >= done[rank] or built.arrival(Kind.F, stage) is None:
            stage = rank
            if done[rank] >= m or built.arrival(Kind.F, rank) is None:
                continue
        built.make_room(rank, stage)
        built.fill(Kind.F, stage, short=False, long=before_forward, spare=spare[rank])
        built.put(Kind.F, stage)
