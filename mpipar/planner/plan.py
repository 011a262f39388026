"""Plans: the recommended configuration with its reasons, as a value.

Every fast layout of the search is scored again by the pipeline simulator. What `mpipar train`
cannot run yet is priced and marked so, and never recommended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from mpipar.errors import LayoutError
from mpipar.planner.calibration import UNCALIBRATED, Calibration, fabric_of, machine_of
from mpipar.planner.configs import ORDERS, RECOMPUTE, SCHEDULES, Configs
from mpipar.planner.memory import MIXED, Memory, Precision, stage_memory
from mpipar.planner.option import RUNNABLE, Option, not_runnable
from mpipar.planner.rescore import simulated_seconds
from mpipar.planner.search import ALL, Choices, Found, blocks, layouts, peak_bytes, search
from mpipar.planner.spec import ModelSpec
from mpipar.planner.step import USUAL, Practice, StepTime, step_time
from mpipar.topology.cluster import Cluster

USABLE = 0.92
"""Share of a device's memory that a plan may fill; the rest is for contexts and fragments."""
RESCORED = 16


@dataclass(frozen=True)
class Plan:
    """What to run, and what was compared.

    Parameters
    ----------
    model : ModelSpec
        The model.
    cluster : str
        Name of the machine.
    n_devices, batch : int
        Devices and rows of the global batch.
    options : tuple of Option
        What can run, fastest first, each of another layout; empty when nothing that fits can run.
    priced : tuple of Option
        The fastest of all, those that cannot run yet included.
    n_evaluated, n_fitting : int
        Configurations compared, and those that fit.
    capacity_bytes : float
        Memory that a rank may fill.
    order_gain : float
        Speed-up of the first option by its order of axes over the default order.
    flops : float
        FLOPs of the model in one step.
    peak_flops_per_s : float
        Of all devices.
    source : str
        Provenance of the constants.
    """

    model: ModelSpec
    cluster: str
    n_devices: int
    batch: int
    options: tuple[Option, ...]
    priced: tuple[Option, ...]
    n_evaluated: int
    n_fitting: int
    capacity_bytes: float
    order_gain: float
    flops: float
    peak_flops_per_s: float
    source: str

    def to_mapping(self) -> dict[str, Any]:
        """The plan as plain values for JSON.

        Returns
        -------
        dict
            By field name, arrays as lists.
        """
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values["model"] = asdict(self.model)
        for name in ("options", "priced"):
            values[name] = [
                {f.name: _plain(getattr(o, f.name)) for f in fields(o)} for o in values[name]
            ]
        return values


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else value


@dataclass(frozen=True)
class Pricing:
    """Everything that pricing a configuration needs.

    Parameters
    ----------
    spec : ModelSpec
        The model.
    cluster : Cluster
        The devices, all used.
    precision : Precision
        Bytes of a parameter.
    calibration : Calibration
        Constants.
    practice : Practice
        What the loop does.
    """

    spec: ModelSpec
    cluster: Cluster
    precision: Precision = MIXED
    calibration: Calibration = UNCALIBRATED
    practice: Practice = USUAL

    @property
    def capacity_bytes(self) -> float:
        """Memory that a rank may fill."""
        return USABLE * int(self.cluster.weakest.memory)

    def time(self, configs: Configs) -> StepTime:
        """Closed form of configurations.

        Parameters
        ----------
        configs : Configs
            Any number.

        Returns
        -------
        StepTime
            Seconds by kind, an array a kind.
        """
        machine = machine_of(self.cluster.weakest, self.calibration)
        fabric = fabric_of(self.cluster, self.calibration)
        return step_time(self.spec, machine, fabric, configs, self.practice)

    def option(self, configs: Configs) -> Option:
        """Price one configuration in full.

        Parameters
        ----------
        configs : Configs
            Exactly one.

        Returns
        -------
        Option
            With the simulator's pipeline where there is one.
        """
        time = self.time(configs)
        row, total = configs.row(0), float(time.total[0])
        machine = machine_of(self.cluster.weakest, self.calibration)
        fabric = fabric_of(self.cluster, self.calibration)
        pipeline = simulated_seconds(self.spec, machine, fabric, configs, self.practice)
        tail = float(time.dp[0] + time.optimizer[0])
        memory = (
            stage_memory(self.spec, configs, self.precision, stage) for stage in ("first", "last")
        )
        first, last = (_kinds(part) for part in memory)
        kinds = _kinds(time)
        seconds = total if pipeline is None else pipeline + tail
        return Option(row, seconds, total, kinds, first, last, not_runnable(self.spec, row))

    def search(self, batch: int, choices: Choices) -> Found:
        """The fast path over all configurations.

        Parameters
        ----------
        batch : int
            Rows of the global batch.
        choices : Choices
            Limits.

        Returns
        -------
        Found
            The fastest layouts.
        """
        return search(
            self.spec,
            machine_of(self.cluster.weakest, self.calibration),
            fabric_of(self.cluster, self.calibration),
            self.cluster.n_devices,
            batch,
            self.capacity_bytes,
            self.precision,
            choices,
            self.practice,
        )


def _kinds(parts: StepTime | Memory) -> Mapping[str, float]:
    values = {f.name: float(np.ravel(getattr(parts, f.name))[0]) for f in fields(parts)}
    return MappingProxyType(values)


def make_plan(pricing: Pricing, batch: int, choices: Choices = ALL) -> Plan:
    """Search, score the best again, and say which to run.

    Parameters
    ----------
    pricing : Pricing
        Model, machine and constants.
    batch : int
        Rows of the global batch.
    choices : Choices
        Limits.

    Returns
    -------
    Plan
        With options that can run, and the fastest of all.

    Raises
    ------
    LayoutError
        If nothing is valid or nothing fits; the message says what binds and the smallest change
        that would do.
    """
    found = pricing.search(batch, choices)
    if found.n_evaluated == 0:
        raise LayoutError(_nothing_valid(pricing, batch, choices))
    if found.n_fitting == 0:
        raise LayoutError(_nothing_fits(pricing, batch, choices, found))
    priced = _scored(pricing, found)
    options: tuple[Option, ...] = ()
    if not not_runnable(pricing.spec, Configs.of().row(0)):
        limits = replace(choices, **RUNNABLE, max_tp=min(choices.max_tp, pricing.spec.kv_heads))
        scored = _scored(pricing, pricing.search(batch, limits))
        options = tuple(option for option in scored if not option.missing)
    best = (options or priced)[0]
    step = float(pricing.spec.step_flops(batch))
    return Plan(
        pricing.spec,
        pricing.cluster.name,
        pricing.cluster.n_devices,
        batch,
        options[:4],
        priced[:4],
        found.n_evaluated,
        found.n_fitting,
        pricing.capacity_bytes,
        _order_gain(pricing, best),
        step,
        float(pricing.cluster.weakest.peak) * pricing.cluster.n_devices,
        _provenance(pricing),
    )


def _provenance(pricing: Pricing) -> str:
    """Where the constants and the machine's figures come from."""
    origins = Counter(str(figure.origin) for figure in pricing.cluster.figures().values())
    figures = ", ".join(f"{n} {origin}" for origin, n in sorted(origins.items()))
    return f"{pricing.calibration.source}; figures of {pricing.cluster.name}: {figures}"


def _scored(pricing: Pricing, found: Found) -> tuple[Option, ...]:
    options = [pricing.option(found.configs[i]) for i in range(min(RESCORED, len(found.configs)))]
    return tuple(sorted(options, key=lambda option: option.seconds))


def _order_gain(pricing: Pricing, option: Option) -> float:
    """How much slower the same configuration is in the default order of axes."""
    values = {f.name: option.row[f.name] for f in fields(Configs)}
    values["recompute"] = RECOMPUTE.index(values["recompute"])
    values["schedule"] = SCHEDULES.index(values["schedule"])
    values["order"] = [0, ORDERS.index(values["order"])]
    default, chosen = pricing.time(Configs.of(**values)).total.tolist()
    return float(default / chosen - 1)


def _nothing_valid(pricing: Pricing, batch: int, choices: Choices) -> str:
    spec, n = pricing.spec, pricing.cluster.n_devices
    near = [
        f"batch={other}"
        for step in range(1, 65)
        for other in (batch - step, batch + step)
        if other > 0 and len(layouts(spec, n, other, choices))
    ]
    devices = [
        f"{other} devices"
        for other in range(n - 1, 0, -1)
        if len(layouts(spec, other, batch, choices))
    ][:1]
    would = " or ".join(near[:1] + devices) or "no batch within 64 and no fewer devices"
    return (
        f"{spec.name} with batch={batch} cannot be laid out exactly over {n} devices "
        f"(heads={spec.n_heads}, layers={spec.n_layers}); {would} would do"
    )


def _nothing_fits(pricing: Pricing, batch: int, choices: Choices, found: Found) -> str:
    """The leanest configuration, what fills it, and the least number of devices that would do."""
    spec, n, capacity = pricing.spec, pricing.cluster.n_devices, pricing.capacity_bytes
    stages = [stage_memory(spec, found.leanest, pricing.precision, s) for s in ("first", "last")]
    fullest = max((_kinds(memory) for memory in stages), key=lambda kinds: sum(kinds.values()))
    binds = max(fullest, key=lambda kind: fullest[kind])
    more = None
    step = min(n, pricing.cluster.tiers[0].n_devices)
    for wider in (*range(n + step, 8 * n + 1, max(step, n // 8 // step * step)), 16 * n, 64 * n):
        if not len(layouts(spec, wider, batch, choices)):
            continue
        if _least_bytes(pricing, wider, batch, choices) <= capacity:
            more = wider
            break
    gib, have = found.least_bytes / 2**30, int(pricing.cluster.weakest.memory) / 2**30
    would = [f"{more} devices" if more else "", f"devices with {gib / USABLE:.1f} GiB"]
    row = found.leanest.row(0)
    shape = " ".join(f"{k}={row[k]}" for k in ("tp", "pp", "dp", "cp", "micro", "zero"))
    return (
        f"{spec.name} does not fit {n} devices of {have:g} GiB (of which {capacity / 2**30:.1f} "
        f"may be used): the leanest of {found.n_evaluated} configurations ({shape}, recompute="
        f"{row['recompute']}) needs {gib:.1f} GiB a rank, most of it {binds} "
        f"({fullest[binds] / 2**30:.1f} GiB); {' or '.join(filter(None, would))} would do"
    )


def _least_bytes(pricing: Pricing, n_devices: int, batch: int, choices: Choices) -> float:
    lean = replace(choices, orders=(0,), schedules=(0,))
    return min(
        float(peak_bytes(pricing.spec, block, pricing.precision).min())
        for block in blocks(pricing.spec, n_devices, batch, lean)
    )
