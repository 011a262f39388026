"""How activations and gradients travel between the ranks of a pipeline: messages, or slots.

`MessageLinks` work on any group. `SlotLinks` are for ranks that share the memory of a node: a stage
computes straight into the slot that its neighbour reads, so nothing is copied by the sender.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np

from mpipar.comm import Communicator, ReduceOp, Request
from mpipar.comm.channel import Receiver, Sender
from mpipar.errors import CollectiveMismatch, ScheduleError
from mpipar.pipeline_parallel.action import Action, Kind
from mpipar.pipeline_parallel.stage import Array, Pool, Spec

Channel: TypeAlias = tuple[Kind, int]
"""A direction and one end's stage: where sends, or receives, keep their order."""
Key: TypeAlias = tuple[Kind, int, int]
Specs: TypeAlias = Mapping[int, Sequence[Spec | None]]
SENDS = (Kind.SEND_F, Kind.SEND_B)
_OTHER = {Kind.SEND_F: Kind.RECV_F, Kind.SEND_B: Kind.RECV_B}
_N_SLOTS = 4
_STATUS = 64  # bytes before the data: 1 in the first word says that they are whole


class Links(Protocol):
    """What the executor asks for; sends never block."""

    def begin(self, specs: Specs) -> Links:
        """Forget the last step; shapes by stage and microbatch. Collective where they changed.

        Parameters
        ----------
        specs : mapping of int to sequence of Spec
            What each stage gives.

        Returns
        -------
        Links
            What carries this step; another kind where node memory does not suffice.
        """

    def room(self, kind: Kind, stage: int, m: int) -> Array | None:
        """Where the result that will be sent may be computed; None for anywhere."""

    def leave(self, kind: Kind, stage: int) -> None:
        """Say that the result is elsewhere than in the last `room`."""

    def send(self, kind: Kind, stage: int, m: int, y: Array) -> None:
        """Give a result to the neighbour; it goes back to the pool when it has left."""

    def expect(self, kind: Kind, stage: int, n: int) -> None:
        """Be ready for the first `n` arrivals of a channel."""

    def take(self, kind: Kind, stage: int, m: int, into: Array | None) -> Array:
        """What the neighbour has sent, in `into` if that fits; waits for it."""

    def move_on(self) -> None:
        """Do what can be done without waiting."""

    def finish(self) -> None:
        """Wait until everything was given away."""

    def break_off(self, sends: Iterable[Key]) -> None:
        """Keep every promise of a step that failed, with empty messages."""


class _Ends:
    """The ends of a rank: its channels, their order and their shapes."""

    def __init__(
        self,
        comm: Communicator,
        owner: Sequence[int],
        order: Mapping[Channel, list[int]],
        pool: Pool,
    ) -> None:
        self.comm, self.owner, self.order, self.pool = comm, owner, order, pool
        self.specs: Specs = {}

    def peer(self, channel: Channel) -> int:
        """The rank at the other end."""
        kind, stage = channel
        return self.owner[stage + (1 if kind in (Kind.SEND_F, Kind.RECV_B) else -1)]

    def spec(self, kind: Kind, stage: int, m: int) -> Spec:
        """Shape and dtype name of a message."""
        low = stage if kind in (Kind.SEND_F, Kind.RECV_B) else stage - 1
        found = self.specs[low][m]
        if found is None:
            raise ScheduleError(f"no shape was agreed between stages {low} and {low + 1}")
        return found

    def buffer(self, kind: Kind, stage: int, m: int) -> Array:
        """From the pool, for a message."""
        shape, dtype = self.spec(kind, stage, m)
        return self.pool.take(np.empty(0, dtype), shape)


class MessageLinks(_Ends):
    """Point-to-point messages; the receive of each channel is posted ahead."""

    def begin(self, specs: Specs) -> Links:
        """Forget the last step."""
        self.specs = specs
        self._incoming: dict[Key, tuple[Request, Array]] = {}
        self._sends: list[tuple[Request, Array]] = []
        self._n_posted = dict.fromkeys(self.order, 0)
        return self

    def room(self, kind: Kind, stage: int, m: int) -> Array | None:
        """Anywhere."""
        del kind, stage, m
        return None

    def leave(self, kind: Kind, stage: int) -> None:
        """There was none."""

    def send(self, kind: Kind, stage: int, m: int, y: Array) -> None:
        """Begin a send."""
        del m
        self._sends.append((self.comm.begin_send(y, self.peer((kind, stage)), tag(kind, stage)), y))

    def expect(self, kind: Kind, stage: int, n: int) -> None:
        """Post the receives of a channel, in its order, until there were `n`."""
        channel, order = (kind, stage), self.order[kind, stage]
        for i in range(self._n_posted[channel], min(n, len(order))):
            self.move_on()
            buffer = self.buffer(kind, stage, order[i])
            request = self.comm.begin_recv(buffer, self.peer(channel), tag(kind, stage))
            self._incoming[kind, stage, order[i]] = (request, buffer)
            self._n_posted[channel] = i + 1

    def take(self, kind: Kind, stage: int, m: int, into: Array | None) -> Array:
        """Wait for a posted receive."""
        del into
        request, buffer = self._incoming[kind, stage, m]
        request.wait()
        del self._incoming[kind, stage, m]
        return buffer

    def move_on(self) -> None:
        """Give back what has been sent."""
        under_way = []
        for request, array in self._sends:
            if request.test():
                self.pool.give(array)
            else:
                under_way.append((request, array))
        self._sends = under_way

    def finish(self) -> None:
        """Wait until everything was sent."""
        for request, array in self._sends:
            request.wait()
            self.pool.give(array)
        self._sends.clear()

    def break_off(self, sends: Iterable[Key]) -> None:
        """Send empty messages, and receive what was promised."""
        nothing = np.empty(0, np.uint8)
        for key in sends:
            self.send(*key, nothing)
        for channel, order in self.order.items():
            self.expect(*channel, len(order))
        for request, buffer in [*self._incoming.values(), *self._sends]:
            try:
                request.wait()
            except CollectiveMismatch:
                continue
            self.pool.give(buffer)


class SlotLinks(_Ends):
    """Channels in node memory, into whose slots the stages compute.

    A result that finds no free slot stays where it is, and is copied into the next free one by
    whatever is done then; so a sender never waits for a reader before the end of the step.
    """

    def __init__(
        self,
        comm: Communicator,
        owner: Sequence[int],
        order: Mapping[Channel, list[int]],
        pool: Pool,
    ) -> None:
        super().__init__(comm, owner, order, pool)
        self._senders: dict[Channel, Sender] = {}
        self._receivers: dict[Channel, Receiver] = {}
        self.n_copied = 0  # results of a step that were not computed in their slots
        self.sent_bytes = 0

    def begin(self, specs: Specs) -> Links:
        """Make the channels, if shapes have changed. Collective then."""
        if specs is not self.specs:
            self.close()
            self.specs = specs
            self._open()
            ends: list[Sender | Receiver] = [*self._senders.values(), *self._receivers.values()]
            met = [end.meet() for end in ends]
            for end in ends:
                end.told.wait()
            if not self.comm.all_reduce(np.array(all(met)), ReduceOp.MIN):
                self.close()
                return MessageLinks(self.comm, self.owner, self.order, self.pool).begin(specs)
        self._held: dict[Channel, Array] = {}
        self._moved: dict[int, Array] = {}
        self._queues: dict[Channel, deque[Array | None]] = {c: deque() for c in self._senders}
        self._n_taken = dict.fromkeys(self.order, 0)
        self.n_copied = self.sent_bytes = 0
        return self

    def _open(self) -> None:
        mine, n_stages = self.comm.rank, len(self.owner)
        for low in range(n_stages - 1):
            for sends, source, target in (
                (Kind.SEND_F, low, low + 1), (Kind.SEND_B, low + 1, low),
            ):  # fmt: skip
                ranks = (self.owner[source], self.owner[target])
                if ranks[0] == ranks[1] or mine not in ranks:
                    continue
                size, key = _STATUS + self._largest(low), tag(sends, source)
                if mine == ranks[0]:
                    self._senders[sends, source] = self.comm.channel_to(
                        ranks[1], size, np.uint8, _N_SLOTS, key
                    )
                else:
                    self._receivers[_OTHER[sends], target] = self.comm.channel_from(
                        ranks[0], size, np.uint8, _N_SLOTS, key
                    )

    def _largest(self, low: int) -> int:
        specs = [spec for spec in self.specs[low] if spec is not None]
        return max((_n_bytes(spec) for spec in specs), default=0)

    def close(self) -> None:
        """Give the slots back. Collective: both ends of each channel."""
        for sender in self._senders.values():
            sender.close()
        for receiver in self._receivers.values():
            receiver.close()
        self._senders, self._receivers = {}, {}

    def room(self, kind: Kind, stage: int, m: int) -> Array | None:
        """The next slot, if it is free and nothing waits before it."""
        channel = (kind, stage)
        sender = self._senders[channel]
        if channel in self._held or self._queues[channel] or not sender.ready:
            return None
        slot = self._held[channel] = self._view(sender.acquire(), self.spec(kind, stage, m))
        return slot

    def _view(self, slot: Array, spec: tuple[tuple[int, ...], Any]) -> Array:
        data: Array = slot[_STATUS : _STATUS + _n_bytes(spec)].view(spec[1]).reshape(spec[0])
        return data

    def leave(self, kind: Kind, stage: int) -> None:
        """Free the slot for another result."""
        self._held.pop((kind, stage), None)

    def send(self, kind: Kind, stage: int, m: int, y: Array) -> None:
        """Commit the slot, or put the array in line for one."""
        del m
        self.sent_bytes += y.nbytes
        channel = (kind, stage)
        held = self._held.pop(channel, None)
        if held is y:
            self._commit(channel, 1)
            return
        if held is not None:  # what was computed first leaves later: its slot is needed now
            moved = self._moved[id(held)] = self.pool.take(held, held.shape)
            moved[...] = held
        self._queues[channel].append(self._moved.pop(id(y), y))
        self._flush(channel)

    def _commit(self, channel: Channel, status: int) -> None:
        sender = self._senders[channel]
        sender.acquire()[:8].view(np.int64)[0] = status
        sender.commit()

    def _flush(self, channel: Channel) -> None:
        queue, sender = self._queues[channel], self._senders[channel]
        while queue and sender.ready:
            y = queue.popleft()
            if y is None:
                self._commit(channel, 0)
                continue
            self._view(sender.acquire(), (y.shape, y.dtype))[...] = y
            self._commit(channel, 1)
            self.n_copied += 1
            self.pool.give(y)

    def expect(self, kind: Kind, stage: int, n: int) -> None:
        """Nothing is posted: the slots are there."""

    def take(self, kind: Kind, stage: int, m: int, into: Array | None) -> Array:
        """Copy a slot out, straight to where the stage computes if that is known."""
        slot = self._next((kind, stage))
        if slot is None:
            raise CollectiveMismatch("its rank broke the step off")
        shape, dtype = self.spec(kind, stage, m)
        if into is None or (into.shape, into.dtype.name) != (shape, dtype):
            into = self.buffer(kind, stage, m)
        into[...] = self._view(slot, (shape, dtype))
        self._receivers[kind, stage].release()
        return into

    def _next(self, channel: Channel) -> Array | None:
        """The next slot, still to be released; None after the release of a broken one."""
        receiver = self._receivers[channel]
        slot = receiver.get(self.move_on)
        self._n_taken[channel] += 1
        if slot[:8].view(np.int64)[0]:
            return slot
        receiver.release()
        return None

    def move_on(self) -> None:
        """Copy what waits for slots that have become free."""
        for channel, queue in self._queues.items():
            if queue:
                self._flush(channel)

    def finish(self) -> None:
        """Wait for slots for all that is in line."""
        for channel, queue in self._queues.items():
            while queue:
                self._senders[channel].acquire(self.move_on)
                self._flush(channel)

    def break_off(self, sends: Iterable[Key]) -> None:
        """Say so in every slot that is still owed, and take what was promised."""
        self._held.clear()
        for kind, stage, _ in sends:
            self._queues[kind, stage].append(None)
        self.move_on()
        for channel, order in self.order.items():
            while self._n_taken[channel] < len(order):
                if self._next(channel) is not None:
                    self._receivers[channel].release()
        self.finish()


def make_links(
    comm: Communicator, owner: Sequence[int], order: Mapping[Channel, list[int]], pool: Pool
) -> Links:
    """Slots where all ranks share the memory of a node, else messages. Collective.

    Parameters
    ----------
    comm : Communicator
        The pipeline group.
    owner : sequence of int
        Rank of each stage.
    order : mapping of Channel to list of int
        Microbatches that this rank receives, in their order.
    pool : Pool
        Lends buffers.

    Returns
    -------
    Links
        Of this rank.
    """
    kind = SlotLinks if comm.shares_memory else MessageLinks
    return kind(comm, owner, order, pool)


def tag(kind: Kind, stage: int) -> int:
    """One channel for each direction and boundary; within it messages keep their order.

    Parameters
    ----------
    kind : Kind
        Of a send or a receive.
    stage : int
        Whose.

    Returns
    -------
    int
        The same at both ends.
    """
    message = Action(stage, kind, 0).message
    return 2 * message.boundary + (message.direction == "backward")


def _n_bytes(spec: tuple[tuple[int, ...], Any]) -> int:
    return math.prod(spec[0]) * int(np.dtype(spec[1]).itemsize)
