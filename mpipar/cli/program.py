"""``python -m mpipar.cli.program FILE|-m MODULE|-c CODE ...``: a user's program as one rank.

Runs the program as ``__main__``, so that an exception or an early exit of one rank ends the whole
job instead of leaving the others in a collective call.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

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
        if not sys.flags.safe_path:
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
    from mpipar.comm.mpi.lifecycle import run_as_rank

    code = run_as_rank(lambda: run_program(words))
    if code and "mpipar.comm.mpi.world" not in sys.modules:
        _abort_plain_mpi(code)
    return code


def _abort_plain_mpi(code: int) -> None:
    """End the job of a program that started MPI by itself, as ``python -m mpi4py`` would.

    Leaving the interpreter would finalise MPI, which waits for the other ranks for ever.
    """
    mpi: Any = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        sys.stdout.flush()
        mpi.COMM_WORLD.Abort(code)


if __name__ == "__main__":
    sys.exit(main())
