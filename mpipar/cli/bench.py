"""``mpipar bench [OP ...]``: collectives against the MPI underneath, in one run."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

from mpipar.bench.report import as_csv, as_json, heading, line, parsed_size
from mpipar.cli.arguments import one_of, positive
from mpipar.errors import LaunchError

if TYPE_CHECKING:
    from mpipar.bench.raw import Raw
    from mpipar.bench.report import Row
    from mpipar.comm.base import Communicator

_SIZES = "8,4K,64K,256K,1M,4M,16M"
_OPS = ("all_reduce", "reduce_scatter", "broadcast", "all_gather", "all_to_all", "send_recv")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``bench``.

    Parameters
    ----------
    parser : argparse.ArgumentParser
        The verb's parser.
    """
    parser.usage = "mpipar run -n N bench [OP ...] [options]"
    add = parser.add_argument
    add(
        "ops",
        nargs="*",
        type=one_of(*_OPS),
        metavar="OP",
        help=f"of {', '.join(_OPS)}; all by default",
    )
    add("--sizes", type=_sizes, default=_sizes(_SIZES), help=f"bytes a rank (default {_SIZES})")
    add("--rounds", type=positive, default=7, help="interleaved rounds, at least 5 (default 7)")
    add("--inputs", choices=("dirty", "clean"), default="dirty",
        help="whether inputs are rewritten before each call (default dirty)")  # fmt: skip
    add("--format", choices=("text", "json", "csv"), default="text", help="of the table")
    add("--gloo", action="store_true", help="also all_reduce by torch gloo, where it is installed")
    add("--tune", action="store_true",
        help="measure the ways of ordinary arrays and write the table of this machine")  # fmt: skip
    add("--device", action="store_true",
        help="arrays on this rank's GPU: staged, direct and NCCL beside raw NCCL")  # fmt: skip


def _sizes(text: str) -> list[int]:
    try:
        return [parsed_size(part) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def main(arguments: argparse.Namespace) -> int:
    """Run the verb on every rank; the first one prints.

    Parameters
    ----------
    arguments : argparse.Namespace
        Parsed options.

    Returns
    -------
    int
        0, or 1 if a result was wrong.
    """
    from mpipar.comm import init

    comm = init()
    if comm.size < 2 and not arguments.device:
        raise LaunchError("bench measures ranks against each other: mpipar run -n 2 bench")
    from mpipar.bench.measure import measure
    from mpipar.bench.raw import Raw

    if not hasattr(comm, "mpi"):
        raise LaunchError("bench needs MPI, which is off (MPIPAR_SINGLETON=1) or not installed")
    raw = Raw(comm.mpi)
    if arguments.device:
        return _on_device(comm, raw, arguments)
    if arguments.tune:
        from mpipar.bench.tune import tune

        text = tune(comm, raw)
        if comm.rank == 0:
            print(text)
        return 0
    dirty, n_rounds = arguments.inputs == "dirty", max(5, arguments.rounds)

    def found(op: str, n_bytes: int) -> list[Row]:
        rows = measure(comm, raw, op, n_bytes, n_rounds=n_rounds, dirty=dirty)
        if arguments.gloo and op == "all_reduce":
            from mpipar.bench.gloo import measured

            rows += measured(comm, raw, n_bytes, rows, n_rounds)
        return rows

    return _table(comm, arguments, found)


def _on_device(comm: Communicator, raw: Raw, arguments: argparse.Namespace) -> int:
    from mpipar.bench.device import DeviceBench, tune_device
    from mpipar.comm.device.arrays import library

    bench = DeviceBench(comm, raw, library("cupy"))
    if not arguments.tune:
        return _table(comm, arguments, lambda op, n: bench.measure(op, n, arguments.rounds))
    text = tune_device(bench)
    if comm.rank == 0:
        print(text)
    return 0


def _table(
    comm: Communicator, arguments: argparse.Namespace, found: Callable[[str, int], list[Row]]
) -> int:
    """Measure all that is asked for; the first rank prints."""
    rows, shows = [], comm.rank == 0 and arguments.format == "text"
    if shows:
        print(heading())
    for op in arguments.ops or _OPS:
        for n_bytes in arguments.sizes:
            more = found(op, n_bytes)
            rows += more
            if shows:
                print("\n".join(map(line, more)), flush=True)
    if comm.rank == 0 and not shows:
        print(as_json(rows) if arguments.format == "json" else as_csv(rows), end="")
    return int(any(row.n_wrong for row in rows))
