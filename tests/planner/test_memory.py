import csv
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpipar.errors import UnevenSplit
from mpipar.planner.configs import FULL, NONE, SELECTIVE, Configs
from mpipar.planner.memory import (
    MIXED,
    SINGLE,
    ZERO_PAPER,
    in_flight,
    layer_activation_bytes,
    stage_layers,
    stage_memory,
    stage_parameters,
    state_bytes,
)
from mpipar.planner.spec import MODELS, ModelSpec, gpt

DATA = Path(__file__).parents[1] / "data"
GIB = 2**30


def rows(name):
    return list(csv.DictReader((DATA / name).read_text().splitlines()))


def selene():
    shapes = {r["model"]: r for r in rows("activation_recomputation_iterations.csv")}
    for row in rows("activation_recomputation_memory.csv"):
        shape = shapes[row["model"]]
        n_layers, h, heads = (int(shape[k]) for k in ("L", "h", "heads"))
        degrees = {k: int(shape[k]) for k in ("t", "p", "micro", "batch", "v")}
        yield row, gpt(row["model"], n_layers, h, heads), degrees


def kept(spec, d, sp, recompute):
    configs = Configs.of(d["batch"], tp=d["t"], pp=d["p"], micro=d["micro"], chunks=d["v"])
    layer = layer_activation_bytes(spec, d["micro"], d["t"], 1, sp, recompute)
    return float(layer * spec.n_layers / d["p"] * in_flight(configs, 0)[0])


@pytest.mark.parametrize(("row", "spec", "d"), list(selene()), ids=lambda x: getattr(x, "name", ""))
def test_published_activations_and_state(row, spec, d):
    for sp, recompute, column in ((False, NONE, "act_none"), (True, SELECTIVE, "act_sp_selective")):
        assert kept(spec, d, sp, recompute) / GIB == pytest.approx(
            float(row[column + "_GiB"]), rel=1e-9
        )
    weights = 12 * spec.width**2 * spec.n_layers / (d["t"] * d["p"])
    assert state_bytes(weights, MIXED) / GIB == pytest.approx(float(row["state_GiB"]), rel=1e-9)
    base = layer_activation_bytes(spec, 1, d["t"])
    for sp, recompute, column in (
        (True, NONE, "pct_sp"),
        (False, SELECTIVE, "pct_selective"),
        (True, SELECTIVE, "pct_sp_selective"),
        (False, FULL, "pct_full"),
    ):
        share = 100 * layer_activation_bytes(spec, 1, d["t"], 1, sp, recompute) / base
        assert share == pytest.approx(float(row[column]), abs=0.15)


@pytest.mark.parametrize("row", rows("zero_memory_gb.csv"), ids=lambda r: r["dp"])
def test_zero_table(row):
    for size, billions in (("7.5B", 7.5), ("128B", 128), ("1T", 1000)):
        for stage, suffix in ((1, "os"), (2, "osg"), (3, "osgp")):
            printed = row[f"{size}_{suffix}"]
            digits = len(printed.partition(".")[2])
            found = float(state_bytes(billions, ZERO_PAPER, stage, int(row["dp"])))
            assert round(found, digits) == float(printed)


@pytest.mark.parametrize("row", rows("schedule_unit_time.csv"), ids=lambda r: r["p"] + "x" + r["m"])
def test_microbatches_in_flight(row):
    p, m = int(row["p"]), int(row["m"])
    for v, schedule, column in (
        (1, 0, "peak_1f1b"),
        (2, 0, "peak_interleaved_v2"),
        (1, 1, "peak_inflight_stage0_gpipe"),
    ):
        configs = Configs.of(pp=p, n_micro=m, chunks=v, schedule=schedule)
        expected = min(m, float(row[column]))
        assert float(in_flight(configs, 0)[0]) == expected


@given(st.integers(1, 64), st.integers(1, 8), st.integers(1, 16))
def test_stages_and_tensor_ranks_together_hold_the_model(n_layers, log_t, p):
    t = 2 ** (log_t % 4)
    spec = ModelSpec(n_layers, 64, 8, 16, 8 * 16, tied=False)
    p = min(p, n_layers)
    configs = Configs.of(tp=t, pp=p)
    total = 0.0
    for i, layers in enumerate(stage_layers(spec, p)):
        dense, _ = stage_parameters(spec, configs, layers, i == 0, i == p - 1)
        total += float(dense[0]) * t
    whole = n_layers * spec.whole_weights + spec.position_weights + spec.final_norm
    assert total == pytest.approx(spec.n_parameters + (t - 1) * whole)


def test_first_and_last_stage_differ():
    spec = MODELS["gpt3-175b"]
    configs = Configs.of(1536, tp=8, pp=8, dp=8, micro=1, recompute=SELECTIVE, sp=True)
    first = stage_memory(spec, configs, MIXED, "first")
    last = stage_memory(spec, configs, MIXED, "last")
    assert first.activations[0] == pytest.approx(8 * last.activations[0])
    assert last.working[0] > first.working[0]


def test_memory_falls_with_every_degree_and_stage_of_zero():
    spec = MODELS["llama3-8b"]
    for axis in ("tp", "pp", "zero"):
        configs = Configs.of(
            dp=4, n_micro=1, **{axis: np.arange(4) if axis == "zero" else [1, 2, 4]}
        )
        total = stage_memory(spec, configs, MIXED).total
        assert (np.diff(total) < 0).all() or axis == "zero"
        state = total - stage_memory(spec, configs, MIXED).working
        assert (np.diff(state) < 0).all()


def test_experts_are_spread_over_ep():
    spec = MODELS["mixtral-8x7b"]
    one, eight = (
        stage_parameters(spec, Configs.of(ep=e, dp=8), spec.n_layers, True, True) for e in (1, 8)
    )
    assert one[1][0] == 8 * eight[1][0]
    assert one[0][0] == eight[0][0]
    assert one[0][0] + one[1][0] == spec.n_parameters


def test_batches_that_do_not_split_are_refused():
    with pytest.raises(UnevenSplit, match="batch=8 would do"):
        Configs.of(10, dp=4)
    assert SINGLE.total == 16
