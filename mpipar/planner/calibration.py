"""From a cluster's figures to a `Machine` and a `Fabric`, and six constants fitted to runs.

Without runs the constants are those of Calculon's A100 file (Isaev et al. 2023), with efficiency
written over the time an operation would take at peak, so that it carries over to other devices.
Constants fitted on one kind of run do not carry over to another (one node to many: errors above
ten times), so a calibration says where it comes from and a plan repeats it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mpipar.errors import CountOutOfRange
from mpipar.planner.configs import Configs
from mpipar.planner.fabric import Fabric
from mpipar.planner.machine import Curve, Machine
from mpipar.planner.spec import ModelSpec
from mpipar.planner.step import USUAL, Practice, step_time
from mpipar.topology.cluster import Cluster, NodeClass

Floats = NDArray[np.float64]

_MATRIX = ((0.0, 0.1), (1e9, 0.6), (16e9, 0.9), (128e9, 0.95))
_VECTOR = ((0.0, 0.1), (1e9, 0.5), (16e9, 0.95))
_MEMORY = ((0.0, 0.3), (1e6, 0.6), (10e6, 0.75), (100e6, 0.9))
_A100_FLOPS, _A100_BYTES = 312e12, 2039e9


@dataclass(frozen=True)
class Calibration:
    """Constants that runs can tell.

    Parameters
    ----------
    matrix, memory : float
        Efficiency of large matrix products, and of large moves.
    launch_s : float
        Time the host needs to start a layer's forward pass.
    inner, outer : float
        Bandwidth inside a node and between nodes over the cluster's figure.
    call_s : float
        Time of the smallest collective.
    source : str
        Where they come from.
    """

    matrix: float = 0.87
    memory: float = 0.9
    launch_s: float = 0.8e-3
    inner: float = 1.0
    outer: float = 1.0
    call_s: float = 20e-6
    source: str = (
        "published: efficiency curves of Calculon's A100 file, large products at 0.87 as the "
        "Selene runs of arXiv 2205.05198 tell, host time as small one-node vTrain runs show; "
        "assumed: time of the smallest collective"
    )


UNCALIBRATED = Calibration()
"""Published and assumed constants."""


def machine_of(node: NodeClass, calibration: Calibration = UNCALIBRATED) -> Machine:
    """A node class's device.

    Parameters
    ----------
    node : NodeClass
        With its peak and memory bandwidth.
    calibration : Calibration
        Constants.

    Returns
    -------
    Machine
        Efficiencies between the curve's points are straight in the logarithm of size.
    """
    peak = float(node.peak)
    moved = node.memory_gb_s.value * 1e9

    def curve(points: Sequence[tuple[float, float]], by: float, top: float) -> Curve:
        sizes, values = zip(*points, strict=True)
        scaled = tuple(top * value / values[-1] for value in values)
        return Curve(tuple(size * by for size in sizes), scaled, steps=False)

    return Machine(
        peak,
        peak / 4,
        moved,
        curve(_MATRIX, peak / _A100_FLOPS, calibration.matrix),
        curve(_VECTOR, peak / _A100_FLOPS, _VECTOR[-1][1]),
        curve(_MEMORY, moved / _A100_BYTES, calibration.memory),
        launch_s=calibration.launch_s,
        overlap=False,
    )


def fabric_of(cluster: Cluster, calibration: Calibration = UNCALIBRATED) -> Fabric:
    """A cluster's tiers, scaled by a calibration."""
    plain = Fabric.of(cluster, calibration.call_s)
    inner, *outer = plain.bytes_per_s
    scaled = (inner * calibration.inner, *(x * calibration.outer for x in outer))
    return replace(plain, bytes_per_s=scaled)


Runs = Sequence[tuple[ModelSpec, Configs, Floats]]
"""Measured runs: a model, its configurations, and the seconds of a step of each."""


def errors(cluster: Cluster, calibration: Calibration, runs: Runs, practice: Practice) -> Floats:
    """Relative errors of the predicted step times, run after run.

    Parameters
    ----------
    cluster : Cluster
        Where they ran.
    calibration : Calibration
        Constants.
    runs : sequence of (ModelSpec, Configs, array)
        Measured.
    practice : Practice
        What the loop did.

    Returns
    -------
    array
        Predicted over measured, less 1.
    """
    machine, fabric = machine_of(cluster.weakest, calibration), fabric_of(cluster, calibration)
    return np.concatenate(
        [
            step_time(spec, machine, fabric, configs, practice).total / seconds - 1
            for spec, configs, seconds in runs
        ]
    )


_FITTED = ("matrix", "memory", "launch_s", "inner", "outer", "call_s")


def calibrate(
    cluster: Cluster,
    runs: Runs,
    practice: Practice = USUAL,
    start: Calibration = UNCALIBRATED,
) -> Calibration:
    """Fit the constants to measured runs by a pattern search in their logarithms.

    Parameters
    ----------
    cluster : Cluster
        Where they ran.
    runs : sequence of (ModelSpec, Configs, array)
        Measured; ten or so already help.
    practice : Practice
        What the loop did.
    start : Calibration
        Where to start; a constant that the runs do not tell stays near it.

    Returns
    -------
    Calibration
        Its source says how many runs and the mean error on them.

    Raises
    ------
    CountOutOfRange
        Without a run.
    """
    n_runs = sum(len(seconds) for _, _, seconds in runs)
    if n_runs == 0:
        raise CountOutOfRange("runs to calibrate on", "1 or more", 0)

    def loss(trial: Calibration) -> float:
        away = [math.log(getattr(trial, k) / getattr(start, k)) ** 2 for k in _FITTED]
        found = errors(cluster, trial, runs, practice)
        return float(np.abs(np.log1p(found)).mean()) + 0.05 * float(np.mean(away))

    best = _pattern_search(loss, start)
    mean = float(np.abs(errors(cluster, best, runs, practice)).mean())
    return replace(best, source=f"measured: fitted to {n_runs} runs, mean error {mean:.1%} on them")


def _pattern_search(loss: Callable[[Calibration], float], start: Calibration) -> Calibration:
    best, least = start, loss(start)
    widths = dict.fromkeys(_FITTED, 0.3)
    for _ in range(40):
        moved = False
        for name in _FITTED:
            for sign in (1, -1):
                value = getattr(best, name) * math.exp(sign * widths[name])
                if name in ("matrix", "memory"):
                    value = min(value, 1.0)
                trial = replace(best, **{name: value})
                found = loss(trial)
                if found < least - 1e-6:
                    best, least, moved = trial, found, True
                    widths[name] *= 1.3
                    break
            else:
                widths[name] *= 0.6
        if not moved and max(widths.values()) < 0.01:
            break
    return best
