"""Calculon's A100 constants and conventions (Isaev et al. 2023), to compare with it row by row.

Calculon adds computing and moving of every operation, leaves out the head, and counts a
collective as ``latency + bytes x scale (1 + offset / p) / (bandwidth x efficiency)``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from mpipar.planner.fabric import Fabric, Scale
from mpipar.planner.machine import Curve, Machine
from mpipar.planner.step import Practice

PRACTICE = Practice(dp_overlap=0.0, scatter_gather=False, optimizer_bytes=12)
"""What Calculon assumes of the training loop."""


def calculon_a100(rows: Iterable[Mapping[str, str]]) -> tuple[Machine, Fabric]:
    """Read Calculon's constants of its `a100_80g` system.

    Parameters
    ----------
    rows : iterable of mapping
        Columns `system`, `field` and `value` as in `tests/data/calculon_a100_constants.csv`.

    Returns
    -------
    tuple of Machine and Fabric
        To be used with `PRACTICE`.
    """
    table = {row["field"]: row["value"] for row in rows if row["system"] == "a100_80g"}

    def numbers(start: str) -> list[float]:
        text = next(value for field, value in table.items() if field.startswith(start))
        return [float(x) for x in re.findall(r"[-+]?[\d.]+(?:e-?\d+)?", text)]

    def curve(start: str, unit: float) -> Curve:
        field = next(field for field in table if field.startswith(start))
        sizes = [float(x) * unit for x in re.findall(r"[\d.]+", field.partition("(")[2])]
        return Curve(tuple(reversed(sizes)), tuple(reversed(numbers(start))))

    machine = Machine(
        numbers("matrix fp16")[0] * 1e12,
        numbers("vector fp16")[0] * 1e12,
        numbers("HBM GB/s")[0] * 1e9,
        curve("matrix efficiency", 1e9),
        curve("vector efficiency", 1e9),
        curve("HBM efficiency", 1e6),
        overlap=False,
        head=False,
    )
    nets = [numbers(f"net{i} size") for i in (0, 1)]
    scales = []
    for i in (0, 1):
        reduce, r0, scatter, r1, gather, r2, send = numbers(f"net{i} scale")
        pairs = ((reduce, r0), (scatter, r1), (gather, r2), (send, 0.0), (gather, r2))
        names = ("all_reduce", "reduce_scatter", "all_gather", "send", "all_to_all")
        scales.append({name: Scale(*pair) for name, pair in zip(names, pairs, strict=True)})
    fabric = Fabric(
        tuple(int(net[0]) for net in nets),
        tuple(net[1] * 1e9 * net[2] for net in nets),
        (0.0, 0.0),
        nets[0][3],
        tuple(scales),
    )
    return machine, fabric
