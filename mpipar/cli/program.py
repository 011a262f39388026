"""``python -m mpipar.cli.program FILE|-m MODULE|-c CODE ...``: a user's program as one rank.

Runs the program as ``__main__``, so that an exception or an early exit of one rank ends the whole
job instead of leaving the others in a collective call.
"""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from mpipar.cli.main import USAGE, whole_lines


def run_program(words: list[str]) -> None:
    """Run a program in this process, as ``python WORDS`` would.

    Parameters
    ----------
    words : list of str
        ``FILE args``, ``-m MODULE args`` or ``-c CODE args``.
    """
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        namespace = {"__name__": "__main__", "__builtins__": __builtins__}
        exec(compile(words[1], "<string>", "exec"), namespace)
    else:
        sys.argv = words
        sys.path[0] = str(Path(words[0]).resolve().parent)
        runpy.run_path(words[0], run_name="__main__")


def main() -> int:
    """Entry of the module.

    Returns
    -------
    int
        Exit code of this rank.
    """
    words = sys.argv[1:]
    if not words or (words[0] in ("-m", "-c") and len(words) < 2):
        print("usage: python -m mpipar.cli.program FILE|-m MODULE|-c CODE ...", file=sys.stderr)
        return USAGE
    whole_lines()
    try:
        from mpipar.comm.lifecycle import run_as_rank
    except ImportError:  # until that module stands: leave at once, so that the launcher acts
        run_as_rank = _end_at_once
    return run_as_rank(lambda: run_program(words))


def _end_at_once(function: Callable[[], object]) -> int:
    try:
        function()
    except SystemExit:
        raise
    except BaseException:
        traceback.print_exc()
        sys.stdout.flush()
        os._exit(1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
