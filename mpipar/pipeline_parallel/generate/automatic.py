"""An automatic schedule: the best of a search under a memory limit, for given times.

The greedy family follows the idea of Zero Bubble's heuristic (arXiv 2401.10241, section 3.1):
run ahead as memory allows until the first gradient returns, then one forward and one backward
per rank and round, with weight gradients where a rank would wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from mpipar.errors import ScheduleError
from mpipar.pipeline_parallel.action import Kind
from mpipar.pipeline_parallel.costs import Costs, Number, divide
from mpipar.pipeline_parallel.generate.assemble import check_sizes, in_turn, one_stage_per_rank
from mpipar.pipeline_parallel.generate.filling import Filling, Problem
from mpipar.pipeline_parallel.schedule import Schedule
from mpipar.pipeline_parallel.simulation import simulate


class _Policy(NamedTuple):
    wait_for_first: bool  # rather a gap before the first backward than a late first backward
    backward_first: bool  # skip a forward that would hold up the next rank's backward
    fill_short: bool  # put W also into gaps that cost nothing in total


def automatic(
    n_ranks: int,
    n_microbatches: int,
    *,
    costs: Costs | None = None,
    memory_limit: Number | None = None,
) -> Schedule:
    """The schedule of least cost (longest per-rank span) that fits into memory.

    Searches eight greedy policies and 1F1B, ZB-H1 and ZB-H2 cut down to the limit: about
    24 p m placements, half a million a second.

    Parameters
    ----------
    n_ranks, n_microbatches : int
        Any numbers from 1; one stage per rank.
    costs : Costs, optional
        Times, transfers and memory; unit times if left out.
    memory_limit : number, optional
        Most that a rank may hold, in the unit of `costs.activation` (microbatches where that is
        left out); 1F1B's memory, `n_ranks`, if left out.

    Returns
    -------
    Schedule
        With backwards split into I and W.

    Raises
    ------
    ScheduleError
        If the limit is below what one microbatch needs; the message names the least that works.
    """
    check_sizes(n_ranks, n_microbatches)
    costs = (costs or Costs()).with_activation(n_ranks, n_ranks)
    held = costs.of_stages("activation", n_ranks)
    limit = n_ranks * max(held) if memory_limit is None else memory_limit
    if limit < max(held):
        raise ScheduleError(
            f"memory_limit={limit} holds no microbatch of stage {held.index(max(held))}, which "
            f"needs {max(held)}; the least limit is {max(held)}"
        )
    found = list(_cut_down(n_microbatches, held, limit))
    problem = Problem.of(range(n_ranks), n_microbatches, costs, limit)
    greedy = [_greedy(problem, _Policy(*flags)) for flags in product((True, False), repeat=3)]
    built = [filling for filling in greedy if filling is not None]
    if built:
        found.append(min(built, key=lambda filling: filling.longest_span).schedule("auto"))
    return min(found, key=lambda schedule: simulate(schedule, costs).longest_span)


def _cut_down(n_microbatches: int, held: list[Number], limit: Number) -> Iterator[Schedule]:
    """1F1B, ZB-H1 and ZB-H2 with fewer forwards ahead where memory is short."""
    room = [n_microbatches if h == 0 else int(divide(limit, h)) - 1 for h in held]
    hops = len(held) - 1
    for factor, put_off in ((1, False), (1, True), (2, True)):
        ahead, rows = n_microbatches, []
        for rank, most in enumerate(room):
            ahead = min(ahead, factor * (hops - rank), most)
            delay = max(ahead, min(factor * hops, most)) if put_off else ahead
            rows.append(in_turn(n_microbatches, (Kind.F, 0), (Kind.I, ahead), (Kind.W, delay)))
        yield one_stage_per_rank("auto", n_microbatches, rows)


def _greedy(problem: Problem, policy: _Policy) -> Filling | None:
    """One pass under a policy, or None if it runs out of memory."""
    built = Filling(problem)
    try:
        _run_ahead(built, policy)
        for _ in range(1, problem.n_microbatches):
            _forwards(built, policy)
            _backwards(built, policy)
    except ScheduleError:
        return None
    built.finish()
    return built


def _run_ahead(built: Filling, policy: _Policy) -> None:
    """Microbatch 0 goes there and back, with as many forwards as fit before it returns."""
    problem, n_ranks = built.problem, len(built.clock)
    forward, backward, _ = problem.time
    for rank in range(n_ranks):
        built.put(Kind.F, rank)
    extra = [0] * n_ranks
    returns = built.clock[-1] + backward[-1]
    for rank in reversed(range(n_ranks - 1)):
        memory, clock = built.memory[rank], built.clock[rank]
        arrival = returns + problem.lag[rank]
        while (
            1 + extra[rank] < problem.n_microbatches
            and memory + problem.change[Kind.F][rank] <= problem.limit
        ):
            if clock + forward[rank] > arrival if policy.wait_for_first else clock >= arrival:
                break
            memory += problem.change[Kind.F][rank]
            clock += forward[rank]
            extra[rank] += 1
        returns = max(clock, arrival) + backward[rank]
    for rank in range(1, n_ranks):
        if 1 + extra[rank] < problem.n_microbatches:
            extra[rank] = max(min(extra[rank], extra[rank - 1] - 1), 0)
    for rank in range(n_ranks):
        for _ in range(extra[rank]):
            built.put(Kind.F, rank)
    for rank in reversed(range(n_ranks)):
        built.put(Kind.I, rank)


def _forwards(built: Filling, policy: _Policy) -> None:
    """A forward on the ranks up to the first that has none to run or had better not."""
    n_ranks, done = len(built.clock), built.count[Kind.F]
    wanted = [
        done[rank] < built.problem.n_microbatches
        and not (policy.backward_first and _holds_up(built, rank))
        for rank in range(n_ranks)
    ]
    for rank in reversed(range(n_ranks - 1)):
        wanted[rank] = wanted[rank] and wanted[rank + 1]
    for rank in range(n_ranks):
        if wanted[rank]:
            built.make_room(rank, rank)
            built.fill(Kind.F, rank, short=policy.fill_short, long=True)
            built.put(Kind.F, rank)


def _backwards(built: Filling, policy: _Policy) -> None:
    """A backward on every rank, last rank first."""
    for rank in reversed(range(len(built.clock))):
        built.fill(Kind.I, rank, short=policy.fill_short, long=True)
        if rank == 0 and built.count[Kind.F][0] == built.problem.n_microbatches:
            while built.waiting[0]:
                built.put_weight(0)
        built.put(Kind.I, rank)


def _holds_up(built: Filling, rank: int) -> bool:
    """Whether a forward here would end after the next rank's coming backward returns."""
    done, problem = built.count[Kind.F], built.problem
    if rank + 1 == len(built.clock) or done[rank] < done[rank + 1] + 2:
        return False
    forward, _, weight = (times[rank] for times in problem.time)
    ahead = problem.time[Kind.F][rank + 1] + problem.time[Kind.I][rank + 1]
    returns = built.clock[rank + 1] + ahead + problem.lag[rank]
    clock = built.clock[rank]
    if clock >= returns:
        return True
    excess = built.memory[rank] + problem.change[Kind.F][rank] - problem.limit
    freed = -problem.change[Kind.W][rank]
    if excess > 0 and freed > 0:
        clock += min(-(-excess // freed), len(built.waiting[rank])) * weight
    if clock + forward <= returns:
        return False
    return bool(returns - built.clock[rank] <= built.most_idle - built.idle[rank])
