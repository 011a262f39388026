"""``mpipar report``: a page about a run, for those who may see it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mpipar.cli.main import BLOCKED


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of this verb.

    Parameters
    ----------
    parser : argparse.ArgumentParser
        The verb's parser.
    """
    parser.description = (
        "Write report.md and report.html about a run that was made with `mpipar train --trace`. "
        "A public one needs a review of its inputs as they are: look at them, say so by "
        "--review WHO --visibility public, then ask for the report; a later change voids it."
    )
    add = parser.add_argument
    add("folder", metavar="RUN_FOLDER", type=Path, help="run folder")
    add("--visibility", choices=("public", "research-restricted", "private"), default="private",
        help="who may see the report (default private)")  # fmt: skip
    add(
        "--review",
        metavar="WHO",
        help="write the review and nothing else: WHO has looked at the inputs",
    )
    add("--out", metavar="FOLDER", type=Path, help="where to write (default: the run folder)")


def main(arguments: argparse.Namespace) -> int:
    """Review if asked to, and write both forms, or nothing.

    Parameters
    ----------
    arguments : argparse.Namespace
        Options of `configure`.

    Returns
    -------
    int
        0, or 4 if the report is blocked.
    """
    from mpipar.comm.trace_types import ParallelTraceVisibility
    from mpipar.errors import InvalidPublicReport
    from mpipar.report.page import markdown, page
    from mpipar.report.run_report import report_record, write_review

    visibility = ParallelTraceVisibility(arguments.visibility)
    try:
        if arguments.review is not None:
            print(write_review(arguments.folder, arguments.review, visibility))
            return 0
        record = report_record(arguments.folder, visibility)
    except InvalidPublicReport as error:
        print(f"mpipar report: {error}", file=sys.stderr)
        return BLOCKED
    out = arguments.out or arguments.folder
    out.mkdir(parents=True, exist_ok=True)
    for name, text in (("report.md", markdown(record)), ("report.html", page(record))):
        (out / name).write_text(text, encoding="utf-8")
        print(out / name)
    return 0
