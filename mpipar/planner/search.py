"""The search: every valid configuration, priced in blocks that stay in the cache.

A *layout* fixes degrees, microbatch and chunks; *modes* (recompute, ZeRO, sequence parallelism,
schedule, order of the axes) are crossed with each. Memory is computed for all, time for those that
fit; only the best are kept, so memory does not grow with the number of configurations.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpipar.planner.configs import AXES, ORDERS, SCHEDULES, Configs
from mpipar.planner.fabric import Fabric
from mpipar.planner.machine import Machine
from mpipar.planner.memory import Precision, stage_memory
from mpipar.planner.spec import ModelSpec
from mpipar.planner.step import USUAL, Practice, step_time
from mpipar.units.remainder import divisors

BLOCK = 1 << 18
"""Combinations of one block, of which about one in eight is a valid configuration."""


@dataclass(frozen=True)
class Choices:
    """What may be chosen. What `mpipar train` cannot run yet is still priced by default.

    Parameters
    ----------
    max_tp, max_pp, max_cp, max_micro, max_chunks : int
        Largest degrees, rows of a microbatch and chunks a stage.
    recompute, zero : sequence of int
        Modes of recompute and stages of ZeRO.
    sp : sequence of bool
        Sequence parallelism.
    schedules : sequence of int
        Indices into `SCHEDULES`.
    orders : sequence of int
        Indices into `ORDERS`.
    fixed : tuple of (str, int)
        Degrees that are given, such as ``(("tp", 8),)``.
    """

    max_tp: int = 128
    max_pp: int = 256
    max_cp: int = 64
    max_micro: int = 128
    max_chunks: int = 32
    recompute: Sequence[int] = (0, 1, 2)
    zero: Sequence[int] = (0, 1, 2, 3)
    sp: Sequence[bool] = (False, True)
    schedules: Sequence[int] = tuple(range(len(SCHEDULES)))
    orders: Sequence[int] = tuple(range(len(ORDERS)))
    fixed: tuple[tuple[str, int], ...] = ()


ALL = Choices()


def layouts(
    spec: ModelSpec, n_devices: int, batch: int, choices: Choices = ALL
) -> NDArray[np.int64]:
    """Every valid (tp, pp, dp, cp, ep, micro, n_micro, chunks), one a row.

    Parameters
    ----------
    spec : ModelSpec
        Heads and key-value heads are split exactly (key-value heads are copied beyond their
        number), layers are spread, a sequence is split exactly over 2 cp.
    n_devices, batch : int
        All devices; rows of the global batch, split exactly over dp.
    choices : Choices
        Limits.

    Returns
    -------
    array of int, shape (n, 8)
        Empty when nothing is valid.
    """
    fixed = dict(choices.fixed)

    def some(axis: str, candidates: Sequence[int]) -> list[int]:
        return [d for d in candidates if fixed.get(axis, d) == d]

    found = []
    for tp in some("tp", [d for d in divisors(n_devices) if d <= choices.max_tp]):
        kv = spec.kv_heads
        if spec.n_heads % tp or spec.ffn % tp or (kv % tp and tp % kv):
            continue
        rest = n_devices // tp
        for pp in some(
            "pp", [d for d in divisors(rest) if d <= min(choices.max_pp, spec.n_layers)]
        ):
            for cp in some("cp", [d for d in divisors(rest // pp) if d <= choices.max_cp]):
                dp = rest // pp // cp
                if batch % dp or (cp > 1 and spec.sequence % (2 * cp)) or not some("dp", [dp]):
                    continue
                found += _inside(spec, (tp, pp, dp, cp), batch // dp, choices, fixed)
    return np.array(found, np.int64).reshape(-1, 8)


def _inside(
    spec: ModelSpec, degrees: tuple[int, ...], rows: int, choices: Choices, fixed: dict[str, int]
) -> list[tuple[int, ...]]:
    _, pp, dp, cp = degrees
    eps = [e for e in divisors(math.gcd(spec.n_experts, dp * cp)) if fixed.get("ep", e) == e]
    micros = [b for b in divisors(rows) if b <= choices.max_micro and fixed.get("micro", b) == b]
    most = min(choices.max_chunks, spec.n_layers // pp) if pp > 1 else 1
    return [
        (*degrees, ep, micro, rows // micro, chunks)
        for ep, micro, chunks in product(eps, micros, range(1, most + 1))
    ]


def _modes(choices: Choices) -> NDArray[np.int64]:
    """All (recompute, zero, sp, schedule, order), one a row."""
    parts = (choices.recompute, choices.zero, choices.sp, choices.schedules, choices.orders)
    return np.array(list(product(*parts)), np.int64)


def _order_names(orders: Sequence[int]) -> NDArray[np.bool_]:
    """For each set of axes longer than 1 (as bits), which orders are the first of their kind."""
    fresh = np.zeros((2 ** len(AXES), len(ORDERS)), np.bool_)
    for mask in range(len(fresh)):
        seen = set()
        for i in orders:
            name = tuple(axis for axis in ORDERS[i] if mask >> AXES.index(axis) & 1)
            if name not in seen:
                seen.add(name)
                fresh[mask, i] = True
    return fresh


def blocks(
    spec: ModelSpec, n_devices: int, batch: int, choices: Choices = ALL, size: int = BLOCK
) -> Iterator[Configs]:
    """Every valid configuration once, about `size` at a time.

    Parameters
    ----------
    spec, n_devices, batch, choices
        As in `layouts`.
    size : int
        Rows of a block before the invalid ones are dropped.

    Yields
    ------
    Configs
        Combinations without effect (ZeRO on one replica, orders that place alike) are left out.
    """
    outer, modes = layouts(spec, n_devices, batch, choices), _modes(choices)
    fresh = _order_names(choices.orders)
    long = outer[:, [1, 2, 3, 0]] > 1
    bits = (long << np.arange(len(AXES))).sum(axis=1)
    recompute, zero, sp, schedule, order = modes.T
    for low in range(0, len(outer), max(1, size // len(modes))):
        part = slice(low, low + max(1, size // len(modes)))
        tp, pp, dp, cp, *_, chunks = (column[:, None] for column in outer[part].T)
        valid = (zero == 0) | (dp * cp > 1)
        valid &= (sp == 0) | (tp > 1)
        valid &= (schedule == 0) | ((pp > 1) & (chunks == 1))
        valid &= fresh[bits[part]][:, order]
        at, mode = np.nonzero(valid)
        if len(at):
            names = ("tp", "pp", "dp", "cp", "ep", "micro", "n_micro", "chunks")
            degrees: dict[str, Any] = dict(zip(names, outer[part][at].T, strict=True))
            yield Configs(
                **degrees,
                recompute=recompute[mode],
                zero=zero[mode],
                sp=sp[mode] > 0,
                schedule=schedule[mode],
                order=order[mode],
            )


@dataclass(frozen=True)
class Found:
    """What a search found.

    Parameters
    ----------
    configs : Configs
        The best, fastest first.
    seconds : array
        Their predicted steps.
    n_evaluated, n_fitting : int
        Configurations whose memory was computed, and those that fit and were timed.
    least_bytes : float
        Least memory of all configurations.
    leanest : Configs
        The one that needs it.
    """

    configs: Configs
    seconds: NDArray[np.float64]
    n_evaluated: int
    n_fitting: int
    least_bytes: float
    leanest: Configs


def peak_bytes(spec: ModelSpec, configs: Configs, precision: Precision) -> NDArray[np.float64]:
    """Bytes of the fullest rank of the first and the last stage."""
    first = stage_memory(spec, configs, precision, "first").total
    if (configs.pp == 1).all():
        return first
    return np.maximum(first, stage_memory(spec, configs, precision, "last").total)


def search(
    spec: ModelSpec,
    machine: Machine,
    fabric: Fabric,
    n_devices: int,
    batch: int,
    capacity_bytes: float,
    precision: Precision,
    choices: Choices = ALL,
    practice: Practice = USUAL,
    keep: int = 64,
) -> Found:
    """Price every valid configuration and keep the fastest that fit.

    Parameters
    ----------
    spec, machine, fabric, precision, practice
        The model, the machine and what the loop does.
    n_devices, batch : int
        Devices, all used, and rows of the global batch.
    capacity_bytes : float
        Memory that one rank may use.
    choices : Choices
        Limits.
    keep : int
        How many layouts to keep, each with its best modes.

    Returns
    -------
    Found
        Empty `configs` when nothing fits; ties go to what was enumerated first.
    """
    best: list[tuple[float, int, Configs]] = []
    n_evaluated = n_fitting = 0
    least, leanest = math.inf, Configs.of()
    for block in blocks(spec, n_devices, batch, choices):
        n_bytes = peak_bytes(spec, block, precision)
        smallest = int(n_bytes.argmin())
        if n_bytes[smallest] < least:
            least, leanest = float(n_bytes[smallest]), block[smallest]
        fits = np.flatnonzero(n_bytes <= capacity_bytes)
        n_fitting += len(fits)
        if len(fits):
            timed = block[fits]
            seconds = step_time(spec, machine, fabric, timed, practice).total
            limit = best[-1][0] if len(best) >= keep else math.inf
            for i in _first_of_layouts(timed, seconds, limit, keep):
                best.append((float(seconds[i]), n_evaluated + int(fits[i]), timed[i]))
            best = _distinct(best)[:keep]
        n_evaluated += len(block)
    joined = {
        f.name: np.concatenate([getattr(c, f.name) for _, _, c in best])
        for f in fields(Configs)
        if best
    }
    chosen = Configs(**joined) if best else Configs.of()[[]]
    times = np.array([seconds for seconds, _, _ in best])
    return Found(chosen, times, n_evaluated, n_fitting, least, leanest)


def _first_of_layouts(
    configs: Configs, seconds: NDArray[np.float64], limit: float, keep: int
) -> list[int]:
    """Positions of the fastest configuration of each set of degrees, below a limit."""
    under = np.flatnonzero(seconds < limit)
    if not len(under):
        return []
    order = under[np.argsort(seconds[under], kind="stable")]
    degrees = np.stack([configs.tp, configs.pp, configs.cp, configs.ep], axis=1)[order]
    firsts = np.unique(degrees, axis=0, return_index=True)[1]
    return [int(i) for i in order[np.sort(firsts)][:keep]]


def _distinct(best: list[tuple[float, int, Configs]]) -> list[tuple[float, int, Configs]]:
    seen, kept = set(), []
    for item in sorted(best, key=lambda x: x[:2]):
        key = tuple(int(getattr(item[2], k)[0]) for k in ("tp", "pp", "dp", "cp", "ep"))
        if key not in seen:
            seen.add(key)
            kept.append(item)
    return kept
