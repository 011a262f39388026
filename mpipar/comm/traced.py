"""A communicator that keeps a record of its calls, and what a rank records.

`TracedCommunicator` overrides `submit` and `split`; the rest only leads to the communicator inside.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from mpipar.comm.base import Communicator
from mpipar.comm.call import Array, Call, Op
from mpipar.comm.device.calls import DeviceCalls
from mpipar.comm.port import Port
from mpipar.comm.request import Request

_MESSAGES = (Op.SEND, Op.RECV)


class Tracer:
    """What one rank has recorded: calls of its communicators, and events of its program.

    Parameters
    ----------
    rank : int
        In the whole job.
    coordinate : mapping of str to int, optional
        Its place on the mesh.
    """

    def __init__(self, rank: int, coordinate: Mapping[str, int] | None = None) -> None:
        self.rank, self.coordinate = rank, dict(coordinate or {})
        self.step = 0
        self.records: list[dict[str, Any]] = []
        self._counts: Counter[tuple[Any, ...]] = Counter()

    def add(self, op: str, start: float, end: float, **facts: Any) -> None:
        """Record something.

        Parameters
        ----------
        op : str
            A collective, ``send``, ``recv``, or a word for an event, such as ``forward``.
        start, end : float
            By `time.perf_counter`.
        **facts
            More fields of the record.
        """
        self.records.append(
            {"op": op, "start_s": start, "duration_s": end - start, "step": self.step, **facts}
        )

    @contextlib.contextmanager
    def span(self, op: str) -> Iterator[None]:
        """Record how long a block takes.

        Parameters
        ----------
        op : str
            Its name.

        Yields
        ------
        None
            Nothing.
        """
        start = time.perf_counter()
        yield
        self.add(op, start, time.perf_counter())

    def number(self, call: Call, group: Group) -> int:
        """How many such calls came before: the same on all ranks, or at both ends, of this one."""
        key: tuple[Any, ...] = (*group.members, group.purpose)
        if call.op in _MESSAGES:
            key = (*key, call.op, call.peer, call.tag)
        self._counts[key] += 1
        return self._counts[key] - 1

    def called(
        self, call: Call, group: Group, number: int, start: float, wait_s: float | None = None
    ) -> None:
        """Record a call that has just ended."""
        facts: dict[str, Any] = {
            "group": group.label,
            "members": group.members,
            "bytes": call.n_bytes,
            "dtype": "" if call.dtype is None else call.dtype.name,
            "algorithm": group.algorithm(call),
            "sequence": number,
        }
        if call.op in _MESSAGES:
            facts |= {"peer": group.members[call.peer], "tag": call.tag}
        if wait_s is not None:
            facts["wait_s"] = wait_s
        self.add(str(call.op), start, time.perf_counter(), **facts)

    def write(self, file: Path, offset_s: float) -> None:
        """Write the records as JSON lines, on rank 0's clock.

        Parameters
        ----------
        file : Path
            Replaced.
        offset_s : float
            This rank's clock less rank 0's.
        """
        common = {"rank": self.rank, "coordinate": self.coordinate}
        with file.open("w", encoding="utf-8") as lines:
            for record in self.records:
                shifted = {**record, **common, "start_s": record["start_s"] - offset_s}
                lines.write(json.dumps(shifted) + "\n")


class Group:
    """What a record says of the communicator: label, ranks of the job, and how a call goes."""

    def __init__(self, inner: Communicator, label: str, purpose: str, members: list[int]) -> None:
        self.inner, self.label, self.purpose, self.members = inner, label, purpose, members

    def algorithm(self, call: Call) -> str:
        """How the call went: on a device its way, through node memory "flags" or "node"."""
        if call.on_device:
            return self.inner.devices.choose(call)
        paths = getattr(self.inner, "paths", None)
        if paths is None or call.op in _MESSAGES:
            return "transport"
        return str(paths.choose(call))


class TracedCommunicator(Communicator):
    """Hands every call on, and records it.

    Parameters
    ----------
    inner : Communicator
        What communicates.
    tracer : Tracer
        Keeps the records of this rank.
    label : str
        Name of the group in the records, such as the axes of a mesh.
    members : list of int, optional
        Its ranks as ranks of the job; by default it is the job.
    """

    def __init__(
        self,
        inner: Communicator,
        tracer: Tracer,
        label: str = "world",
        members: list[int] | None = None,
    ) -> None:
        super().__init__(inner.info, inner.name, inner.deterministic)
        self.inner, self.tracer = inner, tracer
        ranks = list(range(inner.size)) if members is None else members
        self._group = Group(inner, label, inner.name, ranks)

    def submit(self, call: Call) -> Request:
        """Start one call, and record it when it has ended.

        Parameters
        ----------
        call : Call
            Any call.

        Returns
        -------
        Request
            Of the communicator inside, watched.
        """
        number, start = self.tracer.number(call, self._group), time.perf_counter()
        request = self.inner._start(call)
        if not call.blocking:
            return _Watched(request, self.tracer, self._group, number, start)
        self.tracer.called(call, self._group, number, start)
        return request

    def split(self, color: int | None, key: int = 0, purpose: str = "split") -> Communicator | None:
        """Make one traced group per color. Collective over this group.

        Parameters
        ----------
        color, key, purpose
            As in `Communicator.split`; the purpose is the group's label.

        Returns
        -------
        Communicator or None
            The group of this rank.
        """
        group = self.inner.split(color, key, purpose)
        told = self.inner.all_gather_json([color, key, self._group.members[self.rank]])
        if group is None:
            return None
        same = [(k, place, member) for place, (c, k, member) in enumerate(told) if c == color]
        members = [member for _, _, member in sorted(same)]
        return TracedCommunicator(group, self.tracer, purpose, members)

    def labelled(self, label: str) -> Communicator:
        """The same group under another name in the records.

        Parameters
        ----------
        label : str
            Such as the axes of a mesh that it stands for.

        Returns
        -------
        Communicator
            Shares the communicator inside.
        """
        return TracedCommunicator(self.inner, self.tracer, label, self._group.members)

    # -- what only leads inside -------------------------------------------------------------

    def _start(self, call: Call) -> Request:
        return self.submit(call)  # a call on a device is one record, however it is carried out

    @property
    def devices(self) -> DeviceCalls:
        """As of the communicator inside."""
        return self.inner.devices

    @property
    def mpi(self) -> Any:
        """The owned mpi4py communicator, where the transport has one."""
        return self.inner.mpi  # type: ignore[attr-defined]

    @property
    def shares_memory(self) -> bool:
        """Whether all ranks of the group share the memory of a node."""
        return self.inner.shares_memory

    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike = np.float32) -> Array:
        """As of the communicator inside."""
        return self.inner.empty(shape, dtype)

    def empty_shared(self, shape: int | tuple[int, ...], dtype: DTypeLike = np.float32) -> Array:
        """As of the communicator inside."""
        return self.inner.empty_shared(shape, dtype)

    def free(self, array: Array) -> None:
        """As of the communicator inside."""
        self.inner.free(array)

    def views(self, x: Array) -> list[Array]:
        """As of the communicator inside."""
        return self.inner.views(x)

    def port(self) -> Port:
        """As of the communicator inside."""
        return self.inner.port()

    def begin_message(self, call: Call) -> Request:
        """As of the communicator inside: how channels tell each other of themselves."""
        return self.inner.begin_message(call)

    def progress(self) -> None:
        """As of the communicator inside."""
        self.inner.progress()

    def close(self) -> None:
        """As of the communicator inside."""
        self.inner.close()


class _Watched(Request):
    """A request whose end is recorded, with the time for which the program waited."""

    __slots__ = ("_inner", "_record", "_waited_from")

    def __init__(
        self, inner: Request, tracer: Tracer, group: Group, number: int, start: float
    ) -> None:
        super().__init__(inner.call, self._moved, inner._explain, inner._deadline_s, inner._block)
        self._inner = inner
        self._waited_from: float | None = None

        def record(wait_s: float) -> None:
            tracer.called(inner.call, group, number, start, wait_s)

        self._record = record

    def _moved(self) -> bool:
        if not self._inner.test():
            return False
        began = self._waited_from
        self._record(0.0 if began is None else time.perf_counter() - began)
        return True

    def wait(self, timeout_s: float | None = None) -> Any:
        """Wait for the end of the call.

        Parameters
        ----------
        timeout_s : float, optional
            As of any request.

        Returns
        -------
        array, tuple or None
            What the blocking verb of the same name returns.
        """
        if self._advance is not None:
            self._waited_from = time.perf_counter()
        return super().wait(timeout_s)


def clock_offsets(comm: Communicator, clock: Any = time.perf_counter) -> list[float]:
    """Offset of each rank's clock from rank 0's. Collective.

    Parameters
    ----------
    comm : Communicator
        All ranks.
    clock : callable
        Gives seconds.

    Returns
    -------
    list of float
        On rank 0, one a rank; the fastest of some round trips decides, so half of that is the
        error at most. Elsewhere zeros.
    """
    offsets, mine = [0.0] * comm.size, np.empty(1)
    for rank in range(1, comm.size):
        best = (float("inf"), 0.0)
        for _ in range(5):
            if comm.rank == 0:
                start = clock()
                comm.send(np.zeros(1), rank)
                comm.recv(mine, rank)
                end = clock()
                best = min(best, (end - start, float(mine[0]) - (start + end) / 2))
            elif comm.rank == rank:
                comm.recv(mine, 0)
                comm.send(np.array([clock()]), 0)
        offsets[rank] = best[1]
    return offsets
