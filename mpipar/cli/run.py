"""``mpipar run -n N VERB ...`` or ``mpipar run -n N -- PROGRAM ...``."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
from collections.abc import Mapping

from mpipar.cli import main as command_line
from mpipar.cli.arguments import positive
from mpipar.errors import LaunchError
from mpipar.launch.environment import detect
from mpipar.launch.job import Outcome, run_job
from mpipar.launch.launcher import find_launcher, rank_settings
from mpipar.launch.library import choose_library, loaded_library


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``run``.

    Parameters
    ----------
    parser : argparse.ArgumentParser
        The verb's parser.
    """
    parser.usage = "mpipar run -n N [options] VERB ...  |  mpipar run -n N [options] -- PROGRAM ..."
    add = parser.add_argument
    add("-n", dest="n_ranks", type=positive, metavar="N", help="ranks (in Slurm: SLURM_NTASKS)")
    add(
        "--mpi",
        metavar="MPI",
        help="openmpi, mpich or the path of a libmpi, when there are several",
    )
    add("--deadline", type=_seconds, metavar="SECONDS", help="end the job, failed, after that time")
    add("--dry-run", action="store_true", help="print the command and the variables it sets")
    add("words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"seconds above 0 are needed, got {text!r}")
    return seconds


def rank_program(words: list[str]) -> list[str]:
    """What each rank runs.

    Parameters
    ----------
    words : list of str
        What stands behind the options of ``run``: a verb with its arguments, or ``--`` and a
        program. A ``.py`` file, and ``python`` with a file, ``-m`` or ``-c``, run with this Python
        under the abort hook; any other program runs as it is.

    Returns
    -------
    list of str
        Program and arguments.
    """
    if words[0] != "--":
        return [sys.executable, "-m", "mpipar", *words]
    program = words[1:]
    if program[0] in ("python", "python3"):
        program = program[1:]
        is_plain = program and (program[0] in ("-m", "-c") or not program[0].startswith("-"))
        if not is_plain:
            return [sys.executable, *program]
    elif not program[0].endswith(".py"):
        return program
    return [sys.executable, "-m", "mpipar.cli.program", *program]


def main(arguments: argparse.Namespace) -> int:
    """Start the ranks and wait for them.

    Parameters
    ----------
    arguments : argparse.Namespace
        Parsed options.

    Returns
    -------
    int
        0, 1 or what the ranks ended with, if that is 2, 3 or 4.

    Raises
    ------
    LaunchError
        If no launcher fits the MPI library, or this process already is a rank.
    """
    code = _check_words(arguments.words)
    if code is not None:
        return code
    environment = dict(os.environ)
    n_ranks = arguments.n_ranks or _announced_tasks(environment)
    if n_ranks is None:
        return _usage("say how many ranks: mpipar run -n N ...")
    _refuse_nested(environment)
    environment |= choose_library(arguments.mpi)
    library = loaded_library(environment)
    launcher = find_launcher(library, environment)
    settings = rank_settings(
        library.name, environment, n_ranks, _cores(), is_root=os.geteuid() == 0
    )
    settings |= {**choose_library(arguments.mpi), **launcher.environment}
    command = launcher.command(n_ranks, rank_program(arguments.words))
    if arguments.dry_run or arguments.verbose:
        out = sys.stdout if arguments.dry_run else sys.stderr
        print(f"# {library}, launched by {launcher.path} ({launcher.name})", file=out)
        print(shlex.join([*(f"{k}={v}" for k, v in sorted(settings.items())), *command]), file=out)
    if arguments.dry_run:
        return command_line.DONE
    outcome = run_job(command, {**environment, **settings}, arguments.deadline)
    return _report(outcome, arguments.deadline)


def _check_words(words: list[str]) -> int | None:
    """Find mistakes here, once, instead of on every rank; None if there are none."""
    if not words or words == ["--"]:
        return _usage("say what to run: a verb, or -- and a program")
    if words[0] == "--":
        is_file = words[1].endswith(".py")
        if not (os.path.isfile(words[1]) if is_file else _is_program(words[1])):
            return _usage(f"no such program: {words[1]}")
        return None
    if words[0] == "run" or words[0] not in command_line.VERBS:
        return _usage(
            "run cannot start run" if words[0] == "run" else command_line.unknown_verb(words[0])
        )
    _, parser = command_line.load_verb(words[0])
    try:
        parser.parse_args(words[1:])
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else command_line.USAGE
    return None


def _is_program(word: str) -> bool:
    return word in ("python", "python3") or shutil.which(word) is not None


def _usage(message: str) -> int:
    print(f"mpipar run: {message}", file=sys.stderr)
    return command_line.USAGE


def _announced_tasks(environment: Mapping[str, str]) -> int | None:
    tasks = environment.get("SLURM_NTASKS", "")
    return int(tasks) if tasks.isdecimal() and int(tasks) > 0 else None


def _refuse_nested(environment: Mapping[str, str]) -> None:
    launched = detect(environment)
    if launched is None or (launched.launcher.startswith("srun") and launched.size == 1):
        return  # a shell inside an allocation is a step of one task
    raise LaunchError(
        f"mpipar run starts ranks, but this process is one already: {launched.launcher} started it "
        f"({launched.variable}={environment[launched.variable]}).\n"
        f"Under a launcher leave `mpipar run -n N` out: `mpirun -n 4 mpipar train`."
    )


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _report(outcome: Outcome, deadline_s: float | None) -> int:
    if outcome.timed_out:
        print(
            f"mpipar run: the deadline of {deadline_s:g} s passed; the job was ended",
            file=sys.stderr,
        )
    elif outcome.stopped_by is not None:
        print(f"mpipar run: stopped by signal {outcome.stopped_by}", file=sys.stderr)
    elif outcome.returncode in (
        command_line.DONE,
        command_line.USAGE,
        command_line.INFEASIBLE,
        command_line.BLOCKED,
    ):
        return outcome.returncode
    return command_line.FAILED
