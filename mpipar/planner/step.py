"""Time of a training step, over arrays of configurations.

A layer's compute is the sum of its operations (`compute`), its communication that of its axis'
group (`fabric`). The pipeline is the closed form ``m max_k t_k + sum of the other stages`` of 1F1B,
divided by the chunks where it is interleaved; the simulator of `pipeline_parallel` scores the best
ones again. Distinct sizes are few, so they are timed once and gathered.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpipar.planner.compute import ELEMENT, layer_time
from mpipar.planner.configs import FULL, SELECTIVE, ZB_H1, Configs
from mpipar.planner.fabric import Fabric, Group, axis_strides
from mpipar.planner.machine import Machine
from mpipar.planner.memory import stage_parameters
from mpipar.planner.spec import ModelSpec

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Practice:
    """What the training loop does besides the plan.

    Parameters
    ----------
    dp_overlap : float
        Share of the last microbatch's backward pass that hides gradient communication.
    cp_overlap : float
        Share of a layer's compute that hides the ring of keys and values.
    scatter_gather : bool
        A stage sends each tensor rank's share and gathers it in the node (Narayanan et al. 2021).
    gather_again : bool
        Under sequence parallelism the backward pass gathers its inputs again (arXiv 2205.05198).
    grad_bytes : int
        Bytes of a gradient on the wire.
    optimizer_bytes : int
        Bytes that the optimizer moves for each parameter.
    """

    dp_overlap: float = 0.5
    cp_overlap: float = 0.5
    scatter_gather: bool = True
    gather_again: bool = True
    grad_bytes: int = 2
    optimizer_bytes: int = 30


USUAL = Practice()
"""What `Practice` says when nothing is said."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step on the slowest rank, by kind; they add up to the step.

    Parameters
    ----------
    compute, recompute : array
        Forward and backward of its own microbatches; what recompute adds.
    tp, cp, ep, pp, dp : array
        Communication of each axis that is not hidden.
    bubble : array
        Waiting for other stages.
    optimizer : array
        The update.
    """

    compute: Floats
    recompute: Floats
    tp: Floats
    cp: Floats
    ep: Floats
    pp: Floats
    bubble: Floats
    dp: Floats
    optimizer: Floats

    @property
    def total(self) -> Floats:
        """The step."""
        total = self.compute
        for field in fields(self)[1:]:
            total = total + getattr(self, field.name)
        return total


def distinct(*columns: Any) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """First position of each distinct row of small whole numbers, and each row's place among them.

    Parameters
    ----------
    *columns : array of int
        Not negative; one entry a row.

    Returns
    -------
    tuple of arrays
        ``first`` and ``inverse`` with ``column[first][inverse] == column``. Counting instead of
        sorting: several times faster than `numpy.unique`.
    """
    key = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        column = np.asarray(column, np.int64)
        seen = np.zeros(int(column.max()) + 1, np.bool_)
        seen[column] = True
        place = np.cumsum(seen) - 1
        key = key * int(place[-1] + 1) + place[column]
        seen = np.zeros(int(key.max()) + 1, np.bool_)
        seen[key] = True
        key = (np.cumsum(seen) - 1)[key]
    first = np.zeros(int(key.max()) + 1, np.int64)
    first[key] = np.arange(len(key))
    return first, key


def step_time(
    spec: ModelSpec,
    machine: Machine,
    fabric: Fabric,
    configs: Configs,
    practice: Practice = USUAL,
) -> StepTime:
    """Time a step of each configuration.

    Parameters
    ----------
    spec : ModelSpec
        The model.
    machine : Machine
        One device.
    fabric : Fabric
        The network.
    configs : Configs
        Any number.
    practice : Practice
        What the loop does.

    Returns
    -------
    StepTime
        Arrays as long as `configs`.
    """
    strides = axis_strides(configs)
    layer = layer_parts(spec, machine, fabric, configs, practice, strides)
    return _assemble(spec, machine, fabric, configs, strides, layer, practice)


def layer_parts(
    spec: ModelSpec,
    machine: Machine,
    fabric: Fabric,
    configs: Configs,
    practice: Practice,
    strides: dict[str, Any] | None = None,
) -> dict[str, Floats]:
    """Seconds of one layer and one microbatch by kind, and of the head.

    Parameters
    ----------
    spec, machine, fabric, configs, practice
        As in `step_time`.
    strides : dict of str to array, optional
        Of `axis_strides`, where they are known.

    Returns
    -------
    dict of str to array
        ``forward backward again tp cp ep head``, as long as `configs`.
    """
    strides = strides or axis_strides(configs)
    columns = (configs.tp, configs.micro, configs.cp, configs.ep, configs.sp, configs.recompute)
    first, place = distinct(
        *columns, strides["tp"], strides["cp"], np.minimum(strides["dp"], strides["cp"])
    )
    near = {axis: stride[first] for axis, stride in strides.items()}
    parts = _layer_parts(spec, machine, fabric, configs[first], near, practice)
    return {name: part[place] for name, part in parts.items()}


def _layer_parts(
    spec: ModelSpec,
    machine: Machine,
    fabric: Fabric,
    own: Configs,
    strides: dict[str, Any],
    practice: Practice,
) -> dict[str, Floats]:
    """Seconds of one layer and one microbatch by kind, for distinct sizes."""
    t, cp = own.tp, own.cp
    times = layer_time(spec, machine, own.micro, t, cp, own.sp)
    full, selective = own.recompute == FULL, own.recompute == SELECTIVE
    again = np.where(full, times.forward, np.where(selective, times.again, 0.0))
    elements = own.micro * spec.sequence / cp * spec.width
    tp_f, tp_b = _tensor_times(machine, fabric.group(t, strides["tp"]), own, elements, practice)
    hidden = practice.cp_overlap * times.forward
    kv = ELEMENT * 2 * elements / spec.width * spec.kv_width / np.minimum(t, spec.kv_heads)
    ring = (cp - 1) * fabric.hop(strides["cp"]).time("send", kv) * (cp > 1)
    cp_f, cp_b = np.maximum(0, ring - hidden), np.maximum(0, 2 * ring - 2 * hidden)
    routed = ELEMENT * elements * spec.n_active / t
    experts = fabric.group(own.ep, np.minimum(strides["dp"], strides["cp"]))
    ep = 2 * experts.time("all_to_all", routed) * (spec.n_experts > 1)
    busy_f = times.forward + tp_f + cp_f + ep
    busy_b = times.backward + again + tp_b + cp_b + ep * (1 + full)
    return {
        "forward": times.forward + machine.waiting(busy_f, 1.0),
        "backward": times.backward + machine.waiting(busy_b, 2.0 + full),
        "again": again,
        "tp": tp_f + tp_b,
        "cp": cp_f + cp_b + cp_f * full,
        "ep": ep * (2 + full),
        "head": times.head_forward + times.head_backward,
    }


def _tensor_times(
    machine: Machine, group: Group, own: Configs, elements: Floats, practice: Practice
) -> tuple[Floats, Floats]:
    """Two all-reduces each way, or under sequence parallelism their two halves."""
    n_bytes = ELEMENT * elements
    several = group.degree > 1
    adding = elements * (1 - 1 / group.degree)
    copying = np.where(several, machine.busy(False, 0.0, 2 * n_bytes), 0.0)
    reducing = np.where(several, machine.busy(False, adding, 2 * n_bytes), 0.0)
    whole = group.time("all_reduce", n_bytes) + reducing
    scatter = group.time("reduce_scatter", n_bytes) + reducing
    gather = group.time("all_gather", n_bytes) + copying
    full = own.recompute == FULL
    redo = practice.gather_again & ~full
    forward = np.where(own.sp, 2 * (scatter + gather), 2 * whole)
    backward = np.where(own.sp, 2 * (scatter + gather) + 2 * gather * redo, 2 * whole)
    return forward, backward + np.where(full, forward, 0.0)


def _assemble(
    spec: ModelSpec,
    machine: Machine,
    fabric: Fabric,
    configs: Configs,
    strides: dict[str, Any],
    layer: dict[str, Floats],
    practice: Practice,
) -> StepTime:
    p, m, v = configs.pp, configs.n_micro, configs.chunks
    most = np.ceil(spec.n_layers / p)
    send = send_time(spec, fabric, configs, practice, strides)
    one_layer = sum(layer[k] for k in ("forward", "backward", "again", "tp", "cp", "ep"))
    head = layer["head"]
    last = np.floor(spec.n_layers / p) * one_layer + head
    longest = np.maximum(most * one_layer, last)
    others = spec.n_layers * one_layer + head - longest
    zb = configs.schedule == ZB_H1
    weight_grad = layer["backward"] / 2
    saved = np.where(zb, 2 * weight_grad * most * (p - 1), 0.0)
    short = np.where((v > 1) & (m % p > 0), (p - m % p) * (v - 1) * longest / v, 0.0)
    bubble = (others + (p - 1) * 2 * send * v - saved) / v + short
    waiting = m * (longest - most * one_layer)
    dp, optimizer = _after(spec, machine, fabric, configs, strides, most, layer, practice)
    return StepTime(
        compute=m * (most * (layer["forward"] + layer["backward"])),
        recompute=m * most * layer["again"],
        tp=m * most * layer["tp"],
        cp=m * most * layer["cp"],
        ep=m * most * layer["ep"],
        pp=m * v * 2 * send,
        bubble=np.where(p > 1, bubble, 0.0) + waiting,
        dp=dp,
        optimizer=optimizer,
    )


def send_time(
    spec: ModelSpec,
    fabric: Fabric,
    configs: Configs,
    practice: Practice,
    strides: dict[str, Any] | None = None,
) -> Floats:
    """Seconds of one activation to the next stage.

    Parameters
    ----------
    spec, fabric, configs, practice
        As in `step_time`.
    strides : dict of str to array, optional
        Of `axis_strides`, where they are known.

    Returns
    -------
    array
        0 where there is one stage.
    """
    strides = strides or axis_strides(configs)
    first, place = distinct(
        strides["pp"], configs.micro, configs.cp, configs.tp, configs.sp, configs.pp > 1
    )
    own = configs[first]
    n_bytes = ELEMENT * own.micro * spec.sequence / own.cp * spec.width
    split = own.tp if practice.scatter_gather else np.where(own.sp, own.tp, 1)
    wire = fabric.hop(strides["pp"][first]).time("send", n_bytes / split)
    gathered = np.where(own.sp | (split == 1), 0.0, 1.0)
    wire = wire + gathered * fabric.group(own.tp, strides["tp"][first]).time("all_gather", n_bytes)
    return np.asarray(np.where(own.pp > 1, wire, 0.0)[place])


def _both_axes(
    fabric: Fabric, configs: Configs, strides: dict[str, Any], volume: Floats
) -> tuple[Floats, Floats]:
    """All-reduce, and half of it, over dp and cp: the inner axis first, its share on the outer."""
    whole = half = np.zeros(1)
    dp_inside = strides["dp"] < strides["cp"]
    for axis, inside in (
        ("dp", np.where(dp_inside, 1, configs.cp)),
        ("cp", np.where(dp_inside, configs.dp, 1)),
    ):
        degree = getattr(configs, axis)
        first, place = distinct(degree, strides[axis])
        group = fabric.group(degree[first], strides[axis][first])
        for op in ("all_reduce", "reduce_scatter"):
            call = group.time(op, 0)
            per_byte = ((group.time(op, 1e9) - call) / 1e9)[place]
            time = call[place] + per_byte * (volume / inside)
            if op == "all_reduce":
                whole = whole + time
            else:
                half = half + time
    return whole, half


def _after(
    spec: ModelSpec,
    machine: Machine,
    fabric: Fabric,
    configs: Configs,
    strides: dict[str, Any],
    most: Floats,
    layer: dict[str, Floats],
    practice: Practice,
) -> tuple[Floats, Floats]:
    """Gradient communication that the last backward pass does not hide, and the update.

    ZeRO (Rajbhandari et al. 2020): stages 0 and 1 move 2 n bytes a step (all-reduce, or
    reduce-scatter and all-gather), stage 2 reduces after every microbatch, stage 3 also gathers
    the weights twice for each.
    """
    dense, expert = stage_parameters(spec, configs, most, False, True)
    n = dense + expert
    m, zero = configs.n_micro, configs.zero
    ranks = configs.dp * configs.cp
    volume = n * practice.grad_bytes
    whole, half = _both_axes(fabric, configs, strides, volume)
    halves = np.where(zero == 3, 3 * m, np.where(zero == 2, m + 1, 2)) * half
    moving = np.where(zero == 0, whole, halves)
    window = practice.dp_overlap * most * (layer["backward"] + layer["again"])
    window = window * np.where(zero >= 2, m, 1)
    shared = np.where(zero >= 1, ranks, 1)
    update = machine.busy(False, 11 * n / shared, practice.optimizer_bytes * n / shared)
    return np.maximum(0.0, moving - window), update
