"""``mpipar trace``: where the time of a traced run went."""

from __future__ import annotations

import argparse
from pathlib import Path

from mpipar.cli.arguments import PICTURE, new_file


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of this verb.

    Parameters
    ----------
    parser : argparse.ArgumentParser
        The verb's parser.
    """
    parser.description = (
        "Sum up the record that `mpipar train --trace` wrote: calls, bytes, time, bandwidth and "
        "who was waited for, by operation and axis. Bytes and times are summed over ranks."
    )
    add = parser.add_argument
    add("folder", metavar="FOLDER", help="run folder, or a trace.jsonl")
    add(
        "--chrome",
        type=new_file(),
        metavar="FILE",
        help="save a Chrome trace, to be opened in Perfetto",
    )
    add("--gantt", type=new_file(*PICTURE), metavar="FILE",
        help="draw a step, rank by rank: png, svg or pdf (plot extra)")  # fmt: skip
    add("--step", type=int, help="which step for --gantt; by default the last but one")
    add("--cluster", metavar="NAME",
        help="what this machine's figures foretell beside what was measured: a file of "
        "`mpipar topo --measure`, or a known machine")  # fmt: skip
    add("--matrix", type=new_file(*PICTURE), metavar="FILE",
        help="draw who sent how many bytes to whom: png, svg or pdf (plot extra)")  # fmt: skip


def main(arguments: argparse.Namespace) -> int:
    """Print and draw.

    Parameters
    ----------
    arguments : argparse.Namespace
        Options of `configure`.

    Returns
    -------
    int
        0.
    """
    from mpipar.report.trace import load_trace
    from mpipar.report.views import (
        predicted_table,
        save_gantt,
        save_matrix,
        trace_table,
        write_chrome_records,
    )
    from mpipar.topology.cluster_file import load_cluster

    records = load_trace(Path(arguments.folder))
    print(trace_table(records))
    if arguments.cluster:
        print()
        print(predicted_table(records, load_cluster(arguments.cluster)))
    if arguments.gantt:
        save_gantt(records, arguments.gantt, arguments.step)
    if arguments.chrome:
        write_chrome_records(records, arguments.chrome)
    if arguments.matrix:
        save_matrix(records, arguments.matrix)
    return 0
