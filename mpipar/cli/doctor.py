"""``mpipar doctor``: what is wrong here."""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import sys
import threading
from pathlib import Path

from mpipar.cli.main import BLOCKED, DONE
from mpipar.doctor.check import Check, Status, public_block, report_lines
from mpipar.doctor.here import Here, check_here
from mpipar.launch.environment import detect


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options.

    Parameters
    ----------
    parser : argparse.ArgumentParser
        Of the verb.
    """
    parser.description = (
        "Check this machine without starting MPI; with --ranks, under a launcher, the ranks of a "
        "job together: mpipar run -n 2 doctor --ranks. Exit code 4 if something blocks work."
    )
    add = parser.add_argument
    add("--ranks", action="store_true", help="start MPI and check the ranks too (collective)")
    add("--deadline", type=float, default=60.0, metavar="SECONDS",
        help="end the collective half after that time (default 60)")  # fmt: skip
    add("--folder", type=Path, default=Path(), help="where run folders are to be made")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--json", action="store_true", help="print the checks as JSON")
    kind.add_argument("--public", action="store_true",
                      help="print a block without names or paths, for an issue")  # fmt: skip


def main(arguments: argparse.Namespace) -> int:
    """Check and tell. Collective over the job with ``--ranks``.

    Parameters
    ----------
    arguments : argparse.Namespace
        As parsed.

    Returns
    -------
    int
        4 if a check failed, else 0.
    """
    launched = detect(os.environ)
    rank = (launched.rank if launched else None) or 0
    if arguments.ranks:
        checks, rank = _together(arguments)
    else:
        checks = check_here(Here(os.environ, folder=arguments.folder)) if rank == 0 else []
    if rank == 0:
        if arguments.json:
            print(json.dumps([check.to_json() for check in checks], indent=1))
        else:
            print(public_block(checks) if arguments.public else report_lines(checks))
    return BLOCKED if any(check.status is Status.FAIL for check in checks) else DONE


def _together(arguments: argparse.Namespace) -> tuple[list[Check], int]:
    """The collective half, under a deadline that holds inside MPI calls too."""
    from mpipar.comm import init
    from mpipar.doctor.ranks import check_ranks

    os.environ.setdefault("MPIPAR_DEADLINE_S", str(arguments.deadline))
    timer = threading.Timer(arguments.deadline, _give_up, [arguments.deadline])
    timer.daemon = True
    timer.start()
    comm = init()
    local = check_here(Here(os.environ, folder=arguments.folder)) if comm.rank == 0 else []
    comm.barrier()
    checks = [*local, *check_ranks(comm, arguments.folder)]
    timer.cancel()
    return checks, comm.rank


def _give_up(deadline_s: float) -> None:
    """From a thread: the main one may never come back from MPI."""
    sys.stderr.write(
        f"mpipar doctor: the ranks were not done within {deadline_s:g} s; this one stands at\n"
    )
    sys.stderr.flush()
    faulthandler.dump_traceback(all_threads=True)
    os._exit(BLOCKED)
