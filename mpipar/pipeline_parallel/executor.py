"""The executor: runs a validated schedule on the pipeline axis of a mesh."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mpipar.comm import Communicator, Request
from mpipar.errors import CollectiveMismatch, ScheduleError
from mpipar.pipeline_parallel.action import Action, Kind, OverlappedPair
from mpipar.pipeline_parallel.passes import lower
from mpipar.pipeline_parallel.schedule import Schedule
from mpipar.pipeline_parallel.timeline import Timeline
from mpipar.pipeline_parallel.validation import validate

Array = NDArray[Any]
Spec = tuple[tuple[int, ...], str]
_SENDS = (Kind.SEND_F, Kind.SEND_B)
_RECEIVES = (Kind.RECV_F, Kind.RECV_B)


class Stage(Protocol):
    """What the executor asks of a stage; data, targets and loss are the stage's own business.

    Arrays handed to a stage belong to it. An array that it returns is left alone by it until the
    next step, since it may still be on its way.
    """

    def input_spec(self, microbatch: int) -> Spec | None:
        """Shape and dtype name of the activation that it takes; None for the first stage."""

    def output_spec(self, microbatch: int) -> Spec | None:
        """Shape and dtype name of the activation that it gives; None for the last stage."""

    def forward(self, microbatch: int, x: Array | None) -> Array | None:
        """The activation for the next stage; the last stage keeps its loss."""

    def backward_input(self, microbatch: int, grad: Array | None) -> Array | None:
        """Gradient of the stage's input (I); `grad` is that of its output, None for the last."""

    def backward_weight(self, microbatch: int) -> None:
        """Gradients of the weights (W), after `backward_input` of the same microbatch."""


class PipelineExecutor:
    """Runs one schedule, step after step. Collective over the pipeline group to make and to run.

    Receives are posted where the lowered schedule puts them, ahead of their use; sends never
    block; stages of one rank hand over without a message. Messages of two equal peers are kept
    apart by direction and boundary.

    Parameters
    ----------
    comm : Communicator
        The pipeline axis, such as ``mesh.comm("pp")``.
    schedule : Schedule
        Compute-only or lowered; validated here.
    stages : mapping of int to Stage
        The stages of this rank.
    on_reduce : callable, optional
        Called with a stage once its last weight gradient is done, such as to start the
        data-parallel sum.

    Raises
    ------
    ScheduleError
        If the schedule cannot run, or does not fit the group or the stages.

    Notes
    -----
    Cost of a step: one message for each boundary between ranks, direction and microbatch, and one
    all-reduce of 8 bytes.
    """

    def __init__(
        self,
        comm: Communicator,
        schedule: Schedule,
        stages: Mapping[int, Stage],
        on_reduce: Callable[[int], None] | None = None,
    ) -> None:
        if schedule.n_ranks != comm.size:
            raise ScheduleError(
                f"schedule {schedule.name} is for {schedule.n_ranks} ranks, the pipeline group has "
                f"{comm.size}"
            )
        validate(schedule)
        self.comm = comm
        self.schedule = schedule if schedule.is_lowered else lower(schedule)
        check_channel_order(self.schedule)
        if tuple(sorted(stages)) != schedule.stages_of(comm.rank):
            raise ScheduleError(
                f"rank {comm.rank} owns stages {schedule.stages_of(comm.rank)} of {schedule.name}, "
                f"{tuple(sorted(stages))} were given"
            )
        self.stages = dict(stages)
        self.communication_s = 0.0
        self.peak_in_flight = 0
        self._on_reduce = on_reduce or (lambda _: None)
        self._owner = schedule.stage_to_rank.tolist()
        self._row = list(self.schedule.actions(comm.rank))
        self._specs: dict[int, list[Spec | None]] = {}
        self._mine: dict[str, list[list[Spec | None]]] | None = None
        self._times: NDArray[np.float64] = np.zeros((2, len(self.schedule)))
        self._start()

    def _start(self) -> None:
        self._local: dict[tuple[Kind, int, int], Array | None] = {}
        self._incoming: dict[tuple[Kind, int, int], tuple[Request, Array]] = {}
        self._outgoing: dict[tuple[Kind, int, int], Array] = {}
        self._sends: list[Request] = []
        self._in_flight: set[tuple[int, int]] = set()

    # -- agreement --------------------------------------------------------------------------

    def _agree(self) -> None:
        """Exchange shapes when they changed on any rank, and compare both ends of each boundary."""
        n = range(self.schedule.n_microbatches)
        mine = {
            str(s): [[stage.input_spec(m) for m in n], [stage.output_spec(m) for m in n]]
            for s, stage in self.stages.items()
        }
        changed = self.comm.all_reduce(np.array(mine != self._mine, np.int64))
        if not changed:
            return
        self._mine = mine
        table: dict[int, Any] = {}
        for part in self.comm.all_gather_json(mine):
            table |= {int(s): specs for s, specs in part.items()}
        for stage in range(self.schedule.n_stages - 1):
            for m in n:
                gives, takes = table[stage][1][m], table[stage + 1][0][m]
                if gives != takes or gives is None:
                    raise CollectiveMismatch(
                        f"stage {stage} gives {_spec_text(gives)} for microbatch {m}, stage "
                        f"{stage + 1} takes {_spec_text(takes)}"
                    )
        self._specs = {s: [sp and (tuple(sp[0]), sp[1]) for sp in table[s][1]] for s in table}

    # -- one step ---------------------------------------------------------------------------

    def step(self) -> Timeline:
        """Run the schedule once. Collective.

        Returns
        -------
        Timeline
            When each action of *this rank* ran, in microseconds from its start of the step; see
            `gather_timeline` for all ranks.

        Raises
        ------
        CollectiveMismatch
            On every rank, if the shapes at a boundary differ; names stages and microbatch.
        """
        begin = time.perf_counter()
        self._agree()
        self._start()
        self.communication_s += time.perf_counter() - begin
        self._times[...] = 0
        index = int(self.schedule.offsets[self.comm.rank])
        origin = time.perf_counter()
        for cell in self._row:
            parts: Iterable[Action] = cell if isinstance(cell, OverlappedPair) else (cell,)
            start = time.perf_counter()
            n_parts = 0
            for action in parts:
                self._run(action)
                n_parts += 1
            end = time.perf_counter()
            self._times[0, index : index + n_parts] = (start - origin) * 1e6
            self._times[1, index : index + n_parts] = (end - origin) * 1e6
            index += n_parts
        begin = time.perf_counter()
        for request in self._sends:
            request.wait()
        self.communication_s += time.perf_counter() - begin
        return Timeline(self.schedule, self._times[0].copy(), self._times[1].copy())

    def gather_timeline(self, mine: Timeline) -> Timeline:
        """The measured timeline of all ranks. Collective.

        Parameters
        ----------
        mine : Timeline
            From `step` on this rank.

        Returns
        -------
        Timeline
            Every rank counts from its own start of the step, which the exchange of shapes aligns.
        """
        times = self.comm.all_reduce(np.stack([mine.start, mine.end]).astype(np.float64))
        return Timeline(self.schedule, times[0], times[1])

    def _run(self, action: Action) -> None:
        stage, kind = action.stage, action.kind
        m = -1 if action.microbatch is None else action.microbatch
        if kind in _RECEIVES:
            self._post(action, m)
        elif kind in _SENDS:
            self._send(action, m)
        elif kind is Kind.REDUCE_GRAD:
            self._on_reduce(stage)
        elif kind is Kind.F:
            self._in_flight.add((stage, m))
            self.peak_in_flight = max(self.peak_in_flight, len(self._in_flight))
            y = self.stages[stage].forward(m, self._take(Kind.RECV_F, stage, m))
            self._hand_on(Kind.SEND_F, stage, m, y)
        elif kind in (Kind.I, Kind.B):
            grad = self._take(Kind.RECV_B, stage, m)
            self._hand_on(Kind.SEND_B, stage, m, self.stages[stage].backward_input(m, grad))
        if kind in (Kind.W, Kind.B):
            self.stages[stage].backward_weight(m)
            self._in_flight.discard((stage, m))

    def _post(self, action: Action, m: int) -> None:
        """Post a receive into a fresh buffer."""
        message = action.message
        spec = self._specs[message.boundary][m]
        if spec is None:
            raise ScheduleError(f"{action}: no shape was agreed for boundary {message.boundary}")
        buffer = np.empty(spec[0], spec[1])
        step = -1 if action.kind is Kind.RECV_F else 1
        peer, tag = self._owner[action.stage + step], _tag(action)
        request = self.comm.begin_recv(buffer, peer, tag)
        self._incoming[(action.kind, action.stage, m)] = (request, buffer)

    def _send(self, action: Action, m: int) -> None:
        step = 1 if action.kind is Kind.SEND_F else -1
        y = self._outgoing.pop((action.kind, action.stage, m))
        peer = self._owner[action.stage + step]
        self._sends = [r for r in self._sends if not r.test()]
        self._sends.append(self.comm.begin_send(y, peer, _tag(action)))

    def _take(self, kind: Kind, stage: int, m: int) -> Array | None:
        """What a computation needs from its neighbour stage: handed over here, or received."""
        beyond = stage == 0 if kind is Kind.RECV_F else stage == self.schedule.n_stages - 1
        if beyond:
            return None
        key = (kind, stage, m)
        if key in self._local:
            return self._local.pop(key)
        request, buffer = self._incoming.pop(key)
        begin = time.perf_counter()
        request.wait()
        self.communication_s += time.perf_counter() - begin
        return buffer

    def _hand_on(self, kind: Kind, stage: int, m: int, y: Array | None) -> None:
        step, received = (1, Kind.RECV_F) if kind is Kind.SEND_F else (-1, Kind.RECV_B)
        target = stage + step
        if not 0 <= target < self.schedule.n_stages or y is None:
            return
        spec = self._specs[min(stage, target)][m]
        if spec is None or (y.shape, y.dtype.name) != spec:
            raise CollectiveMismatch(
                f"stage {stage} returned {_spec_text((y.shape, y.dtype.name))} for microbatch {m}, "
                f"{_spec_text(spec)} was agreed"
            )
        if self._owner[target] == self.comm.rank:
            self._local[(received, target, m)] = y
        else:
            self._outgoing[(kind, stage, m)] = y


def _tag(action: Action) -> int:
    """One channel for each direction and boundary; within it messages keep their order."""
    message = action.message
    return 2 * message.boundary + (message.direction == "backward")


def _spec_text(spec: Sequence[Any] | None) -> str:
    return "nothing" if spec is None else f"shape {tuple(spec[0])} of {spec[1]}"


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
                key = (message.direction, message.boundary, cell.kind in _SENDS)
                order.setdefault(key, []).append(message.microbatch)
    for (direction, boundary, is_send), numbers in order.items():
        if is_send and numbers != order.get((direction, boundary, False)):
            raise ScheduleError(
                f"boundary {boundary} {direction}: microbatches are sent in the order {numbers} "
                f"and received in {order.get((direction, boundary, False))}; use one order"
            )
