"""The communicator: nine verbs and their kin as sugar over `submit` and `split`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpipar.comm import build
from mpipar.comm.call import Array, Call, CommInfo, Op, ReduceOp
from mpipar.comm.request import Request
from mpipar.errors import ParallelismError, UnsupportedArray, rebuild

SUM = ReduceOp.SUM


class Communicator:
    """A group of ranks and the calls they make together.

    A transport implements `submit` and `split`, and nothing else; every verb below is written in
    terms of them. All verbs but `send` and `recv` are *collective*: every rank of the group makes
    the same call in the same order. Arrays may have any layout on any rank independently; results
    equal the NumPy reference. n is the number of ranks, B the bytes of one rank's input.

    Parameters
    ----------
    info : CommInfo
        Rank and world size.
    name : str
        Shown in messages.
    deterministic : bool
        Default of the verbs' argument of that name.
    """

    def __init__(self, info: CommInfo, name: str = "world", deterministic: bool = False) -> None:
        self.info = info
        self.name = name
        self.rank = info.rank
        self.size = info.world_size
        self.deterministic = deterministic

    # -- the seam ---------------------------------------------------------------------------

    def submit(self, call: Call) -> Request:
        """Start one call. What a transport implements.

        Parameters
        ----------
        call : Call
            The call; where it carries an error, that is raised, on every rank where the transport
            can tell them.

        Returns
        -------
        Request
            Already ended if ``call.blocking``.
        """
        raise NotImplementedError

    def split(
        self, color: int | None, key: int = 0, purpose: str = "split"
    ) -> Communicator | None:
        """Make one group per color. Collective over this group.

        Parameters
        ----------
        color : int or None
            Ranks with equal colors form a group; None joins no group.
        key : int
            Order in the new group; equal keys keep the order of this one.
        purpose : str
            Groups of the same ranks and purpose share one underlying communicator, counted.

        Returns
        -------
        Communicator or None
            The group of this rank, to be closed when it is no longer needed.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Release the group. Collective over it; closing twice does nothing."""

    def progress(self) -> None:
        """Move pending calls on without waiting for any of them."""

    def prepare(self, op: Op, x: Any = None, /, **arguments: Any) -> Callable[[], Any]:
        """Build a call once, to make it many times on the same arrays.

        Parameters
        ----------
        op : Op
            Which verb.
        x : array-like
            Input; read afresh at each call.
        **arguments
            As in the verb; for results without allocation give `out`.

        Returns
        -------
        callable
            Makes the call and returns its result. It holds the arrays. Collective as the verb is.
        """
        if not (isinstance(x, np.ndarray) and x.flags.c_contiguous) and x is not None:
            raise UnsupportedArray("prepare needs a C-contiguous NumPy array, which it reads anew")
        call, finish = self._built(op, x, arguments)
        return self._prepared(call, finish)

    def _prepared(self, call: Call, finish: Callable[[], Any]) -> Callable[[], Any]:
        """The handle of `prepare`; transports with a cheaper way override it."""

        def handle() -> Any:
            self.submit(call).wait()
            return finish()

        return handle

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name}: rank {self.rank} of {self.size})"

    # -- collectives ------------------------------------------------------------------------

    def all_reduce(
        self, x: Any, op: ReduceOp = SUM, out: Array | None = None, *,
        deterministic: bool | None = None,
    ) -> Any:
        """Reduce over all ranks; every rank gets the result. Collective.

        Parameters
        ----------
        x : array-like
            Same shape and dtype on every rank. float16 and bfloat16 accumulate in float32.
        op : ReduceOp
            How values are combined.
        out : ndarray, optional
            Where the result goes; ``out=x`` reduces in place.
        deterministic : bool, optional
            Rank-order sums, bitwise equal to ``functools.reduce(numpy.add, ...)``.

        Returns
        -------
        ndarray
            Shape of `x`; for the location forms a pair (values, ranks).

        Notes
        -----
        Cost: 2 (n-1)/n B sent a rank.
        """
        return self._run(Op.ALL_REDUCE, x, op=op, out=out, deterministic=deterministic)

    def begin_all_reduce(
        self, x: Any, op: ReduceOp = SUM, out: Array | None = None, *,
        deterministic: bool | None = None,
    ) -> Request:
        """Start `all_reduce` without waiting for peers.

        Parameters
        ----------
        x, op, out, deterministic
            As in `all_reduce`.

        Returns
        -------
        Request
            Its `wait` gives the result.
        """
        return self._begin(Op.ALL_REDUCE, x, op=op, out=out, deterministic=deterministic)

    def reduce_scatter(
        self, x: Any, op: ReduceOp = SUM, dim: int = 0, counts: Sequence[int] | None = None,
        out: Array | None = None, *, deterministic: bool | None = None,
    ) -> Any:
        """Reduce over all ranks; rank r keeps the r-th block along `dim`. Collective.

        Parameters
        ----------
        x : array-like
            Same shape and dtype on every rank.
        op : ReduceOp
            How values are combined (not the location forms).
        dim : int
            Dimension that is cut.
        counts : sequence of int, optional
            Extent of each rank's block; by default the first ranks take one more.
        out : ndarray, optional
            Where the block goes.
        deterministic : bool, optional
            Rank-order sums.

        Returns
        -------
        ndarray
            The block of this rank.

        Notes
        -----
        Cost: (n-1)/n B sent a rank.
        """
        return self._run(Op.REDUCE_SCATTER, x, op=op, dim=dim, counts=counts, out=out,
                         deterministic=deterministic)  # fmt: skip

    def begin_reduce_scatter(
        self, x: Any, op: ReduceOp = SUM, dim: int = 0, counts: Sequence[int] | None = None,
        out: Array | None = None, *, deterministic: bool | None = None,
    ) -> Request:
        """Start `reduce_scatter` without waiting for peers.

        Parameters
        ----------
        x, op, dim, counts, out, deterministic
            As in `reduce_scatter`.

        Returns
        -------
        Request
            Its `wait` gives the block.
        """
        return self._begin(Op.REDUCE_SCATTER, x, op=op, dim=dim, counts=counts, out=out,
                           deterministic=deterministic)  # fmt: skip

    def all_gather(
        self, x: Any, dim: int = 0, counts: Sequence[int] | None = None, out: Array | None = None
    ) -> Any:
        """Join the arrays of all ranks along `dim`, in rank order. Collective.

        Parameters
        ----------
        x : array-like
            Same dtype and shape on every rank, but along `dim` where `counts` says so; 0-d counts
            as one element.
        dim : int
            Dimension along which they are joined.
        counts : sequence of int, optional
            Extent of each rank's array along `dim`; needed where they differ.
        out : ndarray, optional
            Where the result goes.

        Returns
        -------
        ndarray
            The joined array, on every rank.

        Notes
        -----
        Cost: (n-1) B sent a rank.
        """
        return self._run(Op.ALL_GATHER, x, dim=dim, counts=counts, out=out)

    def begin_all_gather(
        self, x: Any, dim: int = 0, counts: Sequence[int] | None = None, out: Array | None = None
    ) -> Request:
        """Start `all_gather` without waiting for peers.

        Parameters
        ----------
        x, dim, counts, out
            As in `all_gather`.

        Returns
        -------
        Request
            Its `wait` gives the joined array.
        """
        return self._begin(Op.ALL_GATHER, x, dim=dim, counts=counts, out=out)

    def all_to_all(
        self, x: Any, dim: int = 0, send_counts: Sequence[int] | None = None,
        recv_counts: Sequence[int] | None = None, out: Array | None = None,
    ) -> Any:
        """Send the r-th block along `dim` to rank r and join what comes. Collective.

        Parameters
        ----------
        x : array-like
            Same dtype on every rank, same shape but along `dim`.
        dim : int
            Dimension that is cut and joined.
        send_counts : sequence of int, optional
            Extent of the block for each rank; by default the first ranks take one more.
        recv_counts : sequence of int, optional
            Extent of the block from each rank; exchanged first (8 bytes a peer) where only
            `send_counts` is given.
        out : ndarray, optional
            Where the result goes.

        Returns
        -------
        ndarray
            The received blocks in rank order.

        Notes
        -----
        Cost: (n-1)/n B sent a rank.
        """
        if send_counts is not None and recv_counts is None:
            recv_counts = self._exchanged_counts(send_counts)
        return self._run(Op.ALL_TO_ALL, x, dim=dim, send_counts=send_counts,
                         recv_counts=recv_counts, out=out)  # fmt: skip

    def begin_all_to_all(
        self, x: Any, dim: int = 0, send_counts: Sequence[int] | None = None,
        recv_counts: Sequence[int] | None = None, out: Array | None = None,
    ) -> Request:
        """Start `all_to_all` without waiting for peers; with counts, both are needed.

        Parameters
        ----------
        x, dim, send_counts, recv_counts, out
            As in `all_to_all`.

        Returns
        -------
        Request
            Its `wait` gives the received blocks.
        """
        if send_counts is not None and recv_counts is None:
            recv_counts = ()  # refused by the check below, on every rank alike
        return self._begin(Op.ALL_TO_ALL, x, dim=dim, send_counts=send_counts,
                           recv_counts=recv_counts, out=out)  # fmt: skip

    def broadcast(self, x: Any, root: int = 0, out: Array | None = None) -> Any:
        """Give every rank the array of the root. Collective.

        Parameters
        ----------
        x : array-like
            Same shape and dtype on every rank; its values matter at the root only.
        root : int
            Whose values are sent.
        out : ndarray, optional
            Where they go; ``out=x`` overwrites in place.

        Returns
        -------
        ndarray
            The root's values.

        Notes
        -----
        Cost: B received a rank.
        """
        return self._run(Op.BROADCAST, x, root=root, out=out)

    def begin_broadcast(self, x: Any, root: int = 0, out: Array | None = None) -> Request:
        """Start `broadcast` without waiting for peers.

        Parameters
        ----------
        x, root, out
            As in `broadcast`.

        Returns
        -------
        Request
            Its `wait` gives the root's values.
        """
        return self._begin(Op.BROADCAST, x, root=root, out=out)

    def barrier(self) -> None:
        """Wait until every rank of the group has come here. Collective."""
        self._run(Op.BARRIER, None)

    # -- rooted forms -----------------------------------------------------------------------

    def reduce(
        self, x: Any, op: ReduceOp = SUM, root: int = 0, out: Array | None = None, *,
        deterministic: bool | None = None,
    ) -> Any:
        """Reduce over all ranks; the root gets the result. Collective.

        Parameters
        ----------
        x, op, out, deterministic
            As in `all_reduce`; `out` matters at the root only.
        root : int
            Who gets the result.

        Returns
        -------
        ndarray or None
            None away from the root.
        """
        return self._run(Op.REDUCE, x, op=op, root=root, out=out, deterministic=deterministic)

    def gather(
        self, x: Any, root: int = 0, dim: int = 0, counts: Sequence[int] | None = None,
        out: Array | None = None,
    ) -> Any:
        """Join the arrays of all ranks at the root. Collective.

        Parameters
        ----------
        x, dim, counts, out
            As in `all_gather`; `out` matters at the root only.
        root : int
            Who gets the result.

        Returns
        -------
        ndarray or None
            None away from the root.
        """
        return self._run(Op.GATHER, x, root=root, dim=dim, counts=counts, out=out)

    def scatter(
        self, x: Any = None, root: int = 0, dim: int = 0, counts: Sequence[int] | None = None,
        out: Array | None = None,
    ) -> Any:
        """Give rank r the r-th block of the root's array. Collective.

        Parameters
        ----------
        x : array-like, optional
            Needed at the root only; its shape and dtype travel ahead as JSON (one broadcast).
        root : int
            Whose array is cut.
        dim : int
            Dimension that is cut.
        counts : sequence of int, optional
            Extent of each block; by default the first ranks take one more.
        out : ndarray, optional
            Where this rank's block goes.

        Returns
        -------
        ndarray
            The block of this rank.
        """
        header: Any
        try:
            header = build.scatter_header(self.info, x, root, dim, counts)
        except ParallelismError as error:
            header = error
        header = self.broadcast_json(header, root if 0 <= root < self.size else 0)
        return self._run(Op.SCATTER, x, root=root, out=out, header=header)

    # -- point to point ---------------------------------------------------------------------

    def send(self, x: Any, dest: int, tag: int = 0) -> None:
        """Send an array to one rank; never relies on the MPI's buffers.

        Parameters
        ----------
        x : array-like
            What is sent.
        dest : int
            To whom; not collective.
        tag : int
            Messages of one tag between two ranks arrive in the order in which they were sent.
        """
        self._run(Op.SEND, x, dest=dest, tag=tag)

    def begin_send(self, x: Any, dest: int, tag: int = 0) -> Request:
        """Start `send` without waiting for the peer.

        Parameters
        ----------
        x, dest, tag
            As in `send`; `x` must not be changed before the request has ended.

        Returns
        -------
        Request
            Owns `x` until it has ended.
        """
        return self._begin(Op.SEND, x, dest=dest, tag=tag)

    def recv(self, out: Array, source: int, tag: int = 0) -> Any:
        """Receive an array from one rank into `out`.

        Parameters
        ----------
        out : ndarray
            Of the shape and dtype that was sent, in any layout.
        source : int
            From whom; not collective.
        tag : int
            As in `send`.

        Returns
        -------
        ndarray
            `out`.

        Raises
        ------
        CollectiveMismatch
            If what came has another size (in checked mode: another shape or dtype).
        """
        return self._run(Op.RECV, out, source=source, tag=tag)

    def begin_recv(self, out: Array, source: int, tag: int = 0) -> Request:
        """Start `recv` without waiting for the peer.

        Parameters
        ----------
        out, source, tag
            As in `recv`.

        Returns
        -------
        Request
            Its `wait` gives `out`.
        """
        return self._begin(Op.RECV, out, source=source, tag=tag)

    # -- small objects ----------------------------------------------------------------------

    def all_gather_json(self, value: Any) -> list[Any]:
        """Give every rank the small objects of all ranks, as JSON. Collective.

        Parameters
        ----------
        value : object
            What `json.dumps` takes; an error of mpipar's tree is raised on every rank.

        Returns
        -------
        list
            One object a rank, in rank order.
        """
        text = _encoded(value)
        sizes = self.all_gather(np.array([text.size], np.int64))
        joined = self.all_gather(text, counts=[int(s) for s in sizes])
        stops = np.cumsum(sizes)
        return _decoded([joined[a - s : a] for a, s in zip(stops, sizes, strict=True)])

    def broadcast_json(self, value: Any, root: int = 0) -> Any:
        """Give every rank the small object of the root, as JSON. Collective.

        Parameters
        ----------
        value : object
            What `json.dumps` takes; an error of mpipar's tree is raised on every rank.
        root : int
            Whose object is sent.

        Returns
        -------
        object
            The root's object.
        """
        text = _encoded(value) if self.rank == root else np.empty(0, np.uint8)
        size = int(self.broadcast(np.array(text.size, np.int64), root))
        if self.rank != root:
            text = np.empty(size, np.uint8)
        return _decoded([self.broadcast(text, root, out=text)])[0]

    # -- how a verb becomes a call ----------------------------------------------------------

    def _built(self, op: Op, x: Any, arguments: dict[str, Any]) -> build.Built:
        """The call of a verb; what is wrong with it travels in it, so that all ranks learn it."""
        if arguments.get("deterministic", False) is None:
            arguments["deterministic"] = self.deterministic
        try:
            return _BUILDERS[op](self.info, x, **arguments)
        except ParallelismError as error:
            return Call(op, error=error), _nothing
        except (TypeError, ValueError) as error:
            return Call(op, error=UnsupportedArray(f"{op}: {error}")), _nothing

    def _run(self, op: Op, x: Any, /, **arguments: Any) -> Any:
        call, finish = self._built(op, x, arguments)
        self.submit(call).wait()
        return finish()

    def _begin(self, op: Op, x: Any, /, **arguments: Any) -> Request:
        call, finish = self._built(op, x, arguments)
        request = self.submit(call._replace(blocking=False))
        request.finish = finish
        return request

    def _exchanged_counts(self, send_counts: Sequence[int]) -> list[int] | None:
        counts = np.asarray(send_counts)
        if counts.shape != (self.size,) or counts.dtype.kind not in "iu":
            self._run(Op.ALL_TO_ALL, np.empty(0), dim=0, send_counts=send_counts,
                      recv_counts=None, out=None)  # fmt: skip
        return [int(c) for c in self.all_to_all(counts.astype(np.int64))]


def _nothing() -> None:
    return None


_BUILDERS: dict[Op, Callable[..., build.Built]] = {
    Op.ALL_REDUCE: build.all_reduce,
    Op.REDUCE: build.all_reduce,
    Op.REDUCE_SCATTER: build.reduce_scatter,
    Op.ALL_GATHER: build.all_gather,
    Op.GATHER: build.all_gather,
    Op.ALL_TO_ALL: build.all_to_all,
    Op.BROADCAST: build.broadcast,
    Op.SCATTER: build.scatter,
    Op.SEND: build.send,
    Op.RECV: build.recv,
    Op.BARRIER: build.barrier,
}


def _encoded(value: Any) -> Array:
    """JSON text as bytes; an error, or what is no JSON, becomes a marked object."""
    if not isinstance(value, ParallelismError):
        try:
            return np.frombuffer(bytearray(json.dumps({"value": value}).encode()), np.uint8)
        except (TypeError, ValueError) as error:
            value = UnsupportedArray(f"no JSON value: {error}")
    marked = {"error": type(value).__name__, "message": str(value)}
    return np.frombuffer(bytearray(json.dumps(marked).encode()), np.uint8)


def _decoded(texts: Sequence[Array]) -> list[Any]:
    """The objects of `_encoded`; the first marked error is raised."""
    objects = [json.loads(bytes(text)) for text in texts]
    for each in objects:
        if "error" in each:
            raise rebuild(each["error"], each["message"])
    return [each["value"] for each in objects]
