"""A report's record as Markdown and as one HTML page that needs nothing else."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

_STYLE = """
:root { color-scheme: light dark; --line: #8886; --ink: #2563eb }
@media (prefers-color-scheme: dark) { :root { --ink: #7aa8ff } }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 56rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .2rem .8rem .2rem 0; text-align: right; border-bottom: 1px solid var(--line) }
th:first-child, td:first-child { text-align: left }
.wide { overflow-x: auto } code { overflow-wrap: anywhere } svg { width: 100%; height: auto }
"""
Table = tuple[str, list[str], list[list[str]]]


def _tables(record: Mapping[str, Any]) -> list[Table]:
    """Title, heads and cells of each table."""
    pairs = [
        ("What was run", {**record.get("model", {}), **record.get("train", {})}),
        ("Layout", {"ranks": record.get("n_ranks", 0), **record.get("layout", {})}),
        ("Result", record.get("final", {})),
        ("Seconds of a step", record.get("step_s", {})),
        ("Seconds by kind, over all ranks", record.get("time_by_kind", {})),
        ("Environment", record.get("environment", {})),
        ("SHA-256 of the inputs", record.get("inputs", {})),
    ]
    tables: list[Table] = [
        (title, ["", "value"], [[str(k), _text(v)] for k, v in values.items()])
        for title, values in pairs
        if values
    ]
    rows: Sequence[Mapping[str, Any]] = record.get("communication", [])
    heads = ["op", "axes", "calls", "bytes", "seconds", "waiting_s", "bus_bytes_per_s"]
    if rows:
        cells = [[_text(row.get(head, "-")) for head in heads] for row in rows]
        tables.insert(-1, ("Communication, over all ranks", heads, cells))
    return tables


def _text(value: object) -> str:
    if isinstance(value, list):
        return ".".join(map(str, value))
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def markdown(record: Mapping[str, Any]) -> str:
    """Write a report as Markdown.

    Parameters
    ----------
    record : mapping
        From `report_record`.

    Returns
    -------
    str
        With tables.
    """
    lines = ["# Training run", "", f"Visibility: {record.get('visibility', 'private')}", ""]
    for title, heads, rows in _tables(record):
        lines += [f"## {title}", ""]
        lines += [f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *rows)]
        lines.append("")
    return html.escape("\n".join(lines), quote=False)


def page(record: Mapping[str, Any]) -> str:
    """Write a report as HTML: no script, no link, light and dark.

    Parameters
    ----------
    record : mapping
        From `report_record`.

    Returns
    -------
    str
        A whole document; every value is escaped.
    """
    parts = [f"<p>Visibility: {html.escape(str(record.get('visibility', 'private')))}</p>",
             _curve(record.get("steps", []), record.get("losses", []))]  # fmt: skip
    for title, heads, rows in _tables(record):
        body = "".join(_row("td", cells) for cells in rows)
        table = f"<table>{_row('th', heads)}{body}</table>"
        parts.append(f"<h2>{html.escape(title)}</h2><div class='wide'>{table}</div>")
    head = (
        "<meta charset='utf-8'><meta name='viewport' content='width=device-width'>"
        f"<title>Training run</title><style>{_STYLE}</style>"
    )
    return (
        f"<!doctype html><html lang='en'><head>{head}</head><body><h1>Training run</h1>"
        f"{''.join(parts)}</body></html>\n"
    )


def _row(tag: str, cells: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"


def _curve(steps: Sequence[int], losses: Sequence[float]) -> str:
    """The loss curve; nothing where the points do not match."""
    if len(steps) < 2 or len(steps) != len(losses):
        return ""
    low, high, first, last = min(losses), max(losses), min(steps), max(steps)
    across, up = 620 / max(last - first, 1), 200 / ((high - low) or 1.0)
    points = " ".join(
        f"{60 + (s - first) * across:.1f},{220 - (v - low) * up:.1f}"
        for s, v in zip(steps, losses, strict=True)
    )
    words = "".join(
        f"<text x='{x}' y='{y}' text-anchor='{a}' font-size='16' fill='currentColor'>{text}</text>"
        for x, y, a, text in (
            (52, 25, "end", f"{high:.3g}"), (52, 224, "end", f"{low:.3g}"),
            (60, 245, "start", f"step {first}"), (680, 245, "end", f"step {last}"),
        )
    )  # fmt: skip
    return (
        "<h2>Loss</h2><svg viewBox='0 0 700 255' role='img' aria-label='loss curve'>"
        "<path d='M60 20V220H680' fill='none' stroke='currentColor' opacity='.5'/>"
        f"<polyline points='{points}' fill='none' stroke='var(--ink)' stroke-width='2'/>"
        f"{words}</svg>"
    )
