import csv
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from mpipar.errors import CountOutOfRange
from mpipar.pipeline_parallel.costs import Costs
from mpipar.pipeline_parallel.generate import build_schedule
from mpipar.pipeline_parallel.simulation import simulate
from mpipar.planner.calculon import PRACTICE, calculon_a100
from mpipar.planner.calibration import UNCALIBRATED, calibrate, errors, fabric_of, machine_of
from mpipar.planner.configs import FULL, SELECTIVE, Configs
from mpipar.planner.fabric import Fabric, axis_strides
from mpipar.planner.rescore import simulated_seconds
from mpipar.planner.spec import MODELS, gpt
from mpipar.planner.step import Practice, distinct, layer_parts, step_time
from mpipar.topology import PRESETS
from mpipar.topology.cluster import Figure, Tier

DATA = Path(__file__).parents[1] / "data"
QUIET = Practice(dp_overlap=0.0)
SHAPES = {"megatron-22B": (48, 6144, 64), "turing-530B": (105, 20480, 128)}


def rows(name):
    return list(csv.DictReader((DATA / name).read_text().splitlines()))


def selene(row):
    selective = row["mode"] == "seqsel"
    names = (("tp", "tp"), ("pp", "pp"), ("dp", "dp"), ("micro", "microbatch"))
    values = {ours: int(row[theirs]) for ours, theirs in (*names, ("chunks", "interleave"))}
    mode = {"sp": selective, "recompute": SELECTIVE if selective else FULL}
    configs = Configs.of(int(row["global_batch"]), **values, **mode)
    return gpt(row["model"], *SHAPES[row["model"]]), configs


@pytest.mark.parametrize(
    "row", rows("selene_batch_time.csv"), ids=lambda r: r["model"] + "-" + r["mode"]
)
def test_with_calculons_constants_the_step_is_calculons(row):
    machine, fabric = calculon_a100(rows("calculon_a100_constants.csv"))
    spec, configs = selene(row)
    seconds = step_time(spec, machine, fabric, configs, PRACTICE).total[0]
    assert seconds == pytest.approx(float(row["calculon_s"]), rel=0.01)


def test_published_steps_are_predicted_better_than_by_calculon():
    cluster = PRESETS["dgx-a100"]
    machine, fabric = machine_of(cluster.weakest), fabric_of(cluster)
    table = rows("selene_batch_time.csv")
    ours = [
        abs(
            step_time(*(s := selene(row))[:1], machine, fabric, s[1]).total[0]
            / float(row["measured_s"])
            - 1
        )
        for row in table
    ]
    assert np.mean(ours) < np.mean([abs(float(row["err_pct"])) / 100 for row in table])


def vtrain(name):
    preset = PRESETS["dgx-a100"]
    inside, outside = preset.tiers
    card = Tier(outside.name, outside.n_devices, Figure(12.5), outside.latency_us, Figure(0.9))
    cluster = replace(preset, tiers=(inside, card))
    models = {}
    for row in rows(f"vtrain/{name}_node_given.csv"):
        model = tuple(int(row[k]) for k in ("layers", "hidden", "heads", "seq"))
        models.setdefault(model, []).append(row)
    runs = []
    for model, group in models.items():
        names = (("tp", "tp"), ("pp", "pp"), ("dp", "dp"), ("micro", "micro_batch"))
        columns = {k: np.array([int(row[their]) for row in group]) for k, their in names}
        batch = np.array([int(row["global_batch"]) for row in group])
        columns["n_micro"] = batch // (columns["dp"] * columns["micro"])
        seconds = np.array([float(row["iteration_ms"]) for row in group]) / 1e3
        runs.append((gpt("vtrain", *model), Configs.of(recompute=FULL, **columns), seconds))
    return cluster, runs


def test_uncalibrated_error_and_regret_over_many_nodes():
    cluster, runs = vtrain("multi")
    assert np.abs(errors(cluster, UNCALIBRATED, runs, QUIET)).mean() <= 0.15
    machine, fabric = machine_of(cluster.weakest), fabric_of(cluster)
    regrets = []
    for spec, configs, seconds in runs:
        first = step_time(spec, machine, fabric, configs, QUIET).total.argmin()
        regrets.append(seconds[first] / seconds.min() - 1)
    assert len(regrets) == 4
    assert np.mean(regrets) <= 0.05
    assert max(regrets) <= 0.09


@pytest.mark.slow
@pytest.mark.parametrize(("name", "most"), [("multi", 0.13), ("single", 0.12)])
def test_a_fifth_of_the_runs_calibrates_for_the_others(name, most):
    cluster, runs = vtrain(name)

    def part(keep):
        picked = []
        for spec, configs, seconds in runs:
            where = np.flatnonzero(keep(np.arange(len(seconds))))
            if len(where):
                picked.append((spec, configs[where], seconds[where]))
        return picked

    fitted = calibrate(cluster, part(lambda i: i % 5 == 0), QUIET)
    assert "fitted to" in fitted.source
    found = errors(cluster, fitted, part(lambda i: i % 5 > 0), QUIET)
    assert np.abs(found).mean() <= most


def test_calibration_finds_constants_again():
    cluster = PRESETS["dgx-a100"]
    spec = gpt("x", 24, 2048, 16)
    configs = Configs.of(64, tp=[1, 2, 4, 8, 1, 2], dp=[8, 4, 2, 1, 8, 4], micro=[1, 1, 2, 4, 8, 8])
    truth = replace(UNCALIBRATED, matrix=0.7, launch_s=1.5e-3)
    machine, fabric = machine_of(cluster.weakest, truth), fabric_of(cluster, truth)
    seconds = step_time(spec, machine, fabric, configs, QUIET).total
    fitted = calibrate(cluster, [(spec, configs, seconds)], QUIET)
    assert np.abs(errors(cluster, fitted, [(spec, configs, seconds)], QUIET)).mean() < 0.02
    with pytest.raises(CountOutOfRange):
        calibrate(cluster, [])


def test_kinds_add_up_and_are_never_negative():
    cluster = PRESETS["perlmutter"]
    configs = Configs.of(
        512,
        tp=[1, 4, 8, 4, 2],
        pp=[1, 4, 8, 4, 16],
        dp=[64, 4, 1, 2, 2],
        cp=[1, 1, 1, 2, 1],
        micro=[1, 2, 4, 1, 2],
        chunks=[1, 2, 1, 1, 1],
        zero=[3, 1, 0, 2, 0],
        sp=[False, True, True, False, False],
        schedule=[0, 0, 2, 1, 2],
        order=[0, 5, 1, 23, 7],
    )
    time = step_time(MODELS["llama3-70b"], machine_of(cluster.weakest), fabric_of(cluster), configs)
    kinds = [getattr(time, f.name) for f in fields(time)]
    assert (np.array([np.broadcast_to(k, 5) for k in kinds]) >= 0).all()
    assert np.sum([np.broadcast_to(k, 5) for k in kinds], axis=0) == pytest.approx(time.total)


def test_no_tier_carries_more_than_its_capacity():
    """Bytes over every card in a step, counted from the plan alone, against card times step."""
    cluster = PRESETS["dgx-a100"]
    spec, card = MODELS["gpt3-175b"], 25e9
    configs = Configs.of(1536, tp=8, pp=8, dp=24, micro=1, recompute=FULL)
    time = step_time(spec, machine_of(cluster.weakest), fabric_of(cluster), configs)
    activations = 2 * 2048 * spec.width / 8
    sends = 2 * 64 * activations
    gradients = 2 * 23 / 24 * 2 * spec.n_layers / 8 * spec.layer_weights / 8
    assert sends + gradients <= card * float(time.pp[0] + time.dp[0] + time.compute[0])
    alone = step_time(spec, machine_of(cluster.weakest), fabric_of(cluster), configs, QUIET)
    assert gradients <= card * float(alone.dp[0])


@pytest.mark.parametrize(("p", "m", "schedule"), [(4, 8, 0), (8, 8, 0), (4, 16, 1), (4, 12, 2)])
def test_closed_form_is_the_simulators_makespan_for_equal_stages(p, m, schedule):
    """1F1B ends at (m + p - 1)(F + B); ZB-H1 saves 2 W for each stage but one."""
    fabric = Fabric((64,), (1e30,), (0.0,))
    machine = replace(machine_of(PRESETS["dgx-a100"].weakest), head=False, launch_s=0.0)
    spec = gpt("x", p, 1024, 16)
    configs = Configs.of(pp=p, n_micro=m, micro=1, schedule=schedule)
    parts = layer_parts(spec, machine, fabric, configs, QUIET)
    f, w = float(parts["forward"][0]), float(parts["backward"][0]) / 2
    time = step_time(spec, machine, fabric, configs, QUIET)
    name = ("1f1b", "gpipe", "zb-h1")[schedule]
    exact = simulate(build_schedule(name, p, m), Costs(f * 1e6, w * 1e6, w * 1e6)).makespan / 1e6
    closed = float(time.compute[0] + time.bubble[0])
    assert closed == pytest.approx(exact, rel=0.02 if schedule == 2 else 1e-9)
    assert simulated_seconds(spec, machine, fabric, configs, QUIET) == pytest.approx(exact)


def test_one_stage_and_ragged_interleaving_have_no_simulation():
    cluster = PRESETS["dgx-a100"]
    machine, fabric = machine_of(cluster.weakest), fabric_of(cluster)
    spec = gpt("x", 8, 1024, 16)
    for values in ({"pp": 1}, {"pp": 4, "chunks": 2, "n_micro": 6}):
        configs = Configs.of(**values)
        assert simulated_seconds(spec, machine, fabric, configs, QUIET) is None


def test_groups_cross_tiers_on_their_own_cards():
    fabric = Fabric((8, 512), (200e9, 10e9), (0.0, 0.0))

    def bus(degree, stride):
        group = fabric.group(degree, stride)
        return 2 * (degree - 1) / degree * 1e9 / float(group.time("all_reduce", 1e9))

    assert bus(8, 1) == pytest.approx(200e9)
    assert bus(16, 1) == pytest.approx(80e9)
    assert bus(32, 2) == pytest.approx(10e9)
    assert bus(4, 8) == pytest.approx(10e9)
    assert float(fabric.group(1, 8).time("all_reduce", 1e9)) == 0


def test_strides_follow_the_order_of_axes():
    configs = Configs.of(tp=2, pp=3, dp=5, cp=7, order=[0, 23])
    strides = axis_strides(configs)
    assert [int(strides[axis][0]) for axis in ("tp", "cp", "dp", "pp")] == [1, 2, 14, 70]
    assert sorted(int(strides[axis][1]) for axis in strides)[0] == 1


def test_distinct_rows_are_gathered_back():
    rng = np.random.default_rng(0)
    columns = [rng.integers(0, n, 500) for n in (3, 7, 1, 100)]
    first, place = distinct(*columns)
    assert len(first) == len(np.unique(np.stack(columns), axis=1).T)
    for column in columns:
        assert (column[first][place] == column).all()
