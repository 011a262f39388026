"""``mpipar VERB ...``: finds the verb, parses its options, turns errors into exit codes.

A verb is a module with ``configure(parser)`` and ``main(arguments) -> int``, imported only when it
is chosen: start-up is paid on every rank. Exit codes: 0 done, 1 failed, 2 usage, 3 infeasible,
4 blocked.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any, Final

from mpipar.errors import (
    LaunchError,
    LayoutError,
    ParallelismError,
    RecipeError,
    ScheduleError,
    UnevenSplit,
)
from mpipar.launch.environment import detect

DONE: Final = 0
FAILED: Final = 1
USAGE: Final = 2
INFEASIBLE: Final = 3
BLOCKED: Final = 4

# name -> (module, one line of help)
VERBS: Final = {
    "train": ("mpipar.cli.train", "train a byte-level GPT, data-parallel over the ranks"),
    "generate": ("mpipar.cli.generate", "text from a model, over a paged cache"),
    "run": ("mpipar.cli.run", "start a verb or any program on N ranks with the right launcher"),
    "test": ("mpipar.cli.test", "run pytest; with `mpipar run -n N test` on N ranks"),
    "job": ("mpipar.cli.job", "print the Slurm script of a run"),
    "doctor": ("mpipar.cli.doctor", "what is wrong here: launcher, MPI, devices, threads, Slurm"),
    "export": ("mpipar.cli.export", "write a run's weights as a folder that other tools read"),
    "schedule": ("mpipar.cli.schedule", "draw, compare and check pipeline schedules"),
    "plan": ("mpipar.cli.plan", "which degrees and schedule to train with, at what price, and why"),
    "bench": ("mpipar.cli.bench", "collectives against the MPI underneath, in one run"),
    "trace": ("mpipar.cli.trace", "where the time of a traced run went, by operation and axis"),
    "report": ("mpipar.cli.report", "a page about a run, for those who may see it"),
    "topo": ("mpipar.cli.topo", "what this node, this job or a described machine looks like"),
}


def exit_code(error: ParallelismError) -> int:
    """The exit code that an error of the tree stands for.

    Parameters
    ----------
    error : ParallelismError
        What was raised.

    Returns
    -------
    int
        2 for a recipe, 3 for what cannot exist at this size, 4 for a launch, else 1.
    """
    if isinstance(error, RecipeError):
        return USAGE
    if isinstance(error, (UnevenSplit, LayoutError, ScheduleError)):
        return INFEASIBLE
    return BLOCKED if isinstance(error, LaunchError) else FAILED


def whole_lines() -> None:
    """Make both streams write whole lines, also under ``PYTHONUNBUFFERED``.

    Launchers merge the ranks' output as it comes; an unbuffered ``print`` writes a line in pieces,
    and the pieces of different ranks mix.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True, write_through=False)


def _overview() -> str:
    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {name:<{width}}  {line}" for name, (_, line) in VERBS.items())
    return (
        "usage: mpipar [--version] [--help] VERB ...\n\n"
        f"Parallel training and inference where MPI is the fabric.\n\nverbs:\n{verbs}\n\n"
        "`mpipar VERB --help` tells a verb's options. Exit codes: 0 done, 1 failed, 2 usage, "
        "3 infeasible, 4 blocked.\n"
    )


def load_verb(name: str) -> tuple[Any, argparse.ArgumentParser]:
    """Import a verb's module and make its parser.

    Parameters
    ----------
    name : str
        A key of `VERBS`.

    Returns
    -------
    tuple
        The module and an ``argparse.ArgumentParser``.
    """
    module_name, line = VERBS[name]
    module = importlib.import_module(module_name)
    parser = argparse.ArgumentParser(prog=f"mpipar {name}", description=line, allow_abbrev=False)
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="say more; errors with their traceback"
    )
    module.configure(parser)
    return module, parser


def unknown_verb(name: str) -> str:
    """What to say about a verb that does not exist.

    Parameters
    ----------
    name : str
        As the user wrote it.

    Returns
    -------
    str
        One line that names the nearest verb.
    """
    from difflib import get_close_matches

    near = get_close_matches(name, VERBS, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"verbs are {', '.join(VERBS)}"
    return f"mpipar: unknown verb {name!r}; {hint}"


def _tell(verb: str, error: ParallelismError, rank: int | None) -> None:
    """Three lines; one line from each further rank, which mostly says the same."""
    if rank:
        first = str(error).partition("\n")[0]
        print(f"[rank {rank}] {type(error).__name__}: {first}", file=sys.stderr)
        return
    print(
        f"mpipar {verb}: {type(error).__name__}\n{error}\n"
        f"(`mpipar {verb} -v ...` prints the traceback)",
        file=sys.stderr,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The command line.

    Parameters
    ----------
    argv : sequence of str or None
        Arguments without the program's name; None takes ``sys.argv``.

    Returns
    -------
    int
        Exit code.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    whole_lines()
    if not words or words[0] in ("-h", "--help"):
        print(_overview(), end="", file=sys.stdout if words else sys.stderr)
        return DONE if words else USAGE
    if words[0] == "--version":
        from mpipar._version import version

        print(f"mpipar {version}")
        return DONE
    if words[0] not in VERBS:
        print(unknown_verb(words[0]), file=sys.stderr)
        return USAGE
    return _run_verb(words[0], words[1:])


def _parse(
    parser: argparse.ArgumentParser, words: list[str], is_silent: bool
) -> argparse.Namespace:
    """Help and usage errors are told once: by the first rank."""
    if not is_silent:
        return parser.parse_args(words)
    with (
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        return parser.parse_args(words)


def _run_verb(verb: str, words: list[str]) -> int:
    launched = detect(os.environ)
    rank = launched.rank if launched is not None else None
    module, parser = load_verb(verb)
    try:
        arguments = _parse(parser, words, is_silent=bool(rank))
    except SystemExit as stop:  # argparse has printed help or usage
        return stop.code if isinstance(stop.code, int) else USAGE

    def act() -> int:
        try:
            code: int = module.main(arguments)
        except ParallelismError as error:
            if arguments.verbose:
                raise
            _tell(verb, error, rank)
            return exit_code(error)
        return code

    if rank is not None:  # an exception ends the whole job
        from mpipar.comm.mpi.lifecycle import run_as_rank

        return run_as_rank(act)
    try:
        return act()
    except BrokenPipeError:  # the reader of a pipe has gone, as in `mpipar topo | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED


if __name__ == "__main__":
    sys.exit(main())
