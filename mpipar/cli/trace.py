"""``mpipar trace``: where the time of a traced run went."""

from __future__ import annotations

import argparse
from pathlib import Path


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
    add("--chrome", metavar="FILE", help="save a Chrome trace, to be opened in Perfetto")
    add("--matrix", metavar="FILE", help="draw who sent how many bytes to whom (plot extra)")


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
    from mpipar.report.views import save_matrix, trace_table, write_chrome_records

    records = load_trace(Path(arguments.folder))
    print(trace_table(records))
    if arguments.chrome:
        write_chrome_records(records, arguments.chrome)
    if arguments.matrix:
        save_matrix(records, arguments.matrix)
    return 0
