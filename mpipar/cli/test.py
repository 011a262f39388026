"""``mpipar test PATHS``: pytest with this library's plugin, alone or as one rank of a job."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from importlib.metadata import entry_points

from mpipar.cli import main as command_line
from mpipar.errors import LaunchError


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``test``.

    Parameters
    ----------
    parser : argparse.ArgumentParser
        The verb's parser.
    """
    parser.usage = "mpipar test PATHS [pytest's options]  |  mpipar run -n N test PATHS [...]"
    parser.epilog = (
        "Without a launcher each test that takes `comm` runs on threads; under one, on its ranks."
    )
    parser.add_argument("words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def pytest_words(words: list[str]) -> list[str]:
    """What pytest is given: the user's words, and the plugins that are not there by themselves.

    Parameters
    ----------
    words : list of str
        Paths and options.

    Returns
    -------
    list of str
        With pytest-mpi switched on under a launcher, which else skips all its tests.
    """
    from mpipar.testing import launched_ranks

    # our own package is here before pytest looks at it, which is no fault of the user's suite
    added = ["-W", "ignore:Module already imported so cannot be rewritten; mpipar"]
    if not any(p.value == "mpipar.testing.plugin" for p in entry_points(group="pytest11")):
        added += ["-p", "mpipar.testing.plugin"]
    if launched_ranks() is not None and importlib.util.find_spec("pytest_mpi") is not None:
        added += ["--with-mpi"]
    return [*added, *words]


def main(arguments: argparse.Namespace) -> int:
    """Run pytest.

    Parameters
    ----------
    arguments : argparse.Namespace
        Parsed options.

    Returns
    -------
    int
        0 if all tests passed, 2 for a wrong use of pytest, else 1.

    Raises
    ------
    LaunchError
        If pytest is not installed.
    """
    try:
        import pytest
    except ImportError:
        raise LaunchError(
            f"pytest is not installed; `{sys.executable} -m pip install 'mpipar[test]'` brings it"
        ) from None
    code = int(pytest.main(pytest_words(arguments.words)))
    if code == int(pytest.ExitCode.USAGE_ERROR):
        return command_line.USAGE
    return command_line.DONE if code == 0 else command_line.FAILED
