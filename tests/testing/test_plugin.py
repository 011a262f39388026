"""The pytest plugin on wrong suites: each is reported, inside its deadline, on any transport."""

import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from mpipar.testing.verdict import Outcome, judge, raise_agreed
from tests.testing import suites

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Ran:
    """How a suite went."""

    code: int
    text: str
    seconds: float

    def line(self, test: str) -> str:
        """The short line of one test."""
        found = [t for t in self.text.splitlines() if f"::{test}" in t and " - " in t]
        assert found, self.text
        return found[-1]

    def outcomes(self) -> dict[str, int]:
        """Counts of the last line."""
        found = re.findall(r"=+ ([^=]*) in [\d.]+s[^=]*=", self.text)
        assert found, self.text
        return {word: int(n) for n, word in re.findall(r"(\d+) (\w+)", found[-1])}


def ran(suite: str, launch: tuple[str, ...] = (), options: tuple[str, ...] = ()) -> Ran:
    """Run a suite in a process of its own, alone or on ranks."""
    with TemporaryDirectory(prefix="suite-") as folder:
        path = Path(folder, "test_suite.py")
        path.write_text(suite)
        words = ["test", str(path), "-ra", "-p", "no:cacheprovider", "-p", "no:randomly", *options]
        command = [sys.executable, "-m", "mpipar", *launch, *words]
        names = ("MPIPAR_", "PYTEST_", "OMPI_COMM", "PMI")
        environment = {k: v for k, v in os.environ.items() if not k.startswith(names)}
        environment |= {"PYTHONPATH": str(ROOT), "COLUMNS": "200", "NO_COLOR": "1"}
        start = time.monotonic()
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=100,
            check=False,
        )
        return Ran(done.returncode, done.stdout, time.monotonic() - start)


def on_ranks(n: int) -> tuple[str, ...]:
    return ("run", "-n", str(n), "--deadline", "60")


WAYS = [
    pytest.param((), id="threads"),
    pytest.param(on_ranks(2), id="2 ranks", marks=pytest.mark.kill),
    pytest.param(on_ranks(3), id="3 ranks", marks=[pytest.mark.kill, pytest.mark.slow]),
]


@cache
def wrong(launch: tuple[str, ...]) -> Ran:
    return ran(suites.WRONG, launch)


@pytest.mark.parametrize("launch", WAYS)
@pytest.mark.parametrize(
    ("test", "says"),
    [
        ("test_fails_before_a_barrier", r"failed on rank 1 .*a mistake of rank 1"),
        ("test_fails_while_a_peer_receives", r"failed on rank 1 .*KeyError: 'nothing to send'"),
        ("test_raises_expected_on_one_rank_only", r"failed on rank 0 .*DID NOT RAISE ValueError"),
        ("test_raises_seen_on_one_rank_only", r"failed on ranks? 0.*ranks made different calls"),
        ("test_exits_on_one_rank", r"failed on rank 1 .*SystemExit"),
        ("test_skips_on_one_rank", r"the ranks disagree: skipped on rank 1 \(no mood\); passed on"),
        ("test_every_rank_fails_in_its_own_way", r"own mistake 0.*"),
    ],
)
def test_a_failure_of_one_rank_is_everyones_and_names_it(
    launch: tuple[str, ...], test: str, says: str
) -> None:
    end = wrong(launch)
    assert end.code == 1
    assert f"FAILED test_suite.py::{test}" in end.text
    part = end.text.split(f"_ {test}[")[1].split("\n____")[0]
    assert re.search(says, part, re.DOTALL), part


@pytest.mark.parametrize("launch", WAYS)
def test_right_tests_between_wrong_ones_pass(launch: tuple[str, ...]) -> None:
    end = wrong(launch)
    # on ranks: two good ones, one count, pytest-mpi's; threads: two, three counts, nine threads
    wanted = {"failed": 7, "passed": 4 if launch else 6, "skipped": 2, "xfailed": 1}
    assert end.outcomes() == wanted, end.text
    assert end.seconds < 60


@pytest.mark.parametrize("launch", WAYS)
def test_what_did_not_run_is_said_loudly(launch: tuple[str, ...]) -> None:
    text = wrong(launch).text
    if launch:
        assert re.search(r"1 tests DID NOT RUN \(needs ranks: 9, the job has \d\)", text)
        assert "need --with-mpi" not in text
    else:
        assert "1 tests DID NOT RUN (need --with-mpi option to run), such as" in text
        assert "needs ranks" not in text


def test_all_ranks_failures_are_shown_on_threads_and_their_prints_once() -> None:
    part = wrong(()).text.split("_ test_every_rank_fails_in_its_own_way[")[1]
    for rank in range(3):
        assert f"own mistake {rank}" in part


REQUIRED = """
import pytest

@pytest.mark.mpi
def test_mpi():
    pass
"""


def test_a_run_short_of_ranks_can_be_made_to_fail() -> None:
    assert ran(REQUIRED).code == 0
    end = ran(REQUIRED, options=("--mpipar-require-ranks",))
    assert end.code == 1
    assert "DID NOT RUN" in end.text
    assert ran("def test_fine(comm): pass", options=("--mpipar-require-ranks",)).code == 0


def test_a_hang_is_told_with_where_each_thread_is() -> None:
    end = ran(suites.HANG)
    assert end.code == 1
    assert "rank 1 is computing in" in end.text
    assert "time.sleep(100)" in end.text
    assert end.seconds < 30


@pytest.mark.kill
@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_hang_ends_the_run_with_where_each_rank_is(n: int) -> None:
    end = ran(suites.HANG, on_ranks(n))
    assert end.code == 1
    for rank in range(n):
        assert (
            f"[mpipar rank {rank}] test_suite.py::test_hangs[{n}ranks]: the deadline of 1.5 s"
            in (end.text)
        )
    assert "comm.barrier()" in end.text
    assert "time.sleep(100)" in end.text
    assert "an earlier failure" in end.text  # pytest itself never came to its summary
    assert end.seconds < 40


@pytest.mark.kill
@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_parameters_from_a_set_are_refused(n: int) -> None:
    end = ran(suites.SETS, on_ranks(n))
    assert end.code == 2
    assert "ranks found different tests: number" in end.text
    assert "sort them" in end.text


def test_parameters_from_a_set_are_fine_on_threads() -> None:
    assert ran(suites.SETS).outcomes() == {"passed": 7}


@pytest.mark.kill
def test_failures_that_only_ranks_can_have() -> None:
    end = ran(suites.ON_RANKS, on_ranks(2))
    assert end.code == 1
    assert re.search(r"KeyError: 'before the barrier of the world'", end.text)
    assert re.search(r"setup: OSError: no such file on rank 0", end.text)
    assert re.search(r"requests were left unfinished on test group", end.text)
    assert re.search(r"teardown: OSError: in a teardown", end.text)
    assert end.text.count("said by rank 1") == 1
    assert "said by rank 0" not in end.text
    assert end.outcomes() == {"failed": 3, "passed": 3, "errors": 2}, end.text


# -- one process -------------------------------------------------------------------------------


def test_the_plugin_is_light() -> None:
    code = (
        "import sys, mpipar.testing.plugin; "
        "print(sorted({'numpy', 'mpi4py', 'ml_dtypes', 'mpipar.comm'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "[]\n"


LAW = """
import numpy as np
from hypothesis import given, settings, strategies as st

@given(x=st.integers(-5, 5))
def test_law(comm, x):
    assert comm.all_reduce(x) == comm.size * x

@given(x=st.integers(-5, 5))
def test_false_law(comm, x):
    assert comm.all_reduce(x) < 9
"""


def test_laws_draw_once_for_all_ranks() -> None:
    end = ran(LAW)
    assert end.outcomes() == {"failed": 1, "passed": 1}
    assert "x=3" in end.text  # the smallest: three ranks


FIXTURES = """
import pytest

@pytest.fixture
def early(comm):
    return comm.rank

@pytest.fixture
def late(comm):
    return lambda c: c.rank + 1

def test_early(comm, early):
    pass

def test_only_through_a_fixture(late):
    pass

def test_late(comm, late):
    assert late(comm) == comm.rank + 1
"""


def test_fixtures_cannot_use_a_communicator_that_is_not_there_yet() -> None:
    end = ran(FIXTURES)
    assert end.outcomes() == {"error": 1, "failed": 1, "passed": 1}
    assert "comm.rank was used outside the test's body" in end.text
    assert "the body itself must take `comm`" in end.text


def test_a_users_own_comm_is_left_alone() -> None:
    suite = (
        "import pytest\n@pytest.fixture\ndef comm():\n    return 5\n"
        "def test_own(comm):\n    assert comm == 5\n"
    )
    assert ran(suite).outcomes() == {"passed": 1}


def test_only_tests_of_ranks() -> None:
    suite = "def test_a(comm): pass\ndef test_b(): pass\n"
    assert ran(suite, options=("--mpipar-only",)).outcomes() == {"passed": 1, "deselected": 1}


@pytest.mark.parametrize(
    ("outcomes", "kind", "line"),
    [
        ("pp", "passed", ""),
        ("pi", "passed", ""),
        ("fb", "failed", "failed on rank 0 (why); broken off on rank 1; 2 ranks"),
        ("bb", "failed", "broken off on ranks 0, 1; 2 ranks"),
        ("ssi", "skipped", "skipped on ranks 0, 1 (why); 3 ranks"),
        ("sp", "failed", "the ranks disagree: skipped on rank 0 (why); passed on rank 1; 2 ranks"),
        ("xp", "xfailed", "xfailed on rank 0 (why); passed on rank 1; 2 ranks"),
        ("xb", "xfailed", "xfailed on rank 0 (why); broken off on rank 1; 2 ranks"),
        ("xf", "failed", "failed on rank 1 (why); xfailed on rank 0 (why); 2 ranks"),
    ],
)
def test_verdicts(outcomes: str, kind: str, line: str) -> None:
    names = {"p": "passed", "f": "failed", "s": "skipped", "x": "xfailed", "b": "broken off"}
    rows = [Outcome(names.get(c, "idle"), "" if c in "pi" else "why") for c in outcomes]
    assert judge(rows) == (kind, line)


def test_the_first_own_failure_is_raised_with_notes_of_the_others() -> None:
    with pytest.raises(ValueError) as info:
        raise_agreed([None, ValueError("one"), KeyError("two")])
    notes = "\n".join(info.value.__notes__)
    assert "failed on rank 1 (ValueError: one); failed on rank 2 (KeyError: 'two')" in notes
    assert "rank 2:" in notes
