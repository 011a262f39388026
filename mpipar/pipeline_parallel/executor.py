"""The executor: runs a validated schedule on the pipeline axis of a mesh."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpipar.comm import Communicator
from mpipar.errors import CollectiveMismatch, CollectiveTimeout, RankFailed
from mpipar.pipeline_parallel.action import Action, Cell, Kind, OverlappedPair
from mpipar.pipeline_parallel.agreement import Agreement, agreed_schedule, spec_text
from mpipar.pipeline_parallel.graph import Places, partners
from mpipar.pipeline_parallel.links import SENDS, Channel, Key, make_links
from mpipar.pipeline_parallel.schedule import Schedule
from mpipar.pipeline_parallel.stage import Array, Fresh, Pool, Spec, Stage
from mpipar.pipeline_parallel.timeline import Timeline


class PipelineExecutor:
    """Runs one schedule, step after step. Collective over the pipeline group to make and to run.

    Ranks that share a node's memory hand over in slots, into which stages with `computes_into`
    compute straight. Elsewhere the receive of each channel (a boundary and a direction) is posted
    while the message before it is computed on. Sends never block; stages of one rank hand over
    without a message. A stage that
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
    links : Links
        What carries activations and gradients.
    specs : dict of int to list of Spec
        What each stage gives, by microbatch.
    origin : float
        When the last step started, by `time.perf_counter`.

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
        self._computes_into = {
            s: bool(getattr(stage, "computes_into", False)) for s, stage in stages.items()
        }
        self.communication_s = self.origin = 0.0
        self.peak_in_flight = 0
        self._on_reduce = on_reduce or (lambda _: None)
        self._pool: Pool = pool or Fresh()
        self._owner = schedule.stage_to_rank.tolist()
        self._cells = _numbered(self.schedule, comm.rank)
        self._order: dict[Channel, list[int]] = {}
        self._at: dict[Key, int] = {}
        self._turn: dict[Key, int] = {}
        for index, cell in self._cells:
            if isinstance(cell, Action) and cell.kind.is_communication:
                self._at[cell.kind, cell.stage, cell.microbatch or 0] = index
                if cell.kind not in SENDS:
                    order = self._order.setdefault((cell.kind, cell.stage), [])
                    self._turn[cell.kind, cell.stage, cell.microbatch or 0] = len(order)
                    order.append(cell.microbatch or 0)
        self.links = make_links(comm, self._owner, self._order, self._pool)
        self._agreement = Agreement(comm, self.schedule)
        self.specs: dict[int, list[Spec | None]] = {}
        self._times: NDArray[np.float64] = np.zeros((2, len(self.schedule)))
        self._start()

    def _start(self) -> None:
        self._local: dict[Key, Array | None] = {}
        self._outgoing: dict[Key, Array] = {}
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
        self.specs = self._agreement.specs(self.stages)
        self._start()
        self.links = self.links.begin(self.specs)
        self.origin = time.perf_counter()
        self.communication_s += self.origin - begin
        for channel in self._order:
            self.links.expect(*channel, 1)
        for position, (index, cell) in enumerate(self._cells):
            try:
                self._run(index, cell)
            except (RankFailed, CollectiveTimeout):
                raise
            except Exception:
                self._break_off(position)
                raise
        begin = time.perf_counter()
        self.links.finish()
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
            if cell.kind in SENDS:
                self._send(cell.kind, cell.stage, m)
            else:
                turn = self._turn[cell.kind, cell.stage, m]
                self.links.expect(cell.kind, cell.stage, turn + 1)
            return
        parts = cell if isinstance(cell, OverlappedPair) else (cell,)
        rooms = [self._room(part) for part in parts]
        inputs = [self._take(part, to) for part, to in zip(parts, rooms, strict=True)]
        start = time.perf_counter()
        outputs = [self._compute(*job) for job in zip(parts, inputs, rooms, strict=True)]
        end = time.perf_counter()
        self._times[0, index : index + len(parts)] = (start - self.origin) * 1e6
        self._times[1, index : index + len(parts)] = (end - self.origin) * 1e6
        for part, y, room in zip(parts, outputs, rooms, strict=True):
            if room is not None and y is not room:
                self.links.leave(_GIVES[part.kind], part.stage)
            self._hand_on(part, y)
        self.links.move_on()

    def _compute(self, action: Action, x: Array | None, room: Array | None) -> Array | None:
        stage, m, kind = self.stages[action.stage], action.microbatch or 0, action.kind
        to = () if room is None else (room,)
        if kind is Kind.F:
            self._n_in_flight += 1
            self.peak_in_flight = max(self.peak_in_flight, self._n_in_flight)
            return stage.forward(m, x, *to)
        if kind is Kind.REDUCE_GRAD:
            self._on_reduce(action.stage)
            return None
        if kind is Kind.I:
            return stage.backward_input(m, x, *to)
        self._n_in_flight -= 1
        if kind is Kind.B:
            return stage.backward(m, x, *to)
        stage.backward_weight(m)
        return None

    # -- messages ---------------------------------------------------------------------------

    def _room(self, action: Action) -> Array | None:
        """Where a stage that can may compute a result that will be sent."""
        kind, stage = _GIVES.get(action.kind), action.stage
        key = (kind, stage, action.microbatch or 0)
        if kind is None or key not in self._at:
            return None
        return self.links.room(*key) if self._computes_into[stage] else None

    def _send(self, kind: Kind, stage: int, m: int) -> None:
        now = (time.perf_counter() - self.origin) * 1e6
        self._times[:, self._at[kind, stage, m]] = now
        self.links.send(kind, stage, m, self._outgoing.pop((kind, stage, m)))

    def _take(self, action: Action, room: Array | None) -> Array | None:
        """What a computation needs from its neighbour stage: handed over here, or received."""
        kind, m = _NEEDS.get(action.kind), action.microbatch or 0
        if kind is None:
            return None
        key = (kind, action.stage, m)
        if key in self._local:
            return self._local.pop(key)
        if key not in self._at:
            return None  # the first stage's input, the last stage's gradient
        begin = time.perf_counter()
        try:
            x = self.links.take(*key, room if kind is Kind.RECV_F else None)
        except CollectiveMismatch as error:
            source = action.stage + (-1 if kind is Kind.RECV_F else 1)
            raise CollectiveMismatch(
                f"stage {action.stage} has got no microbatch {m} from stage {source} "
                f"(rank {self._owner[source]}): {error}"
            ) from None
        end = time.perf_counter()
        self.communication_s += end - begin
        self._times[0, self._at[key]] = (begin - self.origin) * 1e6
        self._times[1, self._at[key]] = (end - self.origin) * 1e6
        self.links.expect(kind, action.stage, self._turn[key] + 2)
        return x

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
        spec = self.specs[min(stage, target)][m]
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
        left = [cell for _, cell in self._cells[position + 1 :] if isinstance(cell, Action)]
        self.links.break_off(
            [(c.kind, c.stage, c.microbatch or 0) for c in left if c.kind in SENDS]
        )


_NEEDS = {Kind.F: Kind.RECV_F, Kind.I: Kind.RECV_B, Kind.B: Kind.RECV_B}
_GIVES = {Kind.F: Kind.SEND_F, Kind.I: Kind.SEND_B, Kind.B: Kind.SEND_B}


def _numbered(schedule: Schedule, rank: int) -> list[tuple[int, Cell]]:
    """The cells of a rank with their flat indices."""
    index, rows = int(schedule.offsets[rank]), []
    for cell in schedule.actions(rank):
        rows.append((index, cell))
        index += 2 if isinstance(cell, OverlappedPair) else 1
    return rows
