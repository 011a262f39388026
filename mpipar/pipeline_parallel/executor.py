"""The executor: runs a validated schedule on the pipeline axis of a mesh."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mpipar.comm import Communicator, Request
from mpipar.errors import CollectiveMismatch, CollectiveTimeout, RankFailed, ScheduleError
from mpipar.pipeline_parallel.action import Action, Cell, Kind, OverlappedPair
from mpipar.pipeline_parallel.graph import Places, partners
from mpipar.pipeline_parallel.passes import lower
from mpipar.pipeline_parallel.schedule import Schedule
from mpipar.pipeline_parallel.text import format_schedule
from mpipar.pipeline_parallel.timeline import Timeline
from mpipar.pipeline_parallel.validation import validate

Array: TypeAlias = NDArray[Any]
Spec: TypeAlias = tuple[tuple[int, ...], str]
_Key: TypeAlias = tuple[Kind, int, int]
_Specs: TypeAlias = dict[str, list[list[Spec | None]]]
_SENDS = (Kind.SEND_F, Kind.SEND_B)


class Stage(Protocol):
    """What the executor asks of a stage; data, targets and loss are the stage's own business.

    Arrays handed to a stage belong to it; an array that it returns belongs to the executor, which
    gives it back to the pool once it was sent.
    """

    def input_spec(self, microbatch: int) -> Spec | None:
        """Shape and dtype name of the activation that it takes; None for the first stage."""

    def output_spec(self, microbatch: int) -> Spec | None:
        """Shape and dtype name of the activation that it gives; None for the last stage."""

    def forward(self, microbatch: int, x: Array | None) -> Array | None:
        """The activation for the next stage (F); the last stage keeps its loss."""

    def backward(self, microbatch: int, grad: Array | None) -> Array | None:
        """Gradient of the stage's input, and those of the weights (B)."""

    def backward_input(self, microbatch: int, grad: Array | None) -> Array | None:
        """Gradient of the stage's input (I); `grad` is that of its output, None for the last."""

    def backward_weight(self, microbatch: int) -> None:
        """Gradients of the weights (W), after `backward_input` of the same microbatch."""


class Pool(Protocol):
    """Where buffers come from and go back to, such as a model's workspace."""

    def take(self, like: Any, shape: tuple[int, ...]) -> Array:
        """An array of the dtype of `like`."""

    def give(self, *arrays: Any) -> None:
        """Take arrays back; those that came from elsewhere are left alone."""


class PipelineExecutor:
    """Runs one schedule, step after step. Collective over the pipeline group to make and to run.

    The receive of each channel (a boundary and a direction) is posted while the message before it
    is computed on; sends never block; stages of one rank hand over without a message. A stage that
    raises ends the step on its peers too: they get an empty message instead, and the group can be
    used again.

    Parameters
    ----------
    comm : Communicator
        The pipeline axis, such as ``mesh.comm("pp")``.
    schedule : Schedule
        Compute-only or lowered, the same on every rank; validated here.
    stages : mapping of int to Stage
        The stages of this rank.
    on_reduce : callable, optional
        Called with a stage once its last weight gradient is done, such as to start the
        data-parallel sum.
    pool : Pool, optional
        Lends receive buffers, which become the stages', and gets back what was sent.

    Attributes
    ----------
    communication_s : float
        Seconds spent waiting for peers so far.
    peak_in_flight : int
        Most microbatches, summed over the stages of this rank, that were between F and W (or B)
        at once in the last step.

    Raises
    ------
    ScheduleError
        On every rank, if the schedule cannot run, or does not fit the group or the stages.

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
        pool: Pool | None = None,
    ) -> None:
        self.comm = comm
        self.schedule = _agreed(comm, schedule, stages)
        self.stages = dict(stages)
        self.communication_s = 0.0
        self.peak_in_flight = 0
        self._on_reduce = on_reduce or (lambda _: None)
        self._pool: Pool = pool or _Fresh()
        self._owner = schedule.stage_to_rank.tolist()
        self._cells = _numbered(self.schedule, comm.rank)
        self._order: dict[tuple[Kind, int], list[int]] = {}
        self._at: dict[_Key, int] = {}
        self._turn: dict[_Key, int] = {}
        for index, cell in self._cells:
            if isinstance(cell, Action) and cell.kind.is_communication:
                self._at[cell.kind, cell.stage, cell.microbatch or 0] = index
                if cell.kind not in _SENDS:
                    order = self._order.setdefault((cell.kind, cell.stage), [])
                    self._turn[cell.kind, cell.stage, cell.microbatch or 0] = len(order)
                    order.append(cell.microbatch or 0)
        self._specs: dict[int, list[Spec | None]] = {}
        self._mine: _Specs | None = None
        self._times: NDArray[np.float64] = np.zeros((2, len(self.schedule)))
        self._start()

    def _start(self) -> None:
        self._local: dict[_Key, Array | None] = {}
        self._incoming: dict[_Key, tuple[Request, Array]] = {}
        self._outgoing: dict[_Key, Array] = {}
        self._sends: list[tuple[Request, Array]] = []
        self._n_posted = dict.fromkeys(self._order, 0)
        self._n_in_flight = self.peak_in_flight = 0
        self._times[...] = 0

    # -- agreement --------------------------------------------------------------------------

    def _agree(self) -> None:
        """Exchange shapes when they changed on any rank, and compare both ends of each boundary."""
        n = range(self.schedule.n_microbatches)
        mine: _Specs = {
            str(s): [[stage.input_spec(m) for m in n], [stage.output_spec(m) for m in n]]
            for s, stage in self.stages.items()
        }
        if not self.comm.all_reduce(np.array(mine != self._mine, np.int64)):
            return
        self._mine = None
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
        self._mine = mine
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
            If the shapes at a boundary differ: on every rank if the stages announce it, else on
            both sides of the boundary; names stages and microbatch.
        Exception
            What a stage raised.
        """
        begin = time.perf_counter()
        self._agree()
        self._start()
        self._origin = time.perf_counter()
        self.communication_s += self._origin - begin
        for channel in self._order:
            self._post(channel, 1)
        for position, (index, cell) in enumerate(self._cells):
            try:
                self._run(index, cell)
            except (RankFailed, CollectiveTimeout):
                raise
            except Exception:
                self._break_off(position)
                raise
        begin = time.perf_counter()
        for request, array in self._sends:
            request.wait()
            self._pool.give(array)
        self._sends.clear()
        self.communication_s += time.perf_counter() - begin
        peaks: list[Any] = [0] * self.schedule.n_ranks
        peaks[self.comm.rank] = self._peak(self.peak_in_flight)
        return Timeline(self.schedule, self._times[0].copy(), self._times[1].copy(), 1, (*peaks,))

    def _peak(self, n_in_flight: int) -> Fraction:
        """In units of a rank's whole share, the simulator's."""
        return Fraction(n_in_flight * self.schedule.n_ranks, self.schedule.n_stages)

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
            A message is shown from its send until the receiver has taken it.
        """
        times = self.comm.all_reduce(np.stack([mine.start, mine.end]).astype(np.float64))
        for sends, receives in partners(Places(self.schedule)):
            times[0][receives] = np.minimum(times[0][sends], times[1][receives])
            times[1][sends] = np.maximum(times[0][sends], times[1][receives])
        counts = self.comm.all_gather(np.array([self.peak_in_flight], np.int64)).tolist()
        return Timeline(self.schedule, times[0], times[1], 1, tuple(map(self._peak, counts)))

    def _run(self, index: int, cell: Cell) -> None:
        if isinstance(cell, Action) and cell.kind.is_communication:
            m = cell.microbatch or 0
            if cell.kind in _SENDS:
                self._send(cell.kind, cell.stage, m)
            else:
                self._post((cell.kind, cell.stage), self._turn[cell.kind, cell.stage, m] + 1)
            return
        parts = cell if isinstance(cell, OverlappedPair) else (cell,)
        inputs = [self._take(part) for part in parts]
        start = time.perf_counter()
        outputs = [self._compute(part, x) for part, x in zip(parts, inputs, strict=True)]
        end = time.perf_counter()
        self._times[0, index : index + len(parts)] = (start - self._origin) * 1e6
        self._times[1, index : index + len(parts)] = (end - self._origin) * 1e6
        for part, y in zip(parts, outputs, strict=True):
            self._hand_on(part, y)
        self._reap()

    def _compute(self, action: Action, x: Array | None) -> Array | None:
        stage, m, kind = self.stages[action.stage], action.microbatch or 0, action.kind
        if kind is Kind.F:
            self._n_in_flight += 1
            self.peak_in_flight = max(self.peak_in_flight, self._n_in_flight)
            return stage.forward(m, x)
        if kind is Kind.REDUCE_GRAD:
            self._on_reduce(action.stage)
            return None
        if kind is Kind.I:
            return stage.backward_input(m, x)
        self._n_in_flight -= 1
        if kind is Kind.B:
            return stage.backward(m, x)
        stage.backward_weight(m)
        return None

    # -- messages ---------------------------------------------------------------------------

    def _post(self, channel: tuple[Kind, int], n: int) -> None:
        """Post the receives of a channel, in its order, until there were `n`."""
        kind, stage = channel
        order = self._order[channel]
        for i in range(self._n_posted[channel], min(n, len(order))):
            low = stage - 1 if kind is Kind.RECV_F else stage
            spec = self._specs[low][order[i]]
            if spec is None:
                raise ScheduleError(f"no shape was agreed between stages {low} and {low + 1}")
            self._reap()
            buffer = self._pool.take(np.empty(0, spec[1]), spec[0])
            peer = self._owner[stage - 1 if kind is Kind.RECV_F else stage + 1]
            request = self.comm.begin_recv(buffer, peer, _tag(kind, stage))
            self._incoming[kind, stage, order[i]] = (request, buffer)
            self._n_posted[channel] = i + 1

    def _send(self, kind: Kind, stage: int, m: int) -> None:
        y = self._outgoing.pop((kind, stage, m))
        peer = self._owner[stage + 1 if kind is Kind.SEND_F else stage - 1]
        now = (time.perf_counter() - self._origin) * 1e6
        self._times[:, self._at[kind, stage, m]] = now
        self._sends.append((self.comm.begin_send(y, peer, _tag(kind, stage)), y))

    def _reap(self) -> None:
        """Give back what has been sent, and move on what has not."""
        under_way = []
        for request, array in self._sends:
            if request.test():
                self._pool.give(array)
            else:
                under_way.append((request, array))
        self._sends = under_way

    def _take(self, action: Action) -> Array | None:
        """What a computation needs from its neighbour stage: handed over here, or received."""
        kind, m = _NEEDS.get(action.kind), action.microbatch or 0
        if kind is None:
            return None
        key = (kind, action.stage, m)
        if key in self._local:
            return self._local.pop(key)
        if key not in self._incoming:
            return None  # the first stage's input, the last stage's gradient
        request, buffer = self._incoming[key]
        begin = time.perf_counter()
        try:
            request.wait()
        except CollectiveMismatch as error:
            source = action.stage + (-1 if kind is Kind.RECV_F else 1)
            raise CollectiveMismatch(
                f"stage {action.stage} has got no microbatch {m} from stage {source} "
                f"(rank {self._owner[source]}): {error}"
            ) from None
        del self._incoming[key]
        end = time.perf_counter()
        self.communication_s += end - begin
        self._times[0, self._at[key]] = (begin - self._origin) * 1e6
        self._times[1, self._at[key]] = (end - self._origin) * 1e6
        self._post((kind, action.stage), self._turn[key] + 2)
        return buffer

    def _hand_on(self, action: Action, y: Array | None) -> None:
        """Check a result, and put it where the send or the next stage finds it."""
        kind, stage, m = action.kind, action.stage, action.microbatch or 0
        if kind not in (Kind.F, Kind.I, Kind.B):
            return
        step, sent, received = (
            (1, Kind.SEND_F, Kind.RECV_F) if kind is Kind.F else (-1, Kind.SEND_B, Kind.RECV_B)
        )
        target = stage + step
        if not 0 <= target < self.schedule.n_stages:
            return
        spec = self._specs[min(stage, target)][m]
        got = None if y is None else (y.shape, y.dtype.name)
        if y is None or got != spec:
            raise CollectiveMismatch(
                f"stage {stage} returned {_spec_text(got)} from {action} for microbatch {m}, "
                f"{_spec_text(spec)} was agreed with stage {target}"
            )
        if self._owner[target] == self.comm.rank:
            self._local[received, target, m] = y
        else:
            self._outgoing[sent, stage, m] = y

    def _break_off(self, position: int) -> None:
        """Keep every promise to the peers, with empty messages, so that they stop as well."""
        nothing = np.empty(0, np.uint8)
        for _, cell in self._cells[position + 1 :]:
            if isinstance(cell, Action) and cell.kind in _SENDS:
                self._outgoing[cell.kind, cell.stage, cell.microbatch or 0] = nothing
                self._send(cell.kind, cell.stage, cell.microbatch or 0)
        for channel, order in self._order.items():
            self._post(channel, len(order))
        for request, buffer in [*self._incoming.values(), *self._sends]:
            try:
                request.wait()
            except CollectiveMismatch:
                continue
            self._pool.give(buffer)


_NEEDS = {Kind.F: Kind.RECV_F, Kind.I: Kind.RECV_B, Kind.B: Kind.RECV_B}


class _Fresh:
    """A pool that keeps nothing."""

    def take(self, like: Array, shape: tuple[int, ...]) -> Array:
        return np.empty(shape, like.dtype)

    def give(self, *arrays: Any) -> None:
        return None


def _agreed(comm: Communicator, schedule: Schedule, stages: Mapping[int, Stage]) -> Schedule:
    """The lowered schedule, or what is wrong with it, on every rank alike."""
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


def _numbered(schedule: Schedule, rank: int) -> list[tuple[int, Cell]]:
    """The cells of a rank with their flat indices."""
    index, rows = int(schedule.offsets[rank]), []
    for cell in schedule.actions(rank):
        rows.append((index, cell))
        index += 2 if isinstance(cell, OverlappedPair) else 1
    return rows


def _tag(kind: Kind, stage: int) -> int:
    """One channel for each direction and boundary; within it messages keep their order."""
    message = Action(stage, kind, 0).message
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
