"""The table of `mpipar bench`: text as nccl-tests print it, JSON and CSV."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

_HEAD = (
    "         size        count    type  redop  operation       form                   "
    "time(us)      quartiles(us)   algbw   busbw  #wrong   ratio  /bound"
)


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Parameters
    ----------
    op, form : str
        What was measured.
    n_bytes, count : int
        Size in the sense of nccl-tests, and elements.
    time_s, low_s, high_s : float
        Median and quartiles.
    ratio : float
        Time of raw in the same form over this time: above 1 is faster than the MPI.
    algbw, busbw : float
        Bytes per second of the algorithm and on the bus.
    n_wrong : int
        Wrong elements, on all ranks.
    bound_s : float
        All ranks copying one rank's bytes at once.
    """

    op: str
    form: str
    n_bytes: int
    count: int
    time_s: float
    low_s: float
    high_s: float
    ratio: float
    algbw: float
    busbw: float
    n_wrong: int
    bound_s: float


def parsed_size(text: str) -> int:
    """Bytes of a size such as 8, 64K or 16M.

    Parameters
    ----------
    text : str
        A number, with K, M or G for powers of 1024.

    Returns
    -------
    int
        Bytes.

    Raises
    ------
    ValueError
        If it is no such number.
    """
    unit = {"K": 2**10, "M": 2**20, "G": 2**30}.get(text[-1:].upper())
    number = text[:-1] if unit else text
    if not number.isdecimal():
        raise ValueError(f"size {text!r} is no number of bytes such as 8, 64K or 16M")
    n_bytes = int(number) * (unit or 1)
    if n_bytes < 1:
        raise ValueError(f"size {text}: at least 1 byte is needed")
    return n_bytes


def heading() -> str:
    """The head of the text table.

    Returns
    -------
    str
        One line.
    """
    return _HEAD


def line(row: Row) -> str:
    """One row of the text table; bandwidths in GB/s.

    Parameters
    ----------
    row : Row
        Measured.

    Returns
    -------
    str
        One line.
    """
    redop = "sum" if "reduce" in row.op else "none"
    us = 1e6
    return (
        f"{row.n_bytes:13d} {row.count:12d}   float {redop:>6}  {row.op:<15} {row.form:<20} "
        f"{row.time_s * us:10.2f} {row.low_s * us:9.2f}-{row.high_s * us:<9.2f}"
        f"{row.algbw / 1e9:7.2f} {row.busbw / 1e9:7.2f} {row.n_wrong:7d} {row.ratio:7.2f} "
        f"{row.time_s / row.bound_s:7.2f}"
    )


def as_json(rows: Sequence[Row]) -> str:
    """All rows as a JSON list of objects.

    Parameters
    ----------
    rows : sequence of Row
        Measured.

    Returns
    -------
    str
        Seconds and bytes per second.
    """
    return json.dumps([asdict(row) for row in rows], indent=1)


def as_csv(rows: Sequence[Row]) -> str:
    """All rows as CSV with a head.

    Parameters
    ----------
    rows : sequence of Row
        Measured.

    Returns
    -------
    str
        Seconds and bytes per second.
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, [f.name for f in fields(Row)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in rows)
    return text.getvalue()
