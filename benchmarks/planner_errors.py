"""How far the planner is from every published row, beside Calculon's own errors.

Run from the repository root: ``python benchmarks/planner_errors.py [--data tests/data]``. Rows are
predicted with the default constants ("uncalibrated": two of them, the efficiency of large products
and the host's time, were read off the Selene rows and the small one-node vTrain rows; the rule for
groups that share nodes off the residuals of the multi-node rows), with Calculon's constants where
Calculon predicts them too, and, for the vTrain runs, with six constants fitted to a fifth of the
rows and judged on the others. *Regret* is how much slower the listed plan that is ranked first ran
than the fastest of its group.
"""

from __future__ import annotations

import argparse
import csv
from dataclasses import replace
from pathlib import Path

import numpy as np

from mpipar.planner.calculon import PRACTICE as CALCULON
from mpipar.planner.calculon import calculon_a100
from mpipar.planner.calibration import (
    UNCALIBRATED,
    calibrate,
    errors,
    fabric_of,
    machine_of,
)
from mpipar.planner.configs import Configs
from mpipar.planner.spec import gpt
from mpipar.planner.step import Practice, step_time
from mpipar.topology import PRESETS
from mpipar.topology.cluster import Figure, Tier

VTRAIN = Practice(dp_overlap=0.0)
SHAPES = {
    "megatron-22B": (48, 6144, 64),
    "gpt3-175B": (96, 12288, 96),
    "turing-530B": (105, 20480, 128),
    "megatron-1T": (128, 25600, 160),
}


def rows(path):
    return list(csv.DictReader(path.read_text().splitlines()))


def vtrain_cluster():
    """The machine of the vTrain runs: DGX A100 boxes with 800 Gb/s a node."""
    preset = PRESETS["dgx-a100"]
    inside, outside = preset.tiers
    network = Tier(outside.name, outside.n_devices, Figure(12.5), outside.latency_us, Figure(0.9))
    return type(preset)("vtrain", preset.nodes, (inside, network))


def vtrain_groups(table):
    """Runs of one model each, with positions in the table; multi-node, all its plans compete."""
    found = {}
    for i, row in enumerate(table):
        model = tuple(int(row[k]) for k in ("layers", "hidden", "heads", "seq"))
        found.setdefault(model, []).append(i)
    for model, places in found.items():
        names = {"tp": "tp", "pp": "pp", "dp": "dp", "micro": "micro_batch"}
        columns = {k: np.array([int(table[i][v]) for i in places]) for k, v in names.items()}
        batch = np.array([int(table[i]["global_batch"]) for i in places])
        columns["n_micro"] = batch // (columns["dp"] * columns["micro"])
        seconds = np.array([float(table[i]["iteration_ms"]) for i in places]) * 1e-3
        yield gpt("vtrain", *model), Configs.of(recompute=2, **columns), seconds, np.array(places)


def only(groups, keep):
    return [
        (spec, configs[mask], seconds[mask])
        for spec, configs, seconds, places in groups
        for mask in [np.flatnonzero(np.isin(places, keep))]
        if mask.size
    ]


def line(name, found):
    size = np.abs(found)
    print(
        f"{name:44} rows {len(size):4d}  mean {size.mean():6.1%}  median {np.median(size):6.1%}"
        f"  worst {size.max():6.1%}  bias {found.mean():+6.1%}"
    )


def selene(data):
    print("selene_batch_time: seconds a step")
    machine, fabric = calculon_a100(rows(data / "calculon_a100_constants.csv"))
    cluster = PRESETS["dgx-a100"]
    ours, theirs, plain, between = [], [], [], []
    for row in rows(data / "selene_batch_time.csv"):
        selective = row["mode"] == "seqsel"
        names = (("tp", "tp"), ("pp", "pp"), ("dp", "dp"), ("micro", "microbatch"))
        values = {ours: int(row[their]) for ours, their in (*names, ("chunks", "interleave"))}
        mode = {"sp": selective, "recompute": 1 if selective else 2}
        configs = Configs.of(int(row["global_batch"]), **values, **mode)
        spec = gpt(row["model"], *SHAPES[row["model"]])
        measured, printed = float(row["measured_s"]), float(row["calculon_s"])
        with_theirs = step_time(spec, machine, fabric, configs, CALCULON).total[0]
        own = step_time(
            spec, machine_of(cluster.weakest), fabric_of(cluster), configs, Practice()
        ).total[0]
        ours.append(with_theirs / measured - 1)
        between.append(with_theirs / printed - 1)
        plain.append(own / measured - 1)
        theirs.append(float(row["err_pct"]) / 100)
        print(
            f"  {row['model']:14}{row['mode']:8} measured {measured:6.2f}  calculon {printed:6.2f} "
            f"({theirs[-1]:+.1%})  mpipar with its constants {with_theirs:6.2f} "
            f"({between[-1]:+.2%} from it)  uncalibrated {own:6.2f} ({plain[-1]:+.1%})"
        )
    line("  Calculon", np.array(theirs))
    line("  mpipar with Calculon's constants", np.array(ours))
    line("  mpipar uncalibrated", np.array(plain))


def vtrain(data, name, regret):
    table = rows(data / "vtrain" / f"{name}_node_given.csv")
    groups, cluster = list(vtrain_groups(table)), vtrain_cluster()
    everything = np.arange(len(table))
    print(f"vtrain {name} node")
    line("  uncalibrated", errors(cluster, UNCALIBRATED, only(groups, everything), VTRAIN))
    calibrations = []
    for fold in range(5):
        chosen = everything[everything % 5 == fold]
        calibrations.append(calibrate(cluster, only(groups, chosen), VTRAIN))
        others = only(groups, everything[everything % 5 != fold])
        line(
            f"  calibrated on {len(chosen)} rows (fold {fold}), others",
            errors(cluster, calibrations[-1], others, VTRAIN),
        )
    for title, used in (
        [("uncalibrated", UNCALIBRATED)]
        + [(f"calibrated on fold {i}", c) for i, c in enumerate(calibrations)]
        if regret
        else []
    ):
        machine, fabric = machine_of(cluster.weakest, used), fabric_of(cluster, used)
        lost = []
        for spec, configs, seconds, _ in groups:
            predicted = step_time(spec, machine, fabric, configs, VTRAIN).total
            lost.append(seconds[predicted.argmin()] / seconds.min() - 1)
        print(
            f"  regret, {title:22} {'  '.join(f'{x:.1%}' for x in lost)}"
            f"  mean {np.mean(lost):.1%} worst {max(lost):.1%}"
        )


def weak_scaling(data):
    """Tables that do not name the microbatch: the best one is taken."""
    for name, preset, sequence, vocabulary, peak in (
        ("megatron_sc21_weak_scaling", "dgx-a100", 2048, 51200, "derived_iter_s"),
        ("megatron_h100_weak_scaling", "dgx-h100", 4096, 131072, None),
    ):
        cluster = PRESETS[preset]
        machine, fabric = machine_of(cluster.weakest), fabric_of(cluster)
        found = []
        for row in rows(data / f"{name}.csv"):
            spec = gpt("row", int(row["L"]), int(row["h"]), int(row["heads"]), sequence, vocabulary)
            if not peak:
                spec = replace(spec, flash=True, dropout=False, tied=False, positions=False)
            t, p, batch, gpus = (int(row[k]) for k in ("t", "p", "batch", "gpus"))
            d = gpus // (t * p)
            micro = np.array([b for b in (1, 2, 4, 8) if batch // d % b == 0])
            mode = {"recompute": 2} if peak else {"recompute": 1, "sp": True}
            configs = Configs.of(batch, tp=t, pp=p, dp=d, micro=micro, **mode)
            seconds = step_time(spec, machine, fabric, configs).total.min()
            flops = float(spec.step_flops(batch, "full" if peak else "none"))
            measured = flops / (gpus * float(row["tflops_gpu"]) * 1e12)
            found.append(seconds / measured - 1)
        line(f"{name}, uncalibrated", np.array(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("tests/data"))
    parser.add_argument("--regret", action="store_true", help="also rank the listed plans")
    arguments = parser.parse_args()
    selene(arguments.data)
    weak_scaling(arguments.data)
    vtrain(arguments.data, "multi", arguments.regret)
    vtrain(arguments.data, "single", False)


if __name__ == "__main__":
    main()
