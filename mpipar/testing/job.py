"""Ranks of an MPI job under pytest: the same tests, one outcome, one deadline, one voice."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import pytest

from mpipar.comm.base import Communicator
from mpipar.comm.mpi.lifecycle import current_job
from mpipar.comm.request import set_look_out
from mpipar.comm.world import give_up_groups, group_marks, init
from mpipar.errors import ParallelismError, RankFailed
from mpipar.testing.plugin import deadline_of
from mpipar.testing.reports import Joint, outcome_of, set_outcome
from mpipar.testing.verdict import FAILED, IDLE, PASSED, Outcome, judge

_LOOKS = 50
_NOTICE_TAG = 2**15 + 1  # above the tags of the library's own messages
_NOTICE_BYTES = 512
_TEXT_MAX = 20_000
_COLLECTION_S = 600.0
_GRACE_S = 0.5  # a call that all ranks have reached ends within it


class PeerFailed(RankFailed):
    """This rank waited for one whose test had already ended badly."""


class RankJob:
    """What keeps the ranks of one pytest run together.

    Parameters
    ----------
    config : pytest.Config
        Of this rank.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._stream = os.fdopen(os.dup(2), "w")  # before pytest captures it
        try:
            world = init()
        except ParallelismError as error:
            raise pytest.UsageError(str(error)) from None
        self.rank, self.size = world.rank, world.size
        control = world.split(0, purpose="pytest control")
        if control is None:
            raise RankFailed("the control group is empty")
        self._parent = control  # of the tests' groups, which go through node memory
        self._control: Any = getattr(control, "inner", control)  # the MPI itself, not node memory
        self._control.deadline_s = float("inf")
        self._control.checked = False  # its calls are the same by construction
        self._groups: dict[int, Communicator | None] = {}
        self._n_groups = 0
        self._notices: dict[int, str] = {}
        self._noticed_at = 0.0
        self._sent: list[Any] = []
        self._own: list[pytest.TestReport] = []
        self._phase = "start"
        job = current_job()
        if job is not None:
            job.stream = self._stream
        if self.rank:
            self._silence = open(os.devnull, "w")  # noqa: SIM115
            config.pluginmanager.getplugin("terminalreporter")._tw._file = self._silence

    # -- the same tests on every rank -------------------------------------------------------

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Refuse a run whose ranks have found different tests, or the same in another order."""
        ids = [item.nodeid for item in session.items]
        digest = hashlib.sha256("\n".join([*ids, str(session.testsfailed)]).encode()).hexdigest()
        with self._deadline("the collection of tests", _COLLECTION_S):
            digests = self._control.all_gather_json(digest)
            if len(set(digests)) == 1:
                return
            everyone = self._control.all_gather_json([session.testsfailed, ids])
        raise pytest.UsageError(_difference(everyone))

    # -- one test ---------------------------------------------------------------------------

    def communicator(self, item: pytest.Item, n_ranks: int) -> Communicator:
        """The group of the first ranks of the job, on which a test runs.

        Parameters
        ----------
        item : pytest.Item
            The test.
        n_ranks : int
            Size of the group, made before the test was set up.

        Returns
        -------
        Communicator
            On a rank outside the group the test is skipped instead.
        """
        del item
        group = self._groups[n_ranks]
        if group is None:
            pytest.skip(f"idle: the test runs on {n_ranks} ranks")
        return group

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        """Set up, call and tear down; then every rank reports the outcome that all agree on."""
        from _pytest.runner import runtestprotocol

        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        with self._deadline(item.nodeid, deadline_of(item)):
            self._prepare(item)
            self._own = []
            reports = runtestprotocol(item, log=False, nextitem=nextitem)
            self._agree(item, reports[-1:])
        for report in reports:
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def _prepare(self, item: pytest.Item) -> None:
        self._phase = "before the test"
        callspec = getattr(item, "callspec", None)
        n_ranks = callspec.params.get("mpipar_ranks", 0) if callspec else 0
        if 0 < n_ranks <= self.size and n_ranks not in self._groups:
            self._n_groups += 1
            self._groups[n_ranks] = self._parent.split(
                0 if self.rank < n_ranks else None, purpose=f"test group {self._n_groups}"
            )
        self._marks = group_marks()
        self._phase = "setup and call"
        set_look_out(self._look_out)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Iterator[None]:
        """Agree on setup and call before anything is torn down."""
        self._agree(item, self._own)
        self._phase = "teardown"
        set_look_out(self._look_out)
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Iterator[None]:
        """Tell the peers of a bad end at once: they may be waiting for this rank."""
        report: Any = yield
        if call.excinfo is not None:
            self._notify(item, call.excinfo.value)
        report.mpipar_broken_off = call.excinfo is not None and call.excinfo.errisinstance(
            RankFailed
        )
        self._own.append(report)
        return report  # type: ignore[no-any-return]

    # -- notices ----------------------------------------------------------------------------

    def _notify(self, item: pytest.Item, error: BaseException) -> None:
        is_idle = isinstance(error, pytest.skip.Exception) and str(error).startswith("idle:")
        if self.size == 1 or self._sent or is_idle:
            return
        first = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        text = json.dumps([self.rank, f"{type(error).__name__}: {first}"])
        raw = np.zeros(_NOTICE_BYTES, np.uint8)
        data = text.encode()[:_NOTICE_BYTES]
        raw[: len(data)] = np.frombuffer(data, np.uint8)
        mpi = self._control.mpi
        peers = [rank for rank in range(self.size) if rank != self.rank]
        self._sent = [mpi.Isend(raw, peer, _NOTICE_TAG) for peer in peers]

    def _look_out(self) -> None:
        """End a wait of this rank if a peer's test has ended badly."""
        if self.size > 1 and self._control.mpi.Iprobe(tag=_NOTICE_TAG):
            self._take_notice()
        if self._notices and time.monotonic() - self._noticed_at > _GRACE_S:
            rank, reason = next(iter(self._notices.items()))
            raise PeerFailed(f"rank {rank} has ended this test: {reason}")

    def _unfinished(self) -> list[str]:
        """Groups on which this test left calls under way; the end of a call may need a moment."""
        for _ in range(_LOOKS):
            marks = group_marks()
            left = [n for n, mark in marks.items() if mark[1] and not self._marks.get(n, mark)[1]]
            if not left:
                break
            time.sleep(0.01)
        return left

    def _take_notice(self) -> None:
        raw = np.empty(_NOTICE_BYTES, np.uint8)
        self._control.mpi.Recv(raw, tag=_NOTICE_TAG)
        rank, reason = json.loads(bytes(raw).rstrip(b"\0"))
        if not self._notices:
            self._noticed_at = time.monotonic()
        self._notices[rank] = reason

    # -- one outcome ------------------------------------------------------------------------

    def _agree(self, item: pytest.Item, reports: list[pytest.TestReport]) -> None:
        """Make the last of `reports` say what all ranks together say."""
        set_look_out(None)
        where, self._phase = self._phase, f"waiting for the other ranks after {self._phase}"
        mine = outcome_of(reports)
        left = self._unfinished() if mine.kind == PASSED else []
        if mine.kind == PASSED and left:
            mine = Outcome(FAILED, f"requests were left unfinished on {', '.join(left)}")
        try:
            flags = np.array([[mine.kind != PASSED, bool(self._sent)]])
            bad = self._control.begin_all_gather(flags).wait()  # begun: its wait polls, and sleeps
            if not bad.any():
                return
            rows = self._control.all_gather_json([mine.kind, mine.reason, mine.text[:_TEXT_MAX]])
            for _ in range(int(bad[:, 1].sum()) - bool(self._sent) - len(self._notices)):
                self._take_notice()
            for request in self._sent:
                request.Wait()
            self._sent, self._notices = [], {}
            outcomes = [Outcome(*row) for row in rows]
            kind, line = judge(outcomes)
            if any(o.kind not in (PASSED, IDLE, "skipped") for o in outcomes):
                self._recover(item)
        except ParallelismError as error:
            self._end(f"{item.nodeid}: the ranks have lost each other after {where}: {error}")
            raise
        if mine.kind != IDLE:
            set_outcome(reports[-1], kind, Joint(line, outcomes) if kind == FAILED else line)

    def _recover(self, item: pytest.Item) -> None:
        """Give up the groups that a broken-off test has left in different places."""
        everyone = self._control.all_gather_json(group_marks())
        names = sorted({name for marks in everyone for name in marks})
        seen = {name: [marks[name] for marks in everyone if name in marks] for name in names}
        mine = sorted(set(group_marks()) - set(self._marks))
        new = {name for names in self._control.all_gather_json(mine) for name in names}
        lost = [
            name
            for name, marks in seen.items()
            if not name.startswith("pytest control")
            and (name in new or any(mark != marks[0] or mark[1] for mark in marks))
        ]
        if not lost:
            return
        give_up_groups(lost, f"it was given up when {item.nodeid} ended badly")
        if any(name.startswith("test group") for name in lost):
            self._groups = {}

    # -- deadlines --------------------------------------------------------------------------

    @contextmanager
    def _deadline(self, what: str, seconds: float) -> Iterator[None]:
        main = threading.get_ident()
        timer = threading.Timer(seconds, self._expired, [what, seconds, main])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def pytest_unconfigure(self) -> None:
        """Give back the streams."""
        job = current_job()
        if job is not None:
            job.stream = None
        self._stream.close()
        if self.rank:
            self._silence.close()

    def _expired(self, what: str, seconds: float, main: int) -> None:
        stack = traceback.extract_stack(sys._current_frames()[main])
        inner = [i for i, f in enumerate(stack) if "/_pytest/" in f.filename]
        here = "".join(traceback.format_list(stack[max(inner, default=-1) + 1 :][:8]))
        self._say(
            f"{what}: the deadline of {seconds:g} s passed; rank {self.rank} is in {self._phase}:"
            f"\n{here}"
        )
        time.sleep(1.0 + 0.2 * self.rank)  # the others say where they are
        self._summarise()
        self._end(f"{what}: the deadline of {seconds:g} s passed; the run ends here")

    def _summarise(self) -> None:
        """What failed before: pytest would have said so at the end."""
        manager = self._config.pluginmanager
        with suppress(Exception):
            manager.getplugin("capturemanager").suspend_global_capture(in_=True)
            manager.getplugin("terminalreporter").summary_failures()

    def _say(self, text: str) -> None:
        lines = text.rstrip().splitlines()
        self._stream.write("".join(f"[mpipar rank {self.rank}] {line}\n" for line in lines))
        self._stream.flush()

    def _end(self, text: str) -> None:
        job = current_job()
        if job is None:
            self._say(text)
            os._exit(1)
        job.end(text)


def _difference(everyone: list[tuple[int, list[str]]]) -> str:
    """Where the collections of the ranks part."""
    errors = [failed for failed, _ in everyone]
    if len(set(errors)) > 1:
        return f"ranks differ in errors of collection: {errors} on ranks 0 to {len(errors) - 1}"
    first = everyone[0][1]
    for rank, (_, ids) in enumerate(everyone):
        if ids == first:
            continue
        at = next((i for i, (a, b) in enumerate(zip(first, ids, strict=False)) if a != b), None)
        at = min(len(first), len(ids)) if at is None else at
        mine, other = (ids[at : at + 1] or ["nothing"])[0], (first[at : at + 1] or ["nothing"])[0]
        return (
            f"ranks found different tests: number {at} is {other} on rank 0 and {mine} on rank "
            f"{rank}; parameters from a set differ between processes: sort them"
        )
    return "ranks found different tests"
