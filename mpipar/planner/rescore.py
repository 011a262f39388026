"""The pipeline of one configuration, timed by the simulator of `pipeline_parallel`."""

from __future__ import annotations

from mpipar.pipeline_parallel.costs import Costs
from mpipar.pipeline_parallel.generate import build_schedule
from mpipar.pipeline_parallel.simulation import simulate
from mpipar.planner.configs import FULL, SCHEDULES, Configs
from mpipar.planner.fabric import Fabric
from mpipar.planner.machine import Machine
from mpipar.planner.spec import ModelSpec
from mpipar.planner.step import Practice, layer_parts, send_time
from mpipar.units.remainder import spread_sizes

MOST_ACTIONS = 2_000_000


def simulated_seconds(
    spec: ModelSpec, machine: Machine, fabric: Fabric, configs: Configs, practice: Practice
) -> float | None:
    """Makespan of one configuration's pipeline.

    Parameters
    ----------
    spec, machine, fabric, practice
        As in `step_time`.
    configs : Configs
        Exactly one.

    Returns
    -------
    float or None
        Seconds from the first forward to the last backward; None for one stage, for schedules
        that need a whole number of groups, and above `MOST_ACTIONS`.
    """
    p, m, v = (int(x[0]) for x in (configs.pp, configs.n_micro, configs.chunks))
    if p == 1 or 3 * p * m * v > MOST_ACTIONS or (v > 1 and m % p):
        return None
    layer = {
        k: float(x[0]) for k, x in layer_parts(spec, machine, fabric, configs, practice).items()
    }
    passes = 3 if configs.recompute[0] == FULL else 2
    moved = layer["tp"] + layer["cp"] + layer["ep"]
    ahead = layer["forward"] + moved / passes
    weight = layer["backward"] / 2
    back = weight + layer["again"] + moved * (1 - 1 / passes)
    sizes = spread_sizes(spec.n_layers, p * v)
    forward = [n * ahead * 1e6 for n in sizes]
    weights = [n * weight * 1e6 for n in sizes]
    inputs = [n * back * 1e6 for n in sizes]
    for part in (forward, inputs, weights):
        part[-1] += layer["head"] / 3 * 1e6
    hop = float(send_time(spec, fabric, configs, practice)[0]) * 1e6
    name = "interleaved" if v > 1 else SCHEDULES[int(configs.schedule[0])]
    schedule = build_schedule(name, p, m, n_chunks=v)
    costs = Costs(forward, inputs, weights, latency_us=hop)
    return float(simulate(schedule, costs).makespan) / 1e6
