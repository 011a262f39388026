"""Groups that span nodes: node memory inside, messages between, every local rank at work.

An all-reduce is a reduce-scatter inside each node, an all-reduce of each local rank's slice across
the nodes, and an all-gather inside. So every rank of a node drives the network with its own slice,
and only 1/L of the bytes of L local ranks crosses it from each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from mpipar.comm.arrays import accumulation_dtype
from mpipar.comm.base import Communicator
from mpipar.comm.call import Array, Call, Op, ReduceOp
from mpipar.comm.node.communicator import NodeCommunicator
from mpipar.comm.node.host import Host
from mpipar.comm.node.paths import Paths
from mpipar.comm.request import ENDED, Request
from mpipar.errors import RankFailed
from mpipar.units.remainder import spread_sizes

Program = Generator[Request, None, None]
_PLAIN = (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.MEAN)


def placed(inner: Communicator, host: Host, nodes: Sequence[int], paths: Paths) -> Communicator:
    """A transport through the memory of its nodes. Collective over it.

    Parameters
    ----------
    inner : Communicator
        Any group of the transport.
    host : Host
        Memory and waiting on this node.
    nodes : sequence of int
        The node of each world rank.
    paths : Paths
        Which algorithm for which call.

    Returns
    -------
    Communicator
        In node memory if all its ranks are on one node, hierarchical if some of them share one,
        else `inner`.
    """
    mine: list[int] = [nodes[r] for r in inner.world_ranks]  # type: ignore[attr-defined]
    if len(set(mine)) == 1:
        return NodeCommunicator.over(inner, host, paths)
    if len(set(mine)) == len(mine):
        return inner
    return HierarchicalCommunicator(inner, host, nodes, paths)


class HierarchicalCommunicator(Communicator):
    """A group over several nodes, of which at least one holds several of its ranks.

    Parameters
    ----------
    inner : Communicator
        The flat transport; makes every call that gains nothing from the nodes.
    host : Host
        Memory and waiting on this node.
    nodes : sequence of int
        The node of each world rank.
    paths : Paths
        Which algorithm for which call.
    """

    def __init__(self, inner: Communicator, host: Host, nodes: Sequence[int], paths: Paths) -> None:
        super().__init__(inner.info, inner.name, inner.deterministic)
        self.inner, self.host, self.nodes, self.paths = inner, host, nodes, paths
        self._queue: deque[_Task] = deque()
        self._is_moving = False
        self._open = True
        self._set_groups()

    def _set_groups(self) -> None:
        places = [self.nodes[r] for r in self.world_ranks]
        self._local = [places[:r].count(place) for r, place in enumerate(places)]
        order = list(dict.fromkeys(places))
        self._node_index = [order.index(place) for place in places]
        self._n_slices = min(places.count(place) for place in order)
        node = self.inner.split(self._node_index[self.rank], purpose=f"node of {self.name}")
        local = self._local[self.rank]
        lane = local if local < self._n_slices else None
        self.cross = self.inner.split(lane, purpose=f"across nodes of {self.name}")
        if node is None:
            raise RankFailed(f"{self.name} could not be split into nodes")
        self.node = NodeCommunicator.over(node, self.host, self.paths)
        self._results = self.node._results

    @property
    def mpi(self) -> Any:
        """The owned mpi4py communicator, where the transport has one."""
        return self.inner.mpi  # type: ignore[attr-defined]

    @property
    def world_ranks(self) -> tuple[int, ...]:
        """The ranks of the group, as ranks of the world."""
        return self.inner.world_ranks  # type: ignore[attr-defined,no-any-return]

    # -- the seam ---------------------------------------------------------------------------

    def submit(self, call: Call) -> Request:
        """Start one call, in steps where the nodes make it cheaper.

        Parameters
        ----------
        call : Call
            Any call.

        Returns
        -------
        Request
            Ended if the call is blocking.
        """
        if not self._open:
            raise RankFailed(f"{self.name} is closed; {call} came after close()")
        program = self._program(call)
        if program is None:
            if call.blocking and call.op not in (Op.SEND, Op.RECV):
                self._drain()
            return self.inner.submit(call)
        task = _Task(program, self._agreement(call))
        self._queue.append(task)
        if call.blocking:
            self._drain()
            return ENDED
        self.host.pending.append(self)  # every wait of this rank moves it on
        self._advance()
        return Request(call, lambda: self._done(task), self._missing, block=self._drain)

    def split(self, color: int | None, key: int = 0, purpose: str = "split") -> Communicator | None:
        """Make one group per color. Collective over this group.

        Parameters
        ----------
        color, key, purpose
            As in `Communicator.split`.

        Returns
        -------
        Communicator or None
            The group of this rank.
        """
        self._drain()
        group = self.inner.split(color, key, purpose)
        return None if group is None else placed(group, self.host, self.nodes, self.paths)

    def progress(self) -> None:
        """Move pending calls on without waiting for any of them."""
        self._advance()
        self.inner.progress()

    def move_on(self) -> None:
        """Move pending calls in steps on: what waits elsewhere on this rank do."""
        self._advance()

    @property
    def calls(self) -> HierarchicalCommunicator:
        """What a host asks about calls under way."""
        return self

    @property
    def can_go_on(self) -> bool:
        """Whether `move_on` might do something; without effects."""
        return bool(self._queue)

    def close(self) -> None:
        """Release the group and its parts. Collective over it."""
        if self._open:
            self.close_devices()
            self._drain()
            self._open = False
            self.node.close()
            if self.cross is not None:
                self.cross.close()
            self.inner.close()

    def renew(self) -> None:
        """Begin anew after calls were broken off. Collective; the transport must be sound."""
        self._queue.clear()
        self._set_groups()

    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike = np.float32) -> Array:
        """An array that peers on the node read and write where it lies; see `Storage.empty`."""
        return self.node.empty(shape, dtype)

    def empty_shared(self, shape: int | tuple[int, ...], dtype: DTypeLike = np.float32) -> Array:
        """One result array a node; see `Storage.empty_shared`. Collective."""
        return self.node.empty_shared(shape, dtype)

    def free(self, array: Array) -> None:
        """Give memory of `empty` back, or (collective) of `empty_shared`."""
        self.node.free(array)

    # -- calls in steps ---------------------------------------------------------------------

    def _program(self, call: Call) -> Program | None:
        """The steps of a call, or None where the flat transport makes it."""
        if call.error is not None or (call.input is None and call.output is None):
            return None
        if call.op is Op.BROADCAST and self._local[call.root or 0] < self._n_slices:
            return self._broadcast(call)
        if call.op is Op.ALL_REDUCE and call.reduce_op in _PLAIN and not call.deterministic:
            return self._all_reduce(call, call.reduce_op)
        return None

    def _agreement(self, call: Call) -> Request | None:
        """Where the transport checks calls, let it compare this one on all ranks.

        Begun with the call, so that the transport sees its calls in one order everywhere.
        """
        if not getattr(self.inner, "checked", True):
            return None
        return self.inner.submit(Call(Op.BARRIER, agreed=call.signature, blocking=False))

    def _all_reduce(self, call: Call, op: ReduceOp) -> Program:
        source, target = call.input, call.output
        if source is None or target is None or source.size == 0:
            return
        wide = accumulation_dtype(source.dtype, op)
        within = ReduceOp.SUM if op is ReduceOp.MEAN else op
        counts = [*spread_sizes(source.size, self._n_slices)]
        counts += [0] * (self.node.size - self._n_slices)
        piece = np.empty(counts[self.node.rank], wide)
        whole = target if target.dtype == wide else np.empty(source.size, wide)
        given = source.astype(wide, copy=False)
        yield self.node.begin_reduce_scatter(given, within, counts=counts, out=piece)
        if self.cross is not None:
            yield self.cross.begin_all_reduce(piece, within, out=piece)
        if op is ReduceOp.MEAN:
            np.divide(piece, self.size, out=piece)
        yield self.node.begin_all_gather(piece, counts=counts, out=whole)
        if whole is not target:
            target[...] = whole.astype(target.dtype, copy=False)

    def _broadcast(self, call: Call) -> Program:
        target, root = call.output, call.root or 0
        if target is None or target.size == 0:
            return
        if self.rank == root and call.input is not None and call.input is not target:
            target[...] = call.input
        lane = self._local[root]
        if self._local[self.rank] == lane and self.cross is not None:
            yield self.cross.begin_broadcast(target, self._node_index[root], out=target)
        yield self.node.begin_broadcast(target, lane, out=target)

    def _advance(self) -> None:
        if self._is_moving:  # a wait or test of a part looks at all that is under way, also here
            return
        self._is_moving = True
        try:
            while self._queue and self._queue[0].settle():
                self._queue.popleft()
        finally:
            self._is_moving = False
        self._leave()

    def _leave(self) -> None:
        """Nothing is under way any more: no wait need look here."""
        if not self._queue:
            while self in self.host.pending:
                self.host.pending.remove(self)

    def _drain(self) -> None:
        """End the pending calls in their order, waiting as their parts do."""
        self._is_moving = True
        try:
            while self._queue:
                self._queue.popleft().finish()
        finally:
            self._is_moving = False
        self._leave()

    def _done(self, task: _Task) -> bool:
        self._advance()
        if task.error is not None:
            raise task.error
        return task.done

    def _missing(self) -> str:
        """Whom the part that is under way misses, for the message of a deadline."""
        part = self._queue[0].part if self._queue else None
        return "" if part is None else f"; its part {part.call}{part.missing()}"


class _Task:
    """One call in steps, none of which begins before the calls before it have ended.

    So the parts of all calls come in one order on every rank, whoever is faster.
    """

    def __init__(self, program: Program, first: Request | None) -> None:
        self._program = program
        self.part = first
        self._has_begun = first is not None
        self.done = False
        self.error: BaseException | None = None

    def _next(self) -> None:
        self._has_begun = True
        self.part = next(self._program, None)
        self.done = self.part is None

    def settle(self) -> bool:
        """Go on as far as possible without waiting; an error is kept for the one who waits."""
        try:
            if not self._has_begun:
                self._next()
            while self.part is not None and self.part.test():
                self._next()
        except Exception as error:
            self.error, self.part, self.done = error, None, True
        return self.done

    def finish(self) -> None:
        """Go on to the end."""
        if not self._has_begun:
            self._next()
        while self.part is not None:
            self.part.wait()
            self._next()
        self.done = True
        if self.error is not None:
            raise self.error
