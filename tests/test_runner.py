"""The runner's own judgement: planted faults that it must report."""

from collections import Counter
from pathlib import Path

import pytest

from tests import __main__ as runner
from tests.__main__ import Result, Step, never_ran, read_reports, run, table
from tests.sizes import function_sizes, measure

PASS = '<testcase classname="a" name="t"/>'
FAIL = '<testcase classname="a" name="u"><failure message="no"/></testcase>'
SKIP = (
    '<testcase classname="a" name="v"><skipped message="Test requires 2 MPI processes"/></testcase>'
)
MISPLACED = (
    '<testcase classname="a" name="w"><skipped message="need --with-mpi option to run"/></testcase>'
)


def judge(folder: Path, *ranks: str, n_reports: int = 1) -> Result:
    for i, cases in enumerate(ranks):
        (folder / f"rank{i}.xml").write_text(
            f"<testsuites><testsuite>{cases}</testsuite></testsuites>"
        )
    result = Result(Step("mpi", "m, 1 rank", [], 1.0, n_reports=n_reports), 1.0)
    read_reports(result, folder)
    return result


def test_counts(tmp_path: Path) -> None:
    result = judge(tmp_path, PASS + FAIL + SKIP)
    assert result.counts == Counter(passed=1, failure=1, skipped=1)
    assert result.problem == ""  # the exit code speaks of failures


@pytest.mark.parametrize(
    ("ranks", "n_reports", "problem"),
    [
        ([], 1, "0 of 1 ranks wrote a report"),
        ([PASS, PASS], 3, "2 of 3 ranks wrote a report"),
        ([SKIP], 1, "no test ran"),
        ([""], 1, "no test ran"),
        ([PASS + MISPLACED], 1, "an MPI test outside tests/mpi is never run"),
    ],
)
def test_problems(tmp_path: Path, ranks: list[str], n_reports: int, problem: str) -> None:
    assert judge(tmp_path, *ranks, n_reports=n_reports).problem == problem


def test_a_test_that_every_launch_skipped_is_found(tmp_path: Path) -> None:
    first = judge(tmp_path, PASS + SKIP)
    assert never_ran([first], "m") == ["a::v"]
    second = judge(tmp_path, SKIP.replace("<skipped", "<system-out").replace("Test", "ran"))
    assert never_ran([first, second], "m") == []
    assert never_ran([first, second], "another") == []


@pytest.mark.parametrize(
    ("command", "problem"),
    [("exit 0", ""), ("exit 7", "exit code 7"), ("sleep 60", "did not end within 0.3 s")],
)
def test_steps(command: str, problem: str) -> None:
    result = run(Step("static", "a step", ["sh", "-c", command], 0.3))
    assert result.problem == problem
    assert ("FAILED" in table([result])) == bool(problem)


def test_every_part_has_steps(tmp_path: Path) -> None:
    for name in runner.mpis():
        kills = runner.kill_steps(name, tmp_path, False)
        steps = [*runner.mpi_steps(name, tmp_path, False), *kills]
        assert [step.n_reports for step in steps] == [1, 2, 3, 4, 4, 1]
    budget_s = sum(step.deadline_s for step in runner.static_steps())
    assert len(list(runner.static_steps())) == 9
    assert budget_s < 900


def test_long_functions_are_measured_without_their_docstring(tmp_path: Path) -> None:
    body = "\n".join("    x = 1" for _ in range(61))
    assert function_sizes(f'def f():\n    """One\n    two."""\n{body}\n') == [(1, "f", 61)]
    (tmp_path / "a.py").write_text(f"def f():\n{body}\n")
    (tmp_path / "b.py").write_text("x = 1\n" * 401)
    (tmp_path / "c.py").write_text("x = 1\n" * 251)
    long, too_long = measure(tmp_path)
    assert [line.split(": ", 1)[1] for line in too_long] == ["f has 61 lines", "401 lines"]
    assert any("251 lines" in line for line in long)
