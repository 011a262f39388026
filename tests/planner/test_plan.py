import json
from dataclasses import replace

import pytest

from mpipar.errors import LayoutError
from mpipar.planner import MODELS, Pricing, make_plan, plan_text, recipe_toml
from mpipar.planner.configs import Configs
from mpipar.planner.memory import SINGLE
from mpipar.planner.option import not_runnable
from mpipar.planner.search import ALL
from mpipar.topology import PRESETS
from mpipar.train.recipe import load_recipe

FEW = replace(ALL, max_chunks=2, max_micro=8)


@pytest.fixture(scope="module")
def laptop():
    pricing = Pricing(MODELS["gpt-tiny"], PRESETS["laptop"], SINGLE)
    return make_plan(pricing, 16, FEW)


def test_a_recommended_plan_can_run_and_names_its_constants(laptop):
    assert laptop.options
    assert all(not option.missing for option in laptop.options)
    assert [o.seconds for o in laptop.options] == sorted(o.seconds for o in laptop.options)
    text = plan_text(laptop)
    for words in ("run: dp=4", "lost:", "assumed", "order of axes", "optimizer", "bubble"):
        assert words in text


def test_what_cannot_run_is_priced_and_marked(laptop):
    fastest = laptop.priced[0]
    assert fastest.seconds <= laptop.options[0].seconds
    assert fastest.missing
    assert "not runnable yet" in plan_text(laptop)
    assert fastest.missing[0] in plan_text(laptop)


def test_the_recipe_is_one_that_train_reads(laptop, tmp_path):
    (tmp_path / "recipe.toml").write_text(recipe_toml(laptop))
    recipe = load_recipe(tmp_path / "recipe.toml")
    row = laptop.options[0].row
    assert (recipe.mesh.dp, recipe.mesh.pp, recipe.mesh.tp) == (row["dp"], row["pp"], row["tp"])
    assert recipe.train.batch == 16
    assert recipe.train.microbatches == row["n_micro"]
    assert recipe.train.sequence_parallel == row["sp"]
    assert recipe.model.width == 256
    assert (recipe.plan.step_s, recipe.plan.cluster) == (laptop.options[0].seconds, "laptop")


def test_a_plan_is_plain_values(laptop):
    read = json.loads(json.dumps(laptop.to_mapping()))
    assert read["options"][0]["row"]["dp"] == laptop.options[0].row["dp"]
    assert read["source"] == laptop.source


def test_infeasible_says_what_binds_and_the_smallest_change():
    pricing = Pricing(MODELS["gpt3-175b"], PRESETS["dgx-a100"].take(8))
    with pytest.raises(LayoutError, match=r"most of it optimizer .* would do") as refusal:
        make_plan(pricing, 32, FEW)
    n_devices = int(str(refusal.value).split(" devices or devices with")[0].split()[-1])
    assert n_devices % 8 == 0
    wider = replace(pricing, cluster=PRESETS["dgx-a100"].take(n_devices))
    assert make_plan(wider, 32, FEW).n_fitting > 0
    less = replace(pricing, cluster=PRESETS["dgx-a100"].take(n_devices - 8))
    with pytest.raises(LayoutError):
        make_plan(less, 32, FEW)


def test_no_exact_layout_names_the_nearest():
    pricing = Pricing(MODELS["gpt-tiny"], PRESETS["dgx-a100"].take(8))
    with pytest.raises(LayoutError, match="batch=8"):
        make_plan(pricing, 7, replace(FEW, fixed=(("dp", 8),)))


def test_no_recipe_for_what_cannot_run():
    pricing = Pricing(MODELS["llama3-8b"], PRESETS["dgx-h100"].take(8))
    plan = make_plan(pricing, 8, FEW)
    assert plan.options == ()
    with pytest.raises(LayoutError, match="llama models"):
        recipe_toml(plan)


def test_what_is_missing_is_listed():
    row = Configs.of(cp=2, zero=1, recompute=2, ep=1, dp=2).row(0)
    assert not_runnable(MODELS["gpt-tiny"], row) == (
        "context parallelism",
        "full recompute",
        "ZeRO 1",
    )
    grouped = replace(MODELS["gpt-tiny"], n_kv_heads=2)
    assert not_runnable(grouped, Configs.of(tp=4).row(0)) == ("copied key and value heads",)
    assert not not_runnable(grouped, Configs.of(tp=2, sp=True).row(0))
    odd = replace(grouped, sequence=127)
    assert not_runnable(odd, Configs.of(tp=2, sp=True).row(0)) == ("uneven parts of a sequence",)


def test_placement_over_tiers_is_no_slower_than_the_default():
    pricing = Pricing(MODELS["gpt-22b"], PRESETS["dgx-a100"].take(64))
    plan = make_plan(pricing, 64, FEW)
    assert plan.order_gain >= 0
