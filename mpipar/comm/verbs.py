"""Rooted verbs, point to point, and small objects."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpipar.comm import build
from mpipar.comm.call import Array, Op, ReduceOp
from mpipar.comm.collectives import SUM, Collectives
from mpipar.comm.request import Request
from mpipar.errors import ParallelismError, UnsupportedArray, rebuild


class Verbs(Collectives):
    """The verbs beside the symmetric collectives."""

    def reduce(
        self,
        x: Any,
        op: ReduceOp = SUM,
        root: int = 0,
        out: Array | None = None,
        *,
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
        self,
        x: Any,
        root: int = 0,
        dim: int = 0,
        counts: Sequence[int] | None = None,
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
        self,
        x: Any = None,
        root: int = 0,
        dim: int = 0,
        counts: Sequence[int] | None = None,
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

    def made_by_root(self, make: Callable[[], Any], root: int = 0) -> Any:
        """What the root makes, or the error that it meets, on every rank. Collective.

        Parameters
        ----------
        make : callable
            Called at the root only; gives what `json.dumps` takes.
        root : int
            Who makes it.

        Returns
        -------
        object
            The root's object.

        Raises
        ------
        ParallelismError
            What `make` raised, on every rank.
        """
        value: Any = None
        if self.rank == root:
            try:
                value = make()
            except ParallelismError as error:
                value = error
        return self.broadcast_json(value, root)


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
