"""What a trace shows: text table, Chrome trace, and the picture of who sent how much to whom."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mpipar.errors import EmptyInput, ParallelismError
from mpipar.pipeline_parallel.trace import Lanes, meta
from mpipar.report.trace import MESSAGES, Record, by_event, by_op, matrix


def trace_table(records: Sequence[Record]) -> str:
    """Calls by operation and axes, then the program's own events.

    Parameters
    ----------
    records : sequence of Record
        Of `load_trace`.

    Returns
    -------
    str
        Bytes and seconds are summed over ranks.
    """
    lines = [
        f"{'op':<16}{'axes':<10}{'calls':>8}{'MB':>12}{'time s':>10}{'waiting s':>11}"
        f"{'algbw GB/s':>12}{'busbw GB/s':>12}  waiting for"
    ]
    for row in by_op(records):
        whom = f"rank {row.waited_for}" if row.waited_for >= 0 else "-"
        lines.append(
            f"{row.op:<16}{row.group:<10}{row.n_calls:>8}{row.n_bytes / 1e6:>12.3f}"
            f"{row.seconds:>10.3f}{row.wait_s:>11.3f}{row.bytes_per_s / 1e9:>12.3f}"
            f"{row.bus_bytes_per_s / 1e9:>12.3f}  {whom}"
        )
    for op, (n_times, seconds) in by_event(records).items():
        lines.append(f"{op:<16}{'':<10}{n_times:>8}{'':>12}{seconds:>10.3f}")
    return "\n".join(lines)


def chrome_records(records: Sequence[Record]) -> dict[str, Any]:
    """Chrome trace of a run: a process a rank, lanes for each stream, arrows for messages.

    Parameters
    ----------
    records : sequence of Record
        Of `load_trace`.

    Returns
    -------
    dict
        The JSON object format, in microseconds from the first record. An arrow leads from the
        start of a send to the end of the receive of the same ends, tag and number.
    """
    return {"traceEvents": list(_events(records)), "displayTimeUnit": "ms"}


def write_chrome_records(records: Sequence[Record], path: str | Path) -> None:
    """Write `chrome_records` to a file.

    Parameters
    ----------
    records : sequence of Record
        Of `load_trace`.
    path : str or Path
        A JSON file.
    """
    Path(path).write_text(json.dumps(chrome_records(records)), encoding="utf-8")


def _events(records: Sequence[Record]) -> Iterator[dict[str, Any]]:
    first = min((r.start_s for r in records), default=0.0)
    lanes: dict[int, Lanes] = defaultdict(Lanes)
    for r in sorted(records, key=lambda r: r.start_s):
        start, length = (r.start_s - first) * 1e6, r.duration_s * 1e6
        lane = lanes[r.rank].place(r.group if r.is_call else "compute", start, start + length)
        at = {"pid": r.rank, "tid": lane, "ts": start}
        facts = {"bytes": r.bytes, "dtype": r.dtype, "algorithm": r.algorithm, "step": r.step}
        kind = "communication" if r.is_call else "compute"
        yield {"ph": "X", "name": r.op, "cat": kind, "dur": length, "args": facts, **at}
        if r.op in MESSAGES:
            sends = r.op == "send"
            ends = (r.rank, r.peer) if sends else (r.peer, r.rank)
            number = "-".join(map(str, (r.group, *ends, r.tag, r.sequence)))
            shape = {"ph": "s"} if sends else {"ph": "f", "bp": "e", "ts": start + length}
            yield {"name": "message", "cat": "message", "id": number, **at, **shape}
    for rank, used in sorted(lanes.items()):
        yield meta("process_name", rank, 0, {"name": f"rank {rank}"})
        for lane, name in used.names():
            yield meta("thread_name", rank, lane, {"name": name})


def save_matrix(records: Sequence[Record], path: str | Path) -> None:
    """Draw who sent how many bytes to whom; needs the ``plot`` extra.

    Parameters
    ----------
    records : sequence of Record
        Of `load_trace`.
    path : str or Path
        png, svg or pdf.

    Raises
    ------
    EmptyInput
        Without a record.
    """
    if not records:
        raise EmptyInput("communication matrix", "the trace has no records")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ParallelismError("a picture needs matplotlib: pip install 'mpipar[plot]'") from None
    figure = Figure(figsize=(5, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    image = axes.imshow([[n / 1e6 for n in row] for row in matrix(records)], cmap="viridis")
    axes.set(xlabel="to rank", ylabel="from rank")
    figure.colorbar(image, label="MB sent")
    figure.savefig(path, dpi=120)
