"""The communicator: nine verbs and their kin as sugar over `submit` and `split`."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np

from mpipar.comm import build
from mpipar.comm.call import Call, CommInfo, Op
from mpipar.comm.device.calls import DeviceCalls
from mpipar.comm.request import ENDED, Request
from mpipar.comm.storage import Storage
from mpipar.errors import ParallelismError, UnsupportedArray


class Communicator(Storage):
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
        super().__init__(info)
        self.name = name
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

    def split(self, color: int | None, key: int = 0, purpose: str = "split") -> Communicator | None:
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

    @cached_property
    def devices(self) -> DeviceCalls:
        """How calls on arrays of a device are carried out, and what they cost so far."""
        return DeviceCalls(self)

    def labelled(self, label: str) -> Communicator:
        """The same group under the name that it has in a record of calls; itself without one.

        Parameters
        ----------
        label : str
            Such as the axes of a mesh that it stands for.

        Returns
        -------
        Communicator
            For the same ranks.
        """
        del label
        return self

    def close(self) -> None:
        """Release the group. Collective over it; closing twice does nothing."""
        self.close_devices()

    def close_devices(self) -> None:
        """Release what calls on device arrays have made. Collective."""
        if "devices" in self.__dict__:
            self.devices.close()

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
        if op in (Op.SCATTER, Op.SPLIT):
            raise UnsupportedArray(f"prepare cannot hold {op}: its shapes travel at each call")
        if op in (Op.ALL_REDUCE, Op.REDUCE, Op.REDUCE_SCATTER):
            arguments.setdefault("deterministic", None)
        call, finish = self._built(op, x, arguments)
        if x is not None and call.input is not None and not np.may_share_memory(x, call.input):
            return lambda: self._run(op, x, **arguments)  # the verb packs or copies x every time
        return self._prepared(call, finish, arguments.get("out"))

    def prepared(self, call: Call) -> Callable[[], Any]:
        """What makes a blocking call again and again on its own buffers.

        Parameters
        ----------
        call : Call
            Found right.

        Returns
        -------
        callable
            Returns nothing of use; the result is in ``call.output``.
        """
        return self._prepared(call, _nothing, None)

    def _prepared(self, call: Call, finish: Callable[[], Any], out: Any) -> Callable[[], Any]:
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

    # -- how a verb becomes a call ----------------------------------------------------------

    def _built(self, op: Op, x: Any, arguments: dict[str, Any]) -> build.Built:
        """The call of a verb; what is wrong with it travels in it, so that all ranks learn it."""
        if arguments.get("deterministic", False) is None:
            arguments["deterministic"] = self.deterministic
        result = None
        if self._results and op in _SHARED:
            given = arguments["out"]
            result, arguments["out"] = self._results.get(id(given), (None, given))
        try:
            call, finish = _BUILDERS[op](self.info, x, **arguments)
            return call, finish if result is None else lambda: (finish(), result)[1]
        except ParallelismError as error:
            return Call(op, error=error), _nothing
        except (TypeError, ValueError) as error:
            return Call(op, error=UnsupportedArray(f"{op}: {error}")), _nothing

    def _run(self, op: Op, x: Any, /, **arguments: Any) -> Any:
        call, finish = self._built(op, x, arguments)
        request = self._start(call) if type(x) is not np.ndarray else self.submit(call)
        if request is not ENDED:
            request.wait()
        return finish()

    def _start(self, call: Call) -> Request:
        """Submit, by way of the device where the buffers lie on one."""
        return self.devices.submit(call) if call.on_device else self.submit(call)

    def _begin(self, op: Op, x: Any, /, **arguments: Any) -> Request:
        call, finish = self._built(op, x, arguments)
        request = self._start(call._replace(blocking=False))
        request.finish = finish
        return request


_SHARED = (Op.ALL_REDUCE, Op.ALL_GATHER, Op.BROADCAST)


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
