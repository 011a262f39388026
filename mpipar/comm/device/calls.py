"""Calls on device arrays, in one of three ways.

``direct`` hands device memory to the MPI, where a probe in a child process has shown that it can;
``nccl`` uses NCCL, where every rank has a device of its own; ``staged`` goes through pinned host
memory, in chunks whose copies overlap with the transfer, and works on every transport. Both ends
of a message longer than two chunks (``MPIPAR_DEVICE_CHUNK_BYTES``) lie on devices: a host would
wait for one piece.
"""

from __future__ import annotations

import os
import platform
from typing import TYPE_CHECKING, Any

from mpipar.comm.call import Call, Op, ReduceOp
from mpipar.comm.device.arrays import Device, library, package_of
from mpipar.comm.device.nccl import NcclGroup, can_carry, told_id
from mpipar.comm.device.stage import Stage, followed
from mpipar.comm.node.paths import DEVICE_WAYS, Paths
from mpipar.comm.request import ENDED, Request
from mpipar.errors import CollectiveMismatch, UnsupportedArray

if TYPE_CHECKING:
    from mpipar.comm.base import Communicator

SMALL_BYTES = 64 * 1024
_PEERS = (Op.SEND, Op.RECV)


def capability_key(call: Call) -> str:
    """Under which name a probe tells whether the MPI can make this call on device memory.

    Parameters
    ----------
    call : Call
        Any.

    Returns
    -------
    str
        Operation, dtype ("bytes" for moves) and size class.
    """
    op = Op.SEND if call.op is Op.RECV else call.op
    dtype = "bytes" if call.reduce_op is None or call.dtype is None else call.dtype.name
    return f"{op} {dtype} {'small' if call.n_bytes <= SMALL_BYTES else 'large'}"


class DeviceCalls:
    """The device side of one communicator.

    Parameters
    ----------
    comm : Communicator
        Whose calls these are.
    """

    def __init__(self, comm: Communicator) -> None:
        self.comm, self.stage = comm, Stage(comm)
        self.stats = self.stage.stats
        self.forced = os.environ.get("MPIPAR_DEVICE_WAY", "")
        self.steps = Paths.from_environment(comm.size).device
        self.capable: frozenset[str] = frozenset()
        self._nccl: NcclGroup | None = None
        self._is_agreed = self._has_messages = False

    def agree(self, device: Device, way: str = "") -> tuple[str, ...]:
        """Find out, with all ranks, which ways this group has. Collective.

        The first collective call on device arrays does it too, but messages (`send`, `recv`) take
        another way than ``staged`` only after this, since two ranks cannot find out alone.

        Parameters
        ----------
        device : Device
            The library of the arrays.
        way : str
            One of `DEVICE_WAYS` for all calls from now on; "" for the measured or shipped table.

        Returns
        -------
        tuple of str
            The ways that there are.

        Raises
        ------
        UnsupportedArray
            If the way is unknown or not possible; the same on every rank.
        """
        self.forced = way or self.forced
        if self.forced and self.forced not in DEVICE_WAYS:
            raise UnsupportedArray(f"device way {self.forced!r}: {', '.join(DEVICE_WAYS)} would do")
        self._discover(device)
        self._has_messages = True
        return self.ways()

    @property
    def nccl(self) -> Any:
        """NCCL's own communicator of this group, None without one."""
        return None if self._nccl is None else self._nccl.comm

    def close(self) -> None:
        """Give NCCL's communicator back."""
        if self._nccl is not None:
            self._nccl.comm.destroy()
        self._nccl, self._is_agreed = None, False

    def ways(self) -> tuple[str, ...]:
        """The ways that this group has, as found so far."""
        has = {"nccl": self._nccl is not None, "direct": bool(self.capable), "staged": True}
        return tuple(way for way in DEVICE_WAYS if has[way])

    def _discover(self, device: Device) -> None:
        self._is_agreed = True
        if self.forced == "staged":
            return
        mine = [*device.names(), platform.node(), device.nccl is not None]
        told = self.comm.all_gather_json(mine)
        owners = {(node, identity) for _, identity, node, _ in told}
        if all(row[3] for row in told) and len(owners) == len(told) and self._nccl is None:
            made = self.comm.made_by_root(lambda: told_id(device))
            self._nccl = NcclGroup(device, self.comm.rank, self.comm.size, made)
        if self._engine() is not None and len({row[0] for row in told}) == 1:
            from mpipar.comm.mpi.probe import capability

            self.capable = frozenset(self.comm.made_by_root(lambda: capability(told[0][0])))
        if self.forced and self.forced not in self.ways():
            raise UnsupportedArray(
                f"device way {self.forced}: this group has {', '.join(self.ways())}; NCCL needs a "
                "device of its own for every rank, direct an MPI that reads device memory"
            )

    # -- one call ---------------------------------------------------------------------------

    def submit(self, call: Call) -> Request:
        """Start one call on device buffers.

        Parameters
        ----------
        call : Call
            As for `Communicator.submit`.

        Returns
        -------
        Request
            Ended if the call is blocking, in the order of the stream.
        """
        if call.error is not None:
            return self.comm.submit(call)
        device = library(package_of(call.input if call.input is not None else call.output))
        if not self._is_agreed and call.op not in _PEERS:
            self._discover(device)
        way = self.choose(call)
        if way != "staged" and call.op not in _PEERS and self._is_checked():
            self._compare(call)
        self.stats.calls[way] += 1
        if way == "staged":
            return self.stage.submit(call, device)
        if call.reduce_op is ReduceOp.MEAN:
            return self._mean(call, device, way)
        return self._carry(call, device, way)

    def choose(self, call: Call) -> str:
        """Which way a call takes, alike on every rank.

        Parameters
        ----------
        call : Call
            On device buffers.

        Returns
        -------
        str
            Of `DEVICE_WAYS`.
        """
        if call.op in _PEERS and not self._has_messages:
            return "staged"
        is_mean = call.reduce_op is ReduceOp.MEAN and call.output is not None
        summed = call._replace(reduce_op=ReduceOp.SUM) if is_mean else call
        is_plain = not is_mean or call.dtype == getattr(call.output, "dtype", None)
        can = ["staged"]
        if is_plain and can_carry(summed):
            # begun messages would wait for each other on the stream
            if self._nccl is not None and (call.blocking or call.op not in _PEERS):
                can.append("nccl")
            in_one = call.op is not Op.REDUCE_SCATTER or _agreed_bytes(call) <= 2**30
            if in_one and capability_key(summed) in self.capable:
                can.append("direct")
        if self.forced in can:
            return self.forced
        wanted = self._tabled(call) if not self.forced else "staged"
        return wanted if wanted in can else next(w for w in DEVICE_WAYS if w in can)

    def _tabled(self, call: Call) -> str:
        found = ""
        for start, name in self.steps.get(call.op, ()):
            found = name if _agreed_bytes(call) >= start else found
        return found

    def _carry(self, call: Call, device: Device, way: str) -> Request:
        if way == "nccl" and self._nccl is not None:
            self._nccl.carry(call)
            if call.blocking:
                return ENDED
            fence = device.fence()
            return Request(call, lambda: bool(fence.done))
        engine_side = self._engine()
        if engine_side is None:
            raise UnsupportedArray(f"{call}: no MPI is under {self.comm.name}")
        if call.op is Op.BROADCAST and call.input is not None and call.output is not None:
            if call.input is not call.output:
                call.output[...] = call.input
            call = call._replace(input=call.output)
        if call.op is Op.REDUCE and call.input is not None and call.input is call.output:
            call = call._replace(input=call.input.copy())
        device.fence().synchronize()
        return engine_side.submit(call)

    def _mean(self, call: Call, device: Device, way: str) -> Request:
        """A sum, divided on the device."""
        request = self._carry(call._replace(reduce_op=ReduceOp.SUM), device, way)

        def divide() -> None:
            if call.output is not None and call.output.size:
                call.output[...] = call.output / self.comm.size

        if request is ENDED:
            divide()
            return ENDED
        return followed(self.comm, call, request, divide)

    # -- what is under ----------------------------------------------------------------------

    def _engine(self) -> Communicator | None:
        """The communicator whose calls go straight to the MPI."""
        comm: Any = self.comm
        while comm is not None and not hasattr(comm, "engine"):
            comm = getattr(comm, "inner", None)
        return comm  # type: ignore[no-any-return]

    def _is_checked(self) -> bool:
        return bool(getattr(self._engine(), "checked", False))

    def _compare(self, call: Call) -> None:
        told = self.comm.all_gather_json(call.signature)
        if len(set(told)) > 1:
            odd = next(r for r, text in enumerate(told) if text != told[0])
            raise CollectiveMismatch(f"rank 0: {told[0]}; rank {odd}: {told[odd]}")


def _agreed_bytes(call: Call) -> int:
    """Bytes that every rank knows."""
    if call.op in (Op.ALL_GATHER, Op.GATHER, Op.SCATTER) and call.dtype is not None:
        return sum(call.counts or ()) * call.dtype.itemsize
    if call.op is Op.ALL_TO_ALL and not call.uniform:
        return 0
    array = call.output if call.op is Op.BROADCAST or call.input is None else call.input
    return 0 if array is None else array.nbytes
