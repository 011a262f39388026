"""A plan for people: one table with its reasons, and a recipe for `mpipar train`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mpipar.errors import LayoutError
from mpipar.planner.option import Option
from mpipar.planner.plan import Plan


def table(rows: Iterable[Sequence[str]]) -> str:
    """Rows as aligned text, the first column to the left and the others to the right."""
    cells = [list(row) for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    lines = (
        [row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]
        for row in cells
    )
    return "\n".join("  ".join(line).rstrip() for line in lines)


def shape(row: Mapping[str, Any]) -> str:
    """A configuration in one line."""
    degrees = " ".join(f"{k}={row[k]}" for k in ("dp", "tp", "pp", "cp", "ep") if row[k] > 1)
    schedule = f"interleaved x{row['chunks']}" if row["chunks"] > 1 else row["schedule"]
    parts = [degrees or "one device", f"micro={row['micro']} x {row['n_micro']}"]
    parts += [schedule] if row["pp"] > 1 else []
    parts += [f"recompute={row['recompute']}"] if row["recompute"] != "none" else []
    parts += [f"ZeRO {row['zero']}"] if row["zero"] else []
    parts += ["sequence parallel"] if row["sp"] else []
    if row["order"] != ("pp", "dp", "cp", "tp"):
        parts += [f"order {' '.join(row['order'])}"]
    return ", ".join(parts)


def plan_text(plan: Plan) -> str:
    """The whole plan as text.

    Parameters
    ----------
    plan : Plan
        Any.

    Returns
    -------
    str
        What to run, memory and time by kind, why the next three lost, what is faster but cannot
        run yet, and where the constants come from.
    """
    gib = plan.capacity_bytes / 2**30
    lines = [
        f"{plan.model.name} ({plan.model.n_parameters / 1e9:.3g} B parameters, sequence "
        f"{plan.model.sequence}), batch {plan.batch}, {plan.n_devices} devices of {plan.cluster}",
        f"{plan.n_evaluated:,} configurations, {plan.n_fitting:,} fit in {gib:.1f} GiB a device",
        "",
    ]
    if plan.options:
        lines += _ranking(plan, "run", plan.options)
    else:
        lines.append("nothing that fits can be run by `mpipar train` yet; prices only:")
    fastest = plan.priced[0]
    if not plan.options or fastest.row != plan.options[0].row:
        lines += ["", *_ranking(plan, "fastest, not runnable yet", plan.priced)]
        needs = ", ".join(fastest.missing) or "nothing more"
        lines.append(f"to run it, `mpipar train` would need: {needs}")
    best = (plan.options or plan.priced)[0]
    lines += ["", _kinds(best), "", f"order of axes: {plan.order_gain:+.1%} over the default"]
    return "\n".join([*lines, f"constants: {plan.source}"])


def _ranking(plan: Plan, title: str, options: Sequence[Option]) -> list[str]:
    best = options[0]
    mfu = plan.flops / (best.seconds * plan.peak_flops_per_s)
    rate = plan.batch * plan.model.sequence / best.seconds
    lines = [
        f"{title}: {shape(best.row)}",
        f"  {best.seconds:.4g} s a step ({best.closed_form_s:.4g} s by the closed form), "
        f"{rate:,.0f} tokens/s, {mfu:.0%} of peak, {int(best.peak) / 2**30:.1f} GiB",
    ]
    lines += [f"  lost: {shape(o.row)}  ({o.loses_by(best)})" for o in options[1:4]]
    return lines


def _kinds(option: Option) -> str:
    """Memory and time by kind, side by side."""
    memory = [("GiB a rank", "first", "last")]
    memory += [
        (kind, f"{option.first_bytes[kind] / 2**30:.2f}", f"{option.last_bytes[kind] / 2**30:.2f}")
        for kind in option.first_bytes
    ]
    sums = [sum(part.values()) / 2**30 for part in (option.first_bytes, option.last_bytes)]
    memory.append(("sum", f"{sums[0]:.2f}", f"{sums[1]:.2f}"))
    time = [("time a step", "s", "share")]
    for kind, seconds in option.time_s.items():
        time.append((kind, f"{seconds:.4g}", f"{seconds / option.closed_form_s:.0%}"))
    time.append(("sum", f"{option.closed_form_s:.4g}", "100%"))
    empty = ("", "", "")
    rows = max(len(memory), len(time))
    memory += [empty] * (rows - len(memory))
    return table((*m, "  ", *t) for m, t in zip(memory, time, strict=True))


def recipe_toml(plan: Plan) -> str:
    """The recommended configuration as a recipe for `mpipar train`.

    Parameters
    ----------
    plan : Plan
        With an option that can run.

    Returns
    -------
    str
        TOML with the sections model, mesh, train and plan (the predicted step).

    Raises
    ------
    LayoutError
        If nothing of the plan can run yet; the message says what is missing.
    """
    if not plan.options:
        needs = ", ".join(plan.priced[0].missing)
        raise LayoutError(f"no recipe: `mpipar train` cannot run {needs} yet")
    model, row = plan.model, plan.options[0].row
    schedule = "interleaved" if row["chunks"] > 1 else row["schedule"]
    lines = [
        f"# {shape(row)}: {plan.options[0].seconds:.4g} s a step predicted",
        "[model]",
        *(f"{k} = {getattr(model, k)}" for k in ("n_layers", "width", "n_heads")),
        f"n_kv_heads = {model.kv_heads}",
        f"sequence = {model.sequence}",
        f"vocabulary = {model.vocabulary}",
        f"hidden_factor = {model.ffn // model.width}",
        f"tied = {str(model.tied).lower()}",
        "",
        "[mesh]",
        *(f"{axis} = {row[axis]}" for axis in ("dp", "pp", "tp", "cp")),
        f'order = "{" ".join(row["order"])}"',
        "",
        "[train]",
        f"batch = {plan.batch}",
        f"microbatches = {row['n_micro']}",
        f'schedule = "{schedule}"',
        f"sequence_parallel = {str(bool(row['sp'])).lower()}",
        "",
        "[plan]",
        f"step_s = {float(plan.options[0].seconds)!r}",
        f"cluster = {json.dumps(plan.cluster, ensure_ascii=False)}",
    ]
    return "\n".join(lines) + "\n"
