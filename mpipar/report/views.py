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
from mpipar.topology.cluster import Cluster
from mpipar.topology.cost import FORMS, LinkCost, cheapest

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#56B4E9", "#CC79A7", "#999999")


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


def predicted_table(records: Sequence[Record], cluster: Cluster) -> str:
    """Seconds that a machine's figures foretell for the calls, beside those measured.

    Parameters
    ----------
    records : sequence of Record
        Of `load_trace`.
    cluster : Cluster
        Such as ``mpipar topo --measure`` writes; the tier that holds a whole group decides.

    Returns
    -------
    str
        Summed over ranks, without waiting for others; events have no prediction here.
    """
    sums: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for r in records:
        if r.op in FORMS or r.op == "send":
            reach = max(r.members) - min(r.members) + 1
            tier = next((t for t in cluster.tiers if t.n_devices >= reach), cluster.tiers[-1])
            link = LinkCost(float(tier.latency), 1.0 / float(tier.bandwidth))
            found = (
                float(tier.latency) + r.bytes / float(tier.bandwidth)
                if r.op == "send"
                else float(cheapest(r.op, len(r.members), r.bytes, link).time)
            )
            both = sums[r.op, r.group]
            both[0] += found
            both[1] += r.duration_s - (r.wait_s or 0.0)
    lines = [f"{'op':<16}{'axes':<10}{'predicted s':>12}{'measured s':>12}{'ratio':>8}"]
    for (op, group), (foretold, spent) in sorted(sums.items(), key=lambda row: -row[1][1]):
        ratio = f"{spent / foretold:.2f}" if foretold > 0 else "-"
        lines.append(f"{op:<16}{group:<10}{foretold:>12.4f}{spent:>12.4f}{ratio:>8}")
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
    figure = _figure(records, (5, 4))
    axes = figure.subplots()
    image = axes.imshow([[n / 1e6 for n in row] for row in matrix(records)], cmap="viridis")
    axes.set(xlabel="to rank", ylabel="from rank")
    figure.colorbar(image, label="MB sent")
    figure.savefig(path, dpi=120)


def save_gantt(records: Sequence[Record], path: str | Path, step: int | None = None) -> None:
    """Draw what each rank did in one step; needs the ``plot`` extra.

    Parameters
    ----------
    records : sequence of Record
        Of `load_trace`.
    path : str or Path
        png, svg or pdf.
    step : int, optional
        Which; by default the last one that was followed by another.

    Raises
    ------
    EmptyInput
        If there is no record of that step.
    """
    steps = sorted({r.step for r in records})
    last = steps[-2:][0] if steps else 0
    shown = [r for r in records if r.step == (last if step is None else step)]
    ranks = sorted({r.rank for r in shown})
    figure = _figure(shown, (10, 1.6 + 0.5 * len(ranks)))
    axes = figure.subplots()
    first = min(r.start_s for r in shown)
    kinds = sorted({"communication" if r.is_call else r.op for r in shown})
    for number, kind in enumerate(kinds):
        for rank in ranks:
            bars = [
                ((r.start_s - first) * 1e3, r.duration_s * 1e3)
                for r in shown
                if r.rank == rank and kind == ("communication" if r.is_call else r.op)
            ]
            height = 0.3 if kind == "communication" else 0.5
            bottom = ranks.index(rank) + (0.2 if kind == "communication" else -0.3)
            axes.broken_barh(bars, (bottom, height), color=_COLOURS[number % len(_COLOURS)],
                             label=kind if rank == ranks[0] else None)  # fmt: skip
    axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks])
    axes.invert_yaxis()
    axes.set_xlabel("time (ms)")
    figure.legend(ncols=4, loc="outside upper left", frameon=False)
    figure.savefig(path, dpi=120)


def _figure(records: Sequence[Record], inches: tuple[float, float]) -> Any:
    if not records:
        raise EmptyInput("picture of a trace", "there are no records to draw")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ParallelismError("a picture needs matplotlib: pip install 'mpipar[plot]'") from None
    figure = Figure(figsize=inches, layout="constrained")
    FigureCanvasAgg(figure)
    return figure
