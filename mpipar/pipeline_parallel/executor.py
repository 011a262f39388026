"""The executor: runs a validated schedule on the pipeline axis of a mesh."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mpipar.comm import Communicator, Request
from mpipar.errors import CollectiveMismatch, CollectiveTimeout, RankFailed, ScheduleError
from mpipar.pipeline_parallel.action import Action, Cell, Kind, OverlappedPair
from mpipar.pipeline_parallel.agreement import Agreement, agreed_schedule, spec_text
from mpipar.pipeline_parallel.graph import Places, partners
from mpipar.pipeline_parallel.schedule import Schedule
from mpipar.pipeline_parallel.stage import Array, Fresh, Pool, Spec, Stage
from mpipar.pipeline_parallel.timeline import Timeline

_Key: TypeAlias = tuple[Kind, int, int]
_SENDS = (Kind.SEND_F, Kind.SEND_B)


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
        self.schedule = agreed_schedule(comm, schedule, stages)
        self.stages = dict(stages)
        self.communication_s = 0.0
        self.peak_in_flight = 0
        self._on_reduce = on_reduce or (lambda _: None)
        self._pool: Pool = pool or Fresh()
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
        self._agreement = Agreement(comm, self.schedule)
        self._specs: dict[int, list[Spec | None]] = {}
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
        self._specs = self._agreement.specs(self.stages)
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
                f"stage {stage} returned {spec_text(got)} from {action} for microbatch {m}, "
                f"{spec_text(spec)} was agreed with stage {target}"
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
