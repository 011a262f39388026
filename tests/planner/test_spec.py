import csv
from pathlib import Path

import numpy as np
import pytest

from mpipar.errors import LayoutError, UnevenSplit
from mpipar.planner.spec import MODELS, ModelSpec, gpt, spec_from_mapping

DATA = Path(__file__).parents[1] / "data"


def rows(name):
    return list(csv.DictReader((DATA / name).read_text().splitlines()))


def spec_of(row, **other):
    return gpt("row", int(row["L"]), int(row["h"]), int(row["heads"]), **other)


@pytest.mark.parametrize("row", rows("megatron_sc21_weak_scaling.csv"), ids=lambda r: r["params_B"])
def test_parameters_and_flops_of_sc21(row):
    spec, batch = spec_of(row), int(row["batch"])
    assert f"{spec.n_parameters / 1e9:.1f}" == row["params_B"]
    s, h, n_layers, v = 2048, spec.width, spec.n_layers, 51200
    printed = 96 * batch * s * n_layers * h**2 * (1 + s / (6 * h) + v / (16 * n_layers * h))
    flops = float(spec.step_flops(batch, "full"))
    assert flops == pytest.approx(printed, rel=1e-12)
    seconds = flops / (int(row["gpus"]) * float(row["tflops_gpu"]) * 1e12)
    assert f"{seconds:.2f}" == row["derived_iter_s"]
    degree = int(row["t"]) * int(row["p"]) * int(row["derived_d"])
    assert degree == int(row["gpus"])


@pytest.mark.parametrize("row", rows("megatron_sc21_training_days.csv"), ids=lambda r: r["gpus"])
def test_training_days_of_sc21(row):
    spec, batch = MODELS["gpt3-175b"], int(row["batch"])
    assert f"{spec.n_parameters / 1e9:.1f}" == row["params_B"]
    steps = 300e9 / (batch * spec.sequence)
    rate = int(row["gpus"]) * float(row["tflops_gpu"]) * 1e12
    days = steps * float(spec.step_flops(batch, "full")) / rate / 86400
    assert f"{days:.1f}" == row["derived_days"]


@pytest.mark.parametrize("row", rows("megatron_h100_weak_scaling.csv"), ids=lambda r: r["model"])
def test_untied_models_of_the_h100_table(row):
    spec = spec_of(row, sequence=4096, vocabulary=131072)
    untied = spec_from_mapping(vars(spec) | {"tied": False, "positions": False})
    digits = 1 if "." in row["model"] else 0
    assert f"{untied.n_parameters / 1e9:.{digits}f}B" == row["model"]
    assert int(row["gpus"]) == int(row["t"]) * int(row["p"]) * int(row["d"])
    assert float(row["tflops_gpu"]) / 989 * 100 == pytest.approx(float(row["mfu_pct"]), abs=0.6)


@pytest.mark.parametrize(
    "row", rows("activation_recomputation_iterations.csv"), ids=lambda r: r["model"]
)
def test_model_and_hardware_utilisation(row):
    spec, batch = spec_of(row), int(row["batch"])
    peak_s = int(row["gpus"]) * 312e12 * float(row["iter_sp_selective_s"])
    for flops, column in (("none", "mfu_pct"), ("selective", "hfu_pct")):
        share = 100 * float(spec.step_flops(batch, flops)) / peak_s
        assert share == pytest.approx(float(row[column]), abs=0.25)


@pytest.mark.parametrize("row", rows("llama3_layouts.csv"), ids=lambda r: r["gpus"] + r["seq"])
def test_llama3_layouts_are_valid(row):
    spec = MODELS["llama3-405b"].with_sequence(int(row["seq"]))
    degrees = [int(row[axis]) for axis in ("tp", "cp", "pp", "dp")]
    assert np.prod(degrees) == int(row["gpus"])
    assert int(row["dp"]) * int(row["batch_per_dp"]) * spec.sequence == 16 * 2**20
    assert spec.n_heads % degrees[0] == 0
    assert spec.kv_heads % degrees[0] == 0


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama3-8b", "8.03"),
        ("llama3-70b", "70.55"),
        ("llama3-405b", "405.85"),
        ("mixtral-8x7b", "46.70"),
        ("gpt2-124m", "0.12"),
    ],
)
def test_published_parameter_counts(name, billions):
    assert f"{MODELS[name].n_parameters / 1e9:.2f}" == billions


def test_active_parameters_of_a_mixture():
    assert f"{MODELS['mixtral-8x7b'].n_active_parameters / 1e9:.1f}" == "12.9"


def test_kv_cache():
    assert MODELS["llama3-70b"].kv_bytes(1) == 80 * 2 * 8 * 128 * 2


def test_faults_are_named():
    with pytest.raises(LayoutError, match="'depth' is unknown"):
        spec_from_mapping({"depth": 3})
    with pytest.raises(LayoutError, match="'vocabulary' is missing"):
        spec_from_mapping({"n_layers": 1, "width": 8, "n_heads": 2, "sequence": 4})
    with pytest.raises(UnevenSplit):
        ModelSpec(1, 10, 3, 4, 5)
    with pytest.raises(LayoutError, match="gpt or llama"):
        ModelSpec(1, 8, 2, 4, 5, family="rnn")
    assert (
        spec_from_mapping(
            {
                "n_layers": 1,
                "width": 8,
                "n_heads": 2,
                "sequence": 4,
                "vocabulary": 5,
                "hidden_factor": 2,
            }
        ).ffn
        == 16
    )
