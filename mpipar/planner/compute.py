"""Time of one layer on one rank: every operation of its forward and backward pass, one by one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpipar.planner.machine import Machine
from mpipar.planner.spec import ModelSpec

Floats = NDArray[np.float64]
ELEMENT = 2
"""Bytes of an activation or a weight in 16 bits."""


@dataclass(frozen=True)
class Operation:
    """One kernel, or a few equal ones, of a layer.

    Parameters
    ----------
    name : str
        Which.
    is_matrix : bool
        Runs on the matrix units.
    forward : tuple
        FLOPs and bytes of the forward kernel.
    backward : tuple of tuple
        The same for each backward kernel.
    count : int
        How many equal kernels.
    again : bool
        Computed again under selective recompute.
    """

    name: str
    is_matrix: bool
    forward: tuple[Any, Any]
    backward: tuple[tuple[Any, Any], ...]
    count: int = 1
    again: bool = False


def _linear(name: str, tokens: Any, n_in: Any, n_out: Any, count: int = 1) -> Operation:
    one = (2 * tokens * n_in * n_out, ELEMENT * (tokens * (n_in + n_out) + n_in * n_out))
    return Operation(name, True, one, (one, one), count)


def _attention(name: str, rows: Any, s_q: Any, s: Any, d: Any, out: Any, again: bool) -> Operation:
    flops = 2 * rows * s_q * s * d
    n_in = rows * (s_q + s) * d if out == "scores" else rows * (s_q * s + s * d)
    n_out = rows * s_q * (s if out == "scores" else d)
    n_bytes = ELEMENT * (n_in + n_out)
    return Operation(name, True, (flops, n_bytes), ((2 * flops, n_bytes),), again=again)


def _pointwise(
    name: str, size: Any, forward: tuple[float, float], *backward: tuple[float, float], **other: Any
) -> Operation:
    """FLOPs an element and elements moved an element, for each pass."""
    passes = [(flops * size, ELEMENT * moved * size) for flops, moved in (forward, *backward)]
    return Operation(name, False, passes[0], tuple(passes[1:]), **other)


def layer_operations(
    spec: ModelSpec, micro: Any, tp: Any, cp: Any = 1, sp: Any = False
) -> tuple[Operation, ...]:
    """Every operation of one layer over one microbatch, on one rank.

    Parameters
    ----------
    spec : ModelSpec
        The model.
    micro, tp, cp : int or array
        Rows of a microbatch; degrees.
    sp : bool or array
        Sequence parallelism.

    Returns
    -------
    tuple of Operation
        In order; sizes broadcast over the arrays given.
    """
    h, s, d = spec.width, spec.sequence, spec.width // spec.n_heads
    micro, tp, cp = (np.asarray(x, np.float64) for x in (micro, tp, cp))
    tokens, heads = micro * s / cp, spec.n_heads / tp
    kv = spec.kv_width / np.minimum(tp, spec.kv_heads)
    act = tokens * h
    act_sp = act / np.where(sp, tp, 1)
    scores = micro * heads * s * s / cp
    norm = _pointwise("norm", act_sp, (9, 2), (14, 2), (7, 2), count=2)
    residual = _pointwise("residual", act_sp, (1, 3), (2, 3), count=2)
    fork = _pointwise("fork", act_sp, (0, 0), (2, 3), count=2)
    qkv_fork = _pointwise("qkv fork", act, (0, 0), (3, 4))
    dropout = [_pointwise("dropout", act_sp, (1, 2.5), (1, 2.5), count=2)] if spec.dropout else []
    if spec.flash:
        core = [_flash(micro * heads, s / cp, s, d)]
    else:
        core = [
            _attention("scores", micro * heads, s / cp, s, d, "scores", True),
            _pointwise("softmax", scores, (5, 2), (8, 2), again=True),
            _attention("values", micro * heads, s / cp, s, d, "values", False),
        ]
        if spec.dropout:
            core.insert(2, _pointwise("score dropout", scores, (1, 2.5), (1, 2.5), again=True))
    return (
        fork,
        norm,
        qkv_fork,
        _linear("query", tokens, h, h / tp),
        _linear("key, value", tokens, h, kv, 2),
        *core,
        _linear("projection", tokens, h / tp, h),
        residual,
        *dropout,
        *_feed_forward(spec, tokens, tp),
    )


def _flash(rows: Any, s_q: Any, s: Any, d: Any) -> Operation:
    """Dao et al. 2022: scores never reach memory; the backward pass computes them again."""
    flops, n_bytes = 4 * rows * s_q * s * d, ELEMENT * rows * (2 * s_q + 2 * s) * d
    return Operation("flash attention", True, (flops, n_bytes), ((2.5 * flops, 2 * n_bytes),))


def _feed_forward(spec: ModelSpec, tokens: Any, tp: Any) -> list[Operation]:
    n_experts = np.minimum(spec.n_active, spec.n_experts)
    rows, f = tokens * n_experts, spec.ffn / tp
    if spec.gated:
        return [
            _linear("up, gate", rows, spec.width, f, 2),
            _pointwise("silu", rows * f, (9, 3), (14, 5)),
            _linear("down", rows, f, spec.width),
        ]
    return [
        _linear("up", rows, spec.width, f),
        _pointwise("gelu", rows * f, (8, 2), (13, 2)),
        _linear("down", rows, f, spec.width),
    ]


def _total(machine: Machine, operations: tuple[Operation, ...], part: str) -> Floats:
    total = np.zeros(1)
    for op in operations:
        if part != "again" or op.again:
            passes = op.backward if part == "backward" else (op.forward,)
            for flops, n_bytes in passes:
                total = total + op.count * machine.busy(op.is_matrix, flops, n_bytes)
    return total


@dataclass(frozen=True)
class LayerTime:
    """Seconds of one layer over one microbatch, without communication.

    Parameters
    ----------
    forward, backward, again : array
        Forward, backward, and the part that selective recompute computes again.
    head_forward, head_backward : array
        Of the head and its loss on the last stage.
    """

    forward: Floats
    backward: Floats
    again: Floats
    head_forward: Floats
    head_backward: Floats


def layer_time(
    spec: ModelSpec, machine: Machine, micro: Any, tp: Any, cp: Any = 1, sp: Any = False
) -> LayerTime:
    """Time one layer and the head.

    Parameters
    ----------
    spec : ModelSpec
        The model.
    machine : Machine
        The device.
    micro, tp, cp, sp : number or array
        As in `layer_operations`.

    Returns
    -------
    LayerTime
        Arrays as long as the inputs broadcast together.
    """
    layer = layer_operations(spec, micro, tp, cp, sp)
    tokens = np.asarray(micro, np.float64) * spec.sequence / cp
    rows = np.ceil(spec.vocabulary / np.asarray(tp, np.float64))
    # The loss of vocabulary-parallel logits is not fused: about 50 bytes of traffic a logit.
    head: tuple[Operation, ...] = (
        _linear("head", tokens, spec.width, rows),
        _pointwise("loss", tokens * rows, (6, 18), (3, 7)),
    )
    if not machine.head:
        head = ()
    return LayerTime(
        _total(machine, layer, "forward"),
        _total(machine, layer, "backward"),
        _total(machine, layer, "again"),
        _total(machine, head, "forward"),
        _total(machine, head, "backward"),
    )
