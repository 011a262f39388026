"""Timing a schedule: when each action runs, how long ranks idle, what they must remember."""

from __future__ import annotations

from typing import Literal, TypeAlias

import numpy as np

from mpipar.errors import ScheduleError
from mpipar.pipeline_parallel.action import Kind
from mpipar.pipeline_parallel.costs import Costs, Number, from_ticks, to_ticks
from mpipar.pipeline_parallel.graph import Places, Times, data_edges, walk
from mpipar.pipeline_parallel.schedule import NONE, Bools, Ints, Schedule
from mpipar.pipeline_parallel.timeline import Timeline

WrapTransfers: TypeAlias = Literal["all", "first_of_group_only"]


def simulate(
    schedule: Schedule, costs: Costs | None = None, *, wrap_transfers: WrapTransfers = "all"
) -> Timeline:
    """Time every action: each starts when its rank is free and its inputs have arrived.

    Sends never block, transfers of different messages overlap freely. A lowered schedule takes
    the times of its computation; its sends and receives are drawn while their message travels.
    Cost: one to three passes over the actions, several million a second.

    Parameters
    ----------
    schedule : Schedule
        A valid schedule, compute-only or lowered.
    costs : Costs, optional
        Left out, unit times: F = I = W = 1, B = 2, no transfer time.
    wrap_transfers : {"all", "first_of_group_only"}
        "all" charges every message. "first_of_group_only" omits, on the way back from the last
        rank's chunk to the first rank's next one (and in reverse), the wait for all but the
        first microbatch of each group of `n_ranks`: the shortcut behind the published
        interleaved column of Zero Bubble, kept to compare with it.

    Returns
    -------
    Timeline
        Exact (ints or Fractions) if all costs are.

    Raises
    ------
    ScheduleError
        If the schedule is stuck; `validate` says why.
    """
    costs = costs or Costs()
    places = Places(schedule)
    edge = data_edges(places)
    if wrap_transfers == "first_of_group_only":
        edge = np.where(_later_wraps(schedule, edge), NONE, edge)
    elif wrap_transfers != "all":
        raise ScheduleError(
            f"wrap_transfers={wrap_transfers!r}: use 'all' or 'first_of_group_only'"
        )
    duration, lag, ticks = _tick_tables(schedule, costs, edge)
    start, end, heads = walk(schedule, edge, duration, lag)
    if (heads != schedule.offsets[1:]).any():
        rank = int(np.flatnonzero(heads != schedule.offsets[1:])[0])
        raise ScheduleError(f"rank {rank} is stuck: this schedule cannot run; see validate()")
    if schedule.is_lowered:
        _draw_messages(places, start, end, lag)
    return Timeline(schedule, start, end, ticks, peak_memory(schedule, costs))


def peak_memory(schedule: Schedule, costs: Costs | None = None) -> tuple[Number, ...]:
    """The most that each rank holds at once, in the unit of `Costs.activation`.

    A forward adds its stage's activation when it starts; B, or I and W in their shares, give it
    back when they end. The order of a rank's list decides, not the times.

    Parameters
    ----------
    schedule : Schedule
        A valid schedule.
    costs : Costs, optional
        Only `activation` and `held_for_weight` matter; left out, whole stages are counted.

    Returns
    -------
    tuple of number
        One per rank.
    """
    n_stages = schedule.n_stages
    costs = (costs or Costs()).with_activation(schedule.n_ranks, n_stages)
    held = costs.of_stages("activation", n_stages)
    keep = [h * costs.held_for_weight for h in held]
    gone = [k - h for h, k in zip(held, keep, strict=True)]
    (plus, at_input, at_weight), ticks = to_ticks([held, gone, keep], len(schedule))
    table = np.zeros((len(Kind), n_stages), dtype=plus.dtype)
    table[Kind.F], table[Kind.I], table[Kind.W], table[Kind.B] = plus, at_input, -at_weight, -plus
    level = np.cumsum(table[schedule.kind, schedule.stage])
    before = np.concatenate([np.zeros(1, level.dtype), level])[schedule.offsets[:-1]]
    sizes = np.diff(schedule.offsets)
    peaks = [
        level[low : low + n].max() - base if n else 0
        for low, n, base in zip(schedule.offsets.tolist(), sizes.tolist(), before, strict=False)
    ]
    return tuple(from_ticks(peak, ticks) for peak in peaks)


def _later_wraps(schedule: Schedule, edge: Ints) -> Bools:
    """Edges between the last and the first rank, past the first microbatch of their group."""
    n_ranks = schedule.n_ranks
    other = schedule.stage_to_rank[schedule.stage[edge]]
    ends = np.minimum(other, schedule.rank) == 0
    ends &= np.maximum(other, schedule.rank) == n_ranks - 1
    ends &= other != schedule.rank
    wraps = np.abs(schedule.stage[edge] - schedule.stage) == 1
    low = np.minimum(schedule.stage[edge], schedule.stage)
    wraps &= ends & (schedule.stage_to_rank[low] == n_ranks - 1)
    later: Bools = wraps & (edge != NONE) & (schedule.microbatch % n_ranks != 0)
    return later


def _tick_tables(schedule: Schedule, costs: Costs, edge: Ints) -> tuple[Times, Times, int]:
    """Duration (of a pair, at its second half) and lag of each action, ticks per microsecond."""
    n = schedule.n_stages
    groups = [costs.of_stages(f"{field}_us", n) for field in ("forward", "input", "weight")]
    groups += [costs.full_backward(n), [0, *costs.transfers(n), 0]]
    groups += [[] if costs.pair_us is None else [costs.pair_us]]
    (*compute, transfer, pair), ticks = to_ticks(groups, 2 * len(schedule))
    table = np.zeros((len(Kind), n), dtype=transfer.dtype)
    for kind, times in zip((Kind.F, Kind.I, Kind.W, Kind.B), compute, strict=True):
        table[kind] = times
    lag = np.zeros(len(schedule), dtype=transfer.dtype)
    far = edge != NONE
    far &= schedule.stage_to_rank[schedule.stage[edge]] != schedule.rank
    lag[far] = transfer[np.maximum(schedule.stage[edge[far]], schedule.stage[far])]
    duration = table[schedule.kind, schedule.stage]
    first = np.flatnonzero(schedule.overlapped)
    duration[first + 1] = pair[0] if pair.size else duration[first] + duration[first + 1]
    return duration, lag, ticks


def _draw_messages(places: Places, start: Times, end: Times, lag: Times) -> None:
    """Give sends and receives the time that their message travels."""
    consumers = (places.forward, places.backward)
    producers = (places.forward, places.backward)
    kinds = ((Kind.SEND_F, Kind.RECV_F, 1), (Kind.SEND_B, Kind.RECV_B, -1))
    for (send_kind, receive_kind, step), of, into in zip(kinds, producers, consumers, strict=True):
        for kind, shift in ((send_kind, 0), (receive_kind, step)):
            table = places.of(kind)
            stage, number = np.nonzero(table != NONE)
            source = of[stage - shift, number]
            target = into[stage - shift + step, number]
            here = table[stage, number]
            start[here] = end[source]
            end[here] = end[source] + lag[target]
