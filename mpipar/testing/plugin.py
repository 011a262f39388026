"""The pytest plugin: fixture ``comm``, marks ``ranks`` and ``deadline``, one outcome per test.

Everything heavy is imported when a test needs it, since pytest loads this module for every user.

::

    @pytest.mark.ranks(1, 2, 4)        # a plain run: on 1, 2 and 4 threads
    def test_sum(comm):                # under mpirun: once, on the largest of them that fits
        assert comm.all_reduce(comm.rank) == sum(range(comm.size))
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from mpipar.errors import CollectiveTimeout
from mpipar.testing import launched_ranks

JOB = pytest.StashKey[Any]()
_WANT = ("need --with-mpi", "Test requires", "needs ranks")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options and ini values of this plugin."""
    group = parser.getgroup("mpipar", "tests on several ranks")
    group.addoption(
        "--mpipar-deadline", type=float, metavar="SECONDS",
        help="longest time of one test on several ranks (ini mpipar_deadline, 60 by default)",
    )  # fmt: skip
    group.addoption(
        "--mpipar-require-ranks", action="store_true",
        help="fail a run in which tests were skipped for want of ranks or of --with-mpi",
    )  # fmt: skip
    group.addoption(
        "--mpipar-only", action="store_true",
        help="run only tests that take `comm` or are marked `mpi` or `ranks`",
    )  # fmt: skip
    group.addoption(
        "--mpipar-seed", type=int, metavar="SEED",
        help="threads run in a random order fixed by this seed, instead of in turn",
    )  # fmt: skip
    parser.addini("mpipar_deadline", "seconds of one test on several ranks", default="60")
    parser.addini("mpipar_ranks", "rank counts of tests without the mark", "args", default=["3"])
    parser.addini("mpipar_require_ranks", "as the option of that name", "bool", default=False)


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Say the marks; under a launcher bring in what keeps the ranks together."""
    line = config.addinivalue_line
    line("markers", "ranks(*counts): rank counts on which a test with `comm` runs")
    line("markers", "deadline(seconds): longest time of this test on several ranks")
    config.pluginmanager.register(Shortage(config), "mpipar shortage")
    if launched_ranks() is None or config.option.help:
        return
    os.environ.setdefault("MPIPAR_CHECK", "1")  # waits that can be ended, calls that are compared
    os.environ.setdefault("MPIPAR_DEADLINE_S", str(base_deadline(config) / 2))
    from mpipar.testing.job import RankJob

    config.stash[JOB] = RankJob(config)
    config.pluginmanager.register(config.stash[JOB], "mpipar job")


def base_deadline(config: pytest.Config) -> float:
    """Seconds that a test without a mark of its own may take.

    Parameters
    ----------
    config : pytest.Config
        With the options.

    Returns
    -------
    float
        From the option, else from the ini file.
    """
    return float(config.getoption("mpipar_deadline") or config.getini("mpipar_deadline"))


def deadline_of(item: pytest.Item) -> float:
    """Seconds that one test may take.

    Parameters
    ----------
    item : pytest.Item
        The test.

    Returns
    -------
    float
        From its mark, else `base_deadline`.
    """
    mark = item.get_closest_marker("deadline")
    return float(mark.args[0]) if mark and mark.args else base_deadline(item.config)


def takes_comm(item: Any) -> bool:
    """Whether a test (or what is known of one at collection) uses this plugin's `comm`."""
    return "mpipar_ranks" in getattr(item, "fixturenames", ())


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test per rank count; under a launcher one, for the largest count that fits."""
    if not takes_comm(metafunc):
        return
    mark = metafunc.definition.get_closest_marker("ranks")
    counts = [int(c) for c in (mark.args if mark else metafunc.config.getini("mpipar_ranks"))]
    if not counts or min(counts) < 1:
        raise pytest.UsageError(f"{metafunc.definition.nodeid}: ranks{tuple(counts)} must be >= 1")
    job = metafunc.config.stash.get(JOB, None)
    if job is not None:
        fitting = [c for c in counts if c <= job.size]
        counts = [job.size if mark is None else max(fitting, default=min(counts))]
    metafunc.parametrize("mpipar_ranks", counts, indirect=True, ids=[f"{c}ranks" for c in counts])


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave only tests of ranks where that is asked."""
    if not config.getoption("mpipar_only"):
        return
    marks = ("mpi", "ranks")
    kept = [i for i in items if takes_comm(i) or any(i.get_closest_marker(m) for m in marks)]
    if left_out := [i for i in items if i not in kept]:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


@pytest.fixture
def mpipar_ranks(request: pytest.FixtureRequest) -> int:
    """On how many ranks this test runs."""
    return int(request.param)


@pytest.fixture
def comm(request: pytest.FixtureRequest, mpipar_ranks: int) -> Any:
    """The communicator of this rank: of a `ThreadWorld` in a plain run, real under a launcher.

    In a plain run only the test's body runs once per rank; fixtures run once, and cannot use it.
    """
    job = request.config.stash.get(JOB, None)
    if job is None:
        return Outside(mpipar_ranks)
    if mpipar_ranks > job.size:
        pytest.skip(f"needs ranks: {mpipar_ranks}, the job has {job.size}")
    return job.communicator(request.node, mpipar_ranks)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Let laws take `comm`: each example has ranks of its own, so nothing is shared."""
    law = getattr(item, "obj", None)
    if takes_comm(item) and hasattr(law, "hypothesis"):
        from hypothesis import HealthCheck, settings

        name = "_hypothesis_internal_use_settings"
        import mpipar.comm.threads.world  # noqa: F401 - not in the time of the first example

        old: Any = getattr(law, name, None) or settings.default
        checks = {*old.suppress_health_check, HealthCheck.function_scoped_fixture}
        setattr(law, name, settings(old, suppress_health_check=tuple(checks)))


class Outside:
    """What `comm` is in a plain run before the body has been entered on each rank.

    Parameters
    ----------
    n_ranks : int
        Number of ranks on which the body will run.
    """

    def __init__(self, n_ranks: int) -> None:
        self.__dict__["n_ranks"] = n_ranks

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"comm.{name} was used outside the test's body: in a plain run each rank is a thread "
            "that runs the body only; use `comm` there, in a function that the body calls"
        )


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """In a plain run, run the body once per rank, on threads."""
    __tracebackhide__ = True
    if not takes_comm(pyfuncitem):
        return None
    hypothesis = getattr(pyfuncitem.obj, "hypothesis", None)
    if JOB in pyfuncitem.config.stash:
        if hypothesis is not None:
            pytest.skip("a law: ranks would draw different examples; run it on threads")
        return None
    names = pyfuncitem._fixtureinfo.argnames
    arguments = {name: pyfuncitem.funcargs[name] for name in names}
    if hypothesis is None:
        on_threads(pyfuncitem, pyfuncitem.obj)(**arguments)
        return True
    if not hasattr(hypothesis.inner_test, "on_threads"):
        hypothesis.inner_test = on_threads(pyfuncitem, hypothesis.inner_test)
    return None


def on_threads(item: pytest.Item, body: Callable[..., Any]) -> Callable[..., None]:
    """A function that runs a test's body on every rank of a `ThreadWorld`.

    Parameters
    ----------
    item : pytest.Item
        The test: its deadline, and the seed of the run.
    body : callable
        Takes ``comm`` by name.

    Returns
    -------
    callable
        Takes the same arguments; raises what the ranks agree on.
    """

    def run(*arguments: Any, **named: Any) -> None:
        __tracebackhide__ = True
        from mpipar.comm.threads.world import ThreadWorld
        from mpipar.testing.verdict import raise_agreed

        outside = named.get("comm")
        if not isinstance(outside, Outside):
            pytest.fail("the body itself must take `comm`, not only a fixture", pytrace=False)
        seed = item.config.getoption("mpipar_seed")
        world = ThreadWorld(outside.n_ranks, seed=seed, deadline_s=deadline_of(item))
        rest = {name: value for name, value in named.items() if name != "comm"}
        try:
            ends = world.run(lambda comm: body(*arguments, comm=comm, **rest), return_errors=True)
        except CollectiveTimeout as error:
            pytest.fail(str(error), pytrace=False)
        raise_agreed(ends)

    run.on_threads = True  # type: ignore[attr-defined]
    return run


class Shortage:
    """Counts what was skipped for want of ranks, says so, and fails the run where that is asked.

    Parameters
    ----------
    config : pytest.Config
        Of the run.
    """

    def __init__(self, config: pytest.Config) -> None:
        asked = config.getoption("mpipar_require_ranks") or config.getini("mpipar_require_ranks")
        self._is_failure = bool(asked)
        self._skipped: dict[str, list[str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Remember a skip of this kind."""
        if report.skipped and isinstance(report.longrepr, tuple):
            reason = str(report.longrepr[2]).removeprefix("Skipped: ")
            if reason.startswith(_WANT):
                self._skipped.setdefault(reason, []).append(report.nodeid)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail the run."""
        ended_well = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
        if self._is_failure and self._skipped and session.exitstatus in ended_well:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Say it loudly."""
        for reason, tests in sorted(self._skipped.items()):
            line = f"mpipar: {len(tests)} tests DID NOT RUN ({reason}), such as {tests[0]}"
            terminalreporter.write_line(line, red=True, bold=True)
        if self._skipped:
            terminalreporter.write_line("mpipar: `mpipar run -n N test PATHS` runs them", red=True)
