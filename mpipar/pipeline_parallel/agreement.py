"""What the ranks of a pipeline agree on before they run: the schedule, and shapes at boundaries."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mpipar.comm import Communicator
from mpipar.errors import CollectiveMismatch, ScheduleError
from mpipar.pipeline_parallel.action import Action, Kind
from mpipar.pipeline_parallel.passes import lower
from mpipar.pipeline_parallel.schedule import Schedule
from mpipar.pipeline_parallel.stage import Spec, Stage
from mpipar.pipeline_parallel.text import format_schedule
from mpipar.pipeline_parallel.validation import validate


def agreed_schedule(
    comm: Communicator, schedule: Schedule, stages: Mapping[int, Stage]
) -> Schedule:
    """The lowered schedule, or what is wrong with it, on every rank alike. Collective.

    Parameters
    ----------
    comm : Communicator
        The pipeline group.
    schedule : Schedule
        Of this rank.
    stages : mapping of int to Stage
        Of this rank.

    Returns
    -------
    Schedule
        Valid, the same on every rank.

    Raises
    ------
    ScheduleError
        If it cannot run, does not fit group or stages, or differs between ranks.
    """
    said: Any
    try:
        said, lowered = "", _checked(comm, schedule, stages)
        said = hashlib.blake2b(format_schedule(lowered).encode(), digest_size=8).hexdigest()
    except ScheduleError as error:
        said = error
    digests = comm.all_gather_json(said)
    if len(set(digests)) > 1:
        raise ScheduleError(
            f"the ranks were given different schedules named {schedule.name}: their hashes are "
            f"{', '.join(digests)}"
        )
    return lowered


def _checked(comm: Communicator, schedule: Schedule, stages: Mapping[int, Stage]) -> Schedule:
    if schedule.n_ranks != comm.size:
        raise ScheduleError(
            f"schedule {schedule.name} is for {schedule.n_ranks} ranks, the pipeline group has "
            f"{comm.size}"
        )
    validate(schedule)
    lowered = schedule if (schedule.kind > Kind.B).any() else lower(schedule)
    check_channel_order(lowered)
    if tuple(sorted(stages)) != schedule.stages_of(comm.rank):
        raise ScheduleError(
            f"rank {comm.rank} owns stages {schedule.stages_of(comm.rank)} of {schedule.name}, "
            f"{tuple(sorted(stages))} were given"
        )
    return lowered


def check_channel_order(schedule: Schedule) -> None:
    """Refuse a lowered schedule whose two ends of a channel have different orders.

    Parameters
    ----------
    schedule : Schedule
        Lowered.

    Raises
    ------
    ScheduleError
        Naming the boundary; schedules from `lower` always pass.
    """
    order: dict[tuple[str, int, bool], list[int]] = {}
    for rank in range(schedule.n_ranks):
        for cell in schedule.actions(rank):
            if isinstance(cell, Action) and cell.kind.is_communication:
                message = cell.message
                key = (message.direction, message.boundary, cell.kind in (Kind.SEND_F, Kind.SEND_B))
                order.setdefault(key, []).append(message.microbatch)
    for (direction, boundary, is_send), numbers in order.items():
        if is_send and numbers != order.get((direction, boundary, False)):
            raise ScheduleError(
                f"boundary {boundary} {direction}: microbatches are sent in the order {numbers} "
                f"and received in {order.get((direction, boundary, False))}; use one order"
            )


class Agreement:
    """What stages give and take, exchanged when it changes.

    Parameters
    ----------
    comm : Communicator
        The pipeline group.
    schedule : Schedule
        Gives the numbers of stages and microbatches.
    """

    def __init__(self, comm: Communicator, schedule: Schedule) -> None:
        self._comm, self._schedule = comm, schedule
        self._mine: dict[str, Any] | None = None
        self._specs: dict[int, list[Spec | None]] = {}

    def specs(self, stages: Mapping[int, Stage]) -> dict[int, list[Spec | None]]:
        """What each stage gives, after both ends of each boundary were compared. Collective.

        Parameters
        ----------
        stages : mapping of int to Stage
            Of this rank.

        Returns
        -------
        dict of int to list of Spec
            By stage and microbatch. Cost: an all-reduce of 8 bytes; an exchange of JSON where
            something changed on any rank.

        Raises
        ------
        CollectiveMismatch
            On every rank, if two stages differ; names both and the microbatch.
        """
        n = range(self._schedule.n_microbatches)
        mine = {
            str(s): [[stage.input_spec(m) for m in n], [stage.output_spec(m) for m in n]]
            for s, stage in stages.items()
        }
        if not self._comm.all_reduce(np.array(mine != self._mine, np.int64)):
            return self._specs
        self._mine = None
        table: dict[int, Any] = {}
        for part in self._comm.all_gather_json(mine):
            table |= {int(s): specs for s, specs in part.items()}
        for stage in range(self._schedule.n_stages - 1):
            for m in n:
                gives, takes = table[stage][1][m], table[stage + 1][0][m]
                if gives != takes or gives is None:
                    raise CollectiveMismatch(
                        f"stage {stage} gives {spec_text(gives)} for microbatch {m}, stage "
                        f"{stage + 1} takes {spec_text(takes)}"
                    )
        self._mine = mine
        self._specs = {s: [sp and (tuple(sp[0]), sp[1]) for sp in table[s][1]] for s in table}
        return self._specs


def spec_text(spec: Sequence[Any] | None) -> str:
    """A shape and dtype in words.

    Parameters
    ----------
    spec : Spec or None
        None is nothing.

    Returns
    -------
    str
        For messages.
    """
    return "nothing" if spec is None else f"shape {tuple(spec[0])} of {spec[1]}"
