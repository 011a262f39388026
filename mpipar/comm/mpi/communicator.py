"""The MPI transport: calls on an owned communicator, watched, and checked where asked.

mpi4py is imported here and in the modules beside it whose names begin with ``mpi``.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from mpi4py import MPI

from mpipar.comm.base import Communicator
from mpipar.comm.call import Call, CommInfo, Op
from mpipar.comm.local import split_order, wrong_size
from mpipar.comm.mpi.check import preflight, receive_header, send_header
from mpipar.comm.mpi.engine import Engine, Program
from mpipar.comm.mpi.groups import Groups, SharedGroup
from mpipar.comm.mpi.watchdog import Watchdog
from mpipar.comm.request import ENDED, Request
from mpipar.errors import CollectiveMismatch, ParallelismError, RankFailed

_PEERS = (Op.SEND, Op.RECV)
_GRACE_S = 1.0


class MPICommunicator(Communicator):
    """A group of MPI processes; made by `mpipar.init`, `mpipar.wrap` and `split`.

    Parameters
    ----------
    shared : SharedGroup
        The owned MPI communicator and what hangs on it.
    groups : Groups
        Where it was taken from and goes back to.
    watchdog : Watchdog
        Of this process.
    deterministic : bool
        Default of the verbs' argument.
    """

    def __init__(
        self,
        shared: SharedGroup,
        groups: Groups,
        watchdog: Watchdog,
        deterministic: bool = False,
    ) -> None:
        super().__init__(CommInfo(shared.comm.rank, shared.comm.size), shared.name, deterministic)
        settings = groups.settings
        self.world_ranks = shared.world_ranks
        self.deadline_s = settings.deadline_s
        self.checked = settings.checked
        self._groups = groups
        self._watchdog = watchdog
        self.attach(shared)

    def attach(self, shared: SharedGroup) -> None:
        """Work on this group of the same ranks from now on.

        Parameters
        ----------
        shared : SharedGroup
            Fresh, or found open.
        """
        board = self._watchdog.board
        self.name = shared.name
        self.number = shared.number
        self.engine: Engine = shared.engine
        self._shared: SharedGroup | None = shared
        self._slot = board.slot(self.number)
        self._queue: deque[_Pending] = shared.queue
        self._busy = shared.busy
        if shared.sequence == 0:  # a closed group of the same number may have left its mark
            board.words[self._slot] = self.number << 32

    @property
    def shared(self) -> SharedGroup | None:
        """What all handles of this group share; None once closed."""
        return self._shared

    @property
    def mpi(self) -> MPI.Intracomm:
        """The owned mpi4py communicator: the way out, and back through `mpipar.wrap`."""
        return self.engine.comm

    # -- the seam ---------------------------------------------------------------------------

    def submit(self, call: Call) -> Request:
        """Start one call with MPI.

        Parameters
        ----------
        call : Call
            Any call.

        Returns
        -------
        Request
            Ended if the call is blocking.

        Raises
        ------
        RankFailed
            If the communicator is closed, or another thread is inside it.
        """
        if not self._busy.acquire(blocking=False):
            raise RankFailed(
                f"two threads call {self.name} at the same time; give each thread its own group: "
                "comm.split(0, purpose='thread name')"
            )
        try:
            self._refuse(call)
            mark = self._arrive(call)
            if call.blocking and not self.checked:
                if not self._groups.pending and not self._groups.node_pending:
                    self._carry_out(call, mark)
                    return ENDED
                if call.op not in _PEERS and self._shared is not None:
                    self._finish_queue()
                    with self._groups.mover.moving(self._shared.advance_peers):
                        self._carry_out(call, mark)
                    return ENDED
            if call.blocking:
                self._drive(self._pending(call, mark))
                return ENDED
            pending = self._pending(call, mark)
            if self._shared is not None:
                self._groups.add(self._shared, pending)
                self._shared.advance()
            return Request(
                call,
                lambda: self._advance(pending),
                lambda: self._explain(pending),
                self.deadline_s,
            )
        finally:
            self._busy.release()

    def progress(self) -> None:
        """Move pending calls on without waiting for any of them."""
        self._groups.advance()

    def split(self, color: int | None, key: int = 0, purpose: str = "split") -> Communicator | None:
        """Make one group per color. Collective over this group.

        Parameters
        ----------
        color, key, purpose
            As in `Communicator.split`.

        Returns
        -------
        Communicator or None
            The group of this rank; groups of the same ranks and purpose share one MPI
            communicator, counted, which is freed when the last of them is closed.
        """
        order = split_order(self.all_gather_json([color, key, purpose]), color)
        ranks = tuple(self.world_ranks[r] for r in order)
        shared = self._groups.make(self, ranks, order, purpose)
        if shared is None:
            return None
        return MPICommunicator(shared, self._groups, self._watchdog, self.deterministic)

    def _prepared(self, call: Call, finish: Callable[[], Any], out: Any) -> Callable[[], Any]:
        """The handle of `prepare`: what can be decided once is decided here."""
        native = self.engine.bound(call) if call.error is None and not self.checked else None
        if native is None:
            return super()._prepared(call, finish, out)
        function, arguments = native
        shared, watchdog, pending, busy = (
            self._shared,
            self._watchdog,
            self._groups.pending,
            self._busy,
        )
        words, slot, high = watchdog.board.words, self._slot, self.number << 32
        token = (call, self, 0)

        def handle() -> Any:
            if pending or shared is None or self._shared is None or not busy.acquire(False):
                self.submit(call)
                return finish()
            shared.sequence += 1
            words[slot] = high | shared.sequence
            watchdog.current = token
            try:
                function(*arguments)
            except MPI.Exception as error:
                raise _translated(call, error) from None
            finally:
                watchdog.current = None
                busy.release()
            return finish()

        return handle

    def close(self) -> None:
        """Release the group. Collective over it; closing twice does nothing."""
        self.close_devices()
        shared, self._shared = self._shared, None
        if shared is not None:
            self._groups.release(shared)

    # -- one call ---------------------------------------------------------------------------

    def _refuse(self, call: Call) -> None:
        if self._shared is None:
            raise RankFailed(f"{self.name} is closed; {call} came after close()")
        if self._shared.broken is not None:
            raise RankFailed(f"{self.name} is unusable since: {self._shared.broken}")
        if call.error is not None and (not self.checked or self.size == 1 or call.op in _PEERS):
            raise call.error

    def _arrive(self, call: Call) -> int:
        """Publish on the board how far this rank is."""
        if call.op in _PEERS or self._shared is None:
            return 0
        self._shared.sequence += 1
        mark = self.number << 32 | self._shared.sequence
        self._watchdog.board.words[self._slot] = mark
        return mark

    def _guarded(self, call: Call) -> Program:
        """The program of a call, after the check that all ranks make the same one."""
        if self.checked and call.op is Op.SEND:
            yield from send_header(self.engine, call)
        elif self.checked and call.op is Op.RECV:
            yield from receive_header(self.engine, call)
        elif self.checked and self.size > 1:
            yield from preflight(self.engine, call)
        yield from self.engine.program(call)

    def _pending(self, call: Call, mark: int) -> _Pending:
        pending = _Pending(call, self._guarded(call._replace(blocking=False)), mark)
        pending.has_parts = self.checked or call.n_bytes > self.engine.max_bytes
        return pending

    def _carry_out(self, call: Call, mark: int) -> None:
        """A blocking call with nothing before it: the shortest way."""
        self._watchdog.current = (call, self, mark)
        try:
            program = self.engine.program(call)
            request = next(program, None)
            if request is not None:
                _Pending(call, program, mark, request).block()
        except MPI.Exception as error:
            raise _translated(call, error) from None
        finally:
            self._watchdog.current = None

    def _drive(self, pending: _Pending) -> None:
        """A blocking call in checked mode, or a message while other calls are under way.

        A deadline is an exception here, not the end of the job.
        """
        if pending.call.op not in _PEERS:
            self._finish_queue()
        elif self._shared is not None:
            self._groups.add(self._shared, pending)  # behind the earlier ones of its channel
        self._wait_for(pending)
        if pending.error is not None:
            raise pending.error

    def _finish_queue(self) -> None:
        """Earlier collectives of this group go first."""
        while self._queue:
            self._wait_for(self._queue[0])
            self._queue.popleft()

    def _wait_for(self, pending: _Pending) -> None:
        explain = partial(self._explain, pending)
        try:
            look = partial(self._look, pending)
            Request(pending.call, look, explain, self.deadline_s).wait()
        except BaseException as error:
            if self._shared is not None and pending in self._shared.peers:
                self._shared.peers.remove(pending)
            if not pending.cancel() and self._shared is not None:
                self._shared.broken = RankFailed(f"{pending.call} was broken off: {error}")
                self._groups.given_up.append(pending)
            raise

    def _look(self, pending: _Pending) -> bool:
        """One look at a blocking call; what is under way beside it moves on, in every group.

        Peers may be waiting for the next step of any of it.
        """
        if pending.call.op not in _PEERS and pending.settle():
            return True
        if self._shared is not None:
            self._shared.advance_peers()
        if pending.done:
            return True
        self._groups.advance()
        self._fail_without_peers(pending)
        return False

    def _fail_without_peers(self, pending: _Pending) -> None:
        """End a wait for ranks that have died or left; looked at now and then."""
        pending.n_looks += 1
        if pending.n_looks & 0xFF or pending.done:
            return
        now = time.monotonic()
        pending.since = pending.since or now
        if now - pending.since > _GRACE_S:
            _, gone = self._watchdog.missing(pending.call, self, pending.mark)
            if gone:
                raise RankFailed(f"{pending.call} of {self.name}: {'; '.join(gone)}")

    def _advance(self, pending: _Pending) -> bool:
        if not pending.done:
            self._groups.advance()
            self._fail_without_peers(pending)
        if pending.error is not None:
            raise pending.error
        return pending.done

    def _explain(self, pending: _Pending) -> str:
        absent, gone = self._watchdog.missing(pending.call, self, pending.mark)
        text = f"; not arrived: ranks {', '.join(map(str, absent))}" if absent else ""
        return "; ".join([text, *gone])


class _Pending:
    """One call under way: its program and the MPI request that it waits for."""

    def __init__(
        self, call: Call, program: Program, mark: int, request: MPI.Request | None = None
    ) -> None:
        self.call = call
        self.mark = mark
        self.done = False
        self.has_parts = False
        self.n_looks, self.since = 0, 0.0
        self.error: BaseException | None = None
        self._program = program
        self._request = request
        self._status = MPI.Status()

    def block(self) -> None:
        """Carry the call to its end from its first request on, waiting inside the MPI."""
        while self._request is not None:
            self._request.Wait(self._status)
            self._request = self._next(False)
        self.done = True

    def step(self) -> bool:
        """Move on without waiting; whether the call has ended."""
        try:
            if self._request is None:
                self._request = self._next(True)
            while self._request is not None:
                if not self._request.Test(self._status):
                    return False
                self._request = self._next(False)
        except MPI.Exception as error:
            raise _translated(self.call, error) from None
        self.done = True
        return True

    def settle(self) -> bool:
        """Like `step`, but an error is kept for the one who waits."""
        try:
            return self.step()
        except Exception as error:
            self.error, self.done = error, True
            return True

    def cancel(self) -> bool:
        """Take back a receive that nothing came for; collectives cannot be taken back."""
        if self.call.op is not Op.RECV or self._request is None:
            return False
        self._request.Cancel()
        self._request.Wait(self._status)
        self._program.close()
        return bool(self._status.Is_cancelled())

    def _next(self, first: bool) -> MPI.Request | None:
        try:
            return next(self._program) if first else self._program.send(self._status)
        except StopIteration:
            return None


def _translated(call: Call, error: MPI.Exception) -> ParallelismError:
    """An error of the MPI as one of ours."""
    kind = error.Get_error_class()
    if kind == MPI.ERR_TRUNCATE and call.op is Op.RECV:
        return wrong_size(call, "more")
    if kind == MPI.ERR_TRUNCATE:
        return CollectiveMismatch(
            f"{call}: ranks gave different sizes ({error}); MPIPAR_CHECK=1 names them"
        )
    return RankFailed(f"{call} failed in the MPI: {error}")
