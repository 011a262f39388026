"""How each call is carried out with MPI: one small program an operation.

A program is a generator that yields MPI requests; whoever drives it waits for each and sends the
status back. The same
program serves blocking and pending calls: when blocking, native operations are made in their
blocking form and nothing is yielded for them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from mpipar.comm.arrays import accumulation_dtype, reduce_rows
from mpipar.comm.call import Array, Call, Op, ReduceOp
from mpipar.comm.local import wrong_size
from mpipar.errors import CollectiveMismatch
from mpipar.units.remainder import spread_sizes

Program = Generator[MPI.Request, MPI.Status, Any]
_SUMS = {ReduceOp.SUM: MPI.SUM, ReduceOp.MEAN: MPI.SUM, ReduceOp.PRODUCT: MPI.PROD}
_ORDERS = {ReduceOp.MIN: MPI.MIN, ReduceOp.MAX: MPI.MAX}
_ONE_PHASE_BYTES = 4096


class Engine:
    """Programs over one MPI communicator that belongs to this library.

    Parameters
    ----------
    comm : MPI.Intracomm
        Owned; its tags are all ours.
    max_bytes : int
        Largest message handed to the MPI in one piece; tests lower it to a few bytes.
    synchronous_sends : bool
        Send in synchronous mode, where no message is buffered.
    """

    def __init__(self, comm: MPI.Intracomm, max_bytes: int, synchronous_sends: bool) -> None:
        self.comm = comm
        self.rank, self.size = comm.rank, comm.size
        self.max_bytes = max_bytes
        self.pair_tag = 2**15
        self._isend = comm.Issend if synchronous_sends else comm.Isend
        self._send = comm.Ssend if synchronous_sends else comm.Send
        self._programs: dict[Op, Callable[[Call], Program]] = {
            Op.ALL_REDUCE: self._all_reduce,
            Op.REDUCE: self._reduce,
            Op.REDUCE_SCATTER: self._reduce_scatter,
            Op.ALL_GATHER: self._all_gather,
            Op.GATHER: self._gather,
            Op.SCATTER: self._scatter,
            Op.ALL_TO_ALL: self._all_to_all,
            Op.BROADCAST: self._broadcast,
            Op.BARRIER: self._barrier,
            Op.SEND: self._point_to_point,
            Op.RECV: self._point_to_point,
        }

    def program(self, call: Call) -> Program:
        """The program of one call.

        Parameters
        ----------
        call : Call
            Found right already.

        Returns
        -------
        iterator of MPI.Request
            To be driven to its end.
        """
        return self._programs[call.op](call)

    def bound(self, call: Call) -> tuple[Callable[..., Any], tuple[Any, ...]] | None:
        """A call that is one native operation on its own buffers, as function and arguments.

        Parameters
        ----------
        call : Call
            A blocking call.

        Returns
        -------
        tuple or None
            None where the call is more than that.
        """
        source, target, op = call.input, call.output, call.reduce_op
        if call.op is Op.BARRIER:
            return self.comm.Barrier, ()
        if call.op is Op.BROADCAST and target is not None and target.nbytes <= self.max_bytes:
            if source is None or source is target:
                return self.comm.Bcast, (_bytes(target), call.root or 0)
            return None
        if source is None or target is None or target.nbytes > self.max_bytes:
            return None
        if call.op is Op.ALL_REDUCE and op in (ReduceOp.SUM, ReduceOp.PRODUCT):
            mpi_op = _native_op(call, source)
            if mpi_op is not None and accumulation_dtype(source.dtype, op) == target.dtype:
                return self.comm.Allreduce, (
                    MPI.IN_PLACE if source is target else source,
                    target,
                    mpi_op,
                )
        if call.op is Op.ALL_GATHER and len(set(call.counts or ())) == 1:
            return self.comm.Allgather, (_bytes(source), _bytes(target))
        return None

    def _native(self, blocking: bool, name: str, *arguments: Any) -> Program:
        if blocking:
            getattr(self.comm, name)(*arguments)
        else:
            yield getattr(self.comm, "I" + name.lower())(*arguments)

    def _chunks(self, n_elements: int, itemsize: int) -> list[slice]:
        step = max(1, self.max_bytes // itemsize)
        return [slice(i, min(i + step, n_elements)) for i in range(0, n_elements, step)]

    def pieces(self, buffer: Array) -> list[Array]:
        """The pieces in which a message travels; an empty one travels as one empty piece.

        Parameters
        ----------
        buffer : ndarray
            Flat.

        Returns
        -------
        list of ndarray
            Views of its bytes, in order.
        """
        raw = buffer.view(np.uint8)
        return [raw[part] for part in self._chunks(raw.size, 1)] or [raw]

    # -- reductions -------------------------------------------------------------------------

    def _all_reduce(self, call: Call) -> Program:
        source, target, op = _buffers(call)
        mpi_op = _native_op(call, source)
        if mpi_op is None:
            yield from self._exchange_reduce(call.blocking, source, target, op)
            return
        wide = accumulation_dtype(source.dtype, op)
        sent = source if source.dtype == wide else source.astype(wide)
        work = target if target.dtype == wide else sent
        if call.blocking and work.nbytes <= self.max_bytes:
            self.comm.Allreduce(MPI.IN_PLACE if sent is work else sent, work, mpi_op)
        else:
            for part in self._chunks(work.size, wide.itemsize):
                given = MPI.IN_PLACE if sent is work else sent[part]
                yield from self._native(call.blocking, "Allreduce", given, work[part], mpi_op)
        self._store(work, target, op)

    def _reduce(self, call: Call) -> Program:
        source, target, op = _buffers(call)
        mpi_op, root = _native_op(call, source), call.root or 0
        mine = self.rank == root
        if mpi_op is None:
            whole = target if mine else np.empty(source.size, target.dtype)
            yield from self._exchange_reduce(call.blocking, source, whole, op)
            return
        wide = accumulation_dtype(source.dtype, op)
        sent = source if source.dtype == wide else source.astype(wide)
        work = target if mine and target.dtype == wide else np.empty(source.size * mine, wide)
        if sent is work:
            sent = sent.copy()
        for part in self._chunks(sent.size, wide.itemsize):
            yield from self._native(
                call.blocking, "Reduce", sent[part], work[part] if mine else None, mpi_op, root
            )
        if mine:
            self._store(work, target, op)

    def _reduce_scatter(self, call: Call) -> Program:
        source, target, op = _buffers(call)
        counts = call.counts or ()
        mpi_op = _native_op(call, source)
        wide = accumulation_dtype(source.dtype, op)
        if mpi_op is None or source.size * wide.itemsize > self.max_bytes:
            rows = yield from self._rows(call.blocking, source, counts)
            reduce_rows(rows, op, target)
            return
        work = target if target.dtype == wide else np.empty(target.size, wide)
        sent = source if source.dtype == wide else source.astype(wide)
        yield from self._native(call.blocking, "Reduce_scatter", sent, work, counts, mpi_op)
        self._store(work, target, op)

    def _store(self, work: Array, target: Array, op: ReduceOp) -> None:
        if op is ReduceOp.MEAN:
            np.divide(work, self.size, out=work)
        if work is not target:
            target[...] = work

    def _rows(self, blocking: bool, source: Array, counts: Sequence[int]) -> Any:
        """Every rank's block for this rank, one row a rank: an all-to-all."""
        mine = counts[self.rank]
        rows = np.empty((self.size, mine), source.dtype)
        yield from self._exchange(blocking, source, counts, rows.reshape(-1), [mine] * self.size)
        return list(rows)

    def _exchange_reduce(
        self, blocking: bool, source: Array, target: Array, op: ReduceOp
    ) -> Program:
        """Rank-order reduction: slices to their owners, reduced there, results to all."""
        if source.nbytes * self.size <= _ONE_PHASE_BYTES:
            rows = np.empty((self.size, source.size), source.dtype)
            yield from self._join(blocking, source, rows.reshape(-1), [source.size] * self.size)
            reduce_rows(list(rows), op, target)
            return
        counts = spread_sizes(source.size, self.size)
        rows = yield from self._rows(blocking, source, counts)
        mine = np.empty(counts[self.rank], target.dtype)
        reduce_rows(rows, op, mine)
        yield from self._join(blocking, mine, target, counts)

    # -- moves: bytes only, so that every dtype is carried ------------------------------------

    def _all_gather(self, call: Call) -> Program:
        source, target, _ = _buffers(call)
        counts = call.counts or (0,) * self.size
        is_even = counts.count(counts[0]) == self.size
        if call.blocking and is_even and target.nbytes <= self.max_bytes:
            self.comm.Allgather(_bytes(source), _bytes(target))
        else:
            yield from self._join(call.blocking, source, target, counts)

    def _join(self, blocking: bool, source: Array, target: Array, counts: Sequence[int]) -> Program:
        item = target.itemsize
        sizes = [c * item for c in counts]
        if target.nbytes > self.max_bytes:
            blocks = _cut(target, counts)
            yield from self._pairs([source] * self.size, blocks)
        elif len(set(sizes)) == 1:
            yield from self._native(blocking, "Allgather", _bytes(source), _bytes(target))
        else:
            yield from self._native(
                blocking, "Allgatherv", _bytes(source), [_bytes(target), sizes, None, MPI.BYTE]
            )

    def _all_to_all(self, call: Call) -> Program:
        source, target, _ = _buffers(call)
        yield from self._exchange(
            call.blocking,
            source,
            call.counts or (),
            target,
            call.recv_counts or (),
            call.uniform,
        )

    def _exchange(
        self,
        blocking: bool,
        source: Array,
        counts: Sequence[int],
        target: Array,
        recv_counts: Sequence[int],
        uniform: bool = True,
    ) -> Program:
        """Blocks to their owners; `uniform` and the size are the same on every rank."""
        if not uniform or source.nbytes > self.max_bytes:
            yield from self._pairs(_cut(source, counts), _cut(target, recv_counts))
            return
        if len({*counts, *recv_counts}) == 1:
            yield from self._native(blocking, "Alltoall", _bytes(source), _bytes(target))
            return
        item = source.itemsize
        yield from self._native(
            blocking,
            "Alltoallv",
            [_bytes(source), [c * item for c in counts], None, MPI.BYTE],
            [_bytes(target), [c * item for c in recv_counts], None, MPI.BYTE],
        )

    def _broadcast(self, call: Call) -> Program:
        target, root = call.output, call.root or 0
        if target is None:
            return
        if call.input is not None and call.input is not target:
            target[...] = call.input
        raw = _bytes(target)
        for part in self._chunks(raw.size, 1):
            yield from self._native(call.blocking, "Bcast", raw[part], root)

    def _gather(self, call: Call) -> Program:
        source, target, _ = _buffers(call)
        root = call.root or 0
        sends: list[Array | None] = [None] * self.size
        sends[root] = source
        blocks = _cut(target, call.counts or ()) if self.rank == root else [None] * self.size
        yield from self._pairs(sends, blocks)

    def _scatter(self, call: Call) -> Program:
        root = call.root or 0
        blocks = [None] * self.size if call.input is None else _cut(call.input, call.counts or ())
        takes: list[Array | None] = [None] * self.size
        takes[root] = call.output
        yield from self._pairs(blocks, takes)

    def _barrier(self, call: Call) -> Program:
        yield from self._native(call.blocking, "Barrier")

    def _pairs(self, sends: Sequence[Array | None], takes: Sequence[Array | None]) -> Program:
        """Block p of `sends` to rank p, block p of `takes` from it, in bounded pieces."""
        own, mine = sends[self.rank], takes[self.rank]
        if own is not None and mine is not None:
            mine[...] = own
        requests = []
        for step in range(1, self.size):
            source = (self.rank - step) % self.size
            if (block := takes[source]) is not None:
                requests += [
                    self.comm.Irecv(piece, source, self.pair_tag) for piece in self.pieces(block)
                ]
        for step in range(1, self.size):
            dest = (self.rank + step) % self.size
            if (block := sends[dest]) is not None:
                requests += [
                    self._isend(piece, dest, self.pair_tag) for piece in self.pieces(block)
                ]
        yield from each(requests)

    # -- point to point ---------------------------------------------------------------------

    def _point_to_point(self, call: Call) -> Program:
        if call.op is Op.SEND and call.input is not None:
            pieces = self.pieces(call.input)
            if call.blocking and len(pieces) == 1:
                self._send(pieces[0], call.peer, call.tag)
                return
            yield from each([self._isend(piece, call.peer, call.tag) for piece in pieces])
        elif call.output is not None:
            n_bytes = 0
            for piece in self.pieces(call.output):
                status = MPI.Status()
                if call.blocking:
                    self.comm.Recv(piece, call.peer, call.tag, status)
                else:
                    status = yield self.comm.Irecv(piece, call.peer, call.tag)
                n_bytes += (got := status.Get_count(MPI.BYTE))
                if got != piece.size:
                    raise wrong_size(call, str(n_bytes))


def each(requests: Sequence[MPI.Request]) -> Program:
    """Wait for requests that are all under way.

    Parameters
    ----------
    requests : sequence of MPI.Request
        In the order in which they are waited for.

    Yields
    ------
    MPI.Request
        One after the other.
    """
    for request in requests:  # noqa: UP028 - a list takes no status back
        yield request


def _native_op(call: Call, source: Array) -> MPI.Op | None:
    """The MPI's own operation, or None where it would not give NumPy's result."""
    op = call.reduce_op or ReduceOp.SUM
    if call.deterministic:
        return None
    if source.dtype.kind in "iu" and op in _ORDERS:
        return _ORDERS[op]
    return _SUMS.get(op)  # the MPI's minimum of NaN is not NumPy's


def _buffers(call: Call) -> tuple[Array, Array, ReduceOp]:
    if call.input is None or call.output is None:
        raise CollectiveMismatch(f"{call} came without its buffers")
    return call.input, call.output, call.reduce_op or ReduceOp.SUM


def _bytes(array: Array) -> Array:
    return array.view(np.uint8)


def _cut(buffer: Array, counts: Sequence[int]) -> list[Array]:
    stops = np.cumsum(counts).tolist()
    return [buffer[stop - count : stop] for stop, count in zip(stops, counts, strict=True)]
