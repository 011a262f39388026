"""Runs that start from the weights of another tool."""

import argparse
import dataclasses

import numpy as np
import pytest

import mpipar.errors
from mpipar.checkpoint import export_hf
from mpipar.cli.train import _recipe, configure
from mpipar.errors import CheckpointError, RecipeError
from mpipar.models import GPTConfig, LlamaConfig, build_model
from mpipar.train import Recipe, Trainer
from mpipar.train.recipe import DataRecipe, MeshRecipe, RunRecipe, TrainRecipe

LLAMA = LlamaConfig(n_layers=3, width=16, n_heads=4, n_kv_heads=2, hidden=12, sequence=32)
GPT = GPTConfig(n_layers=3, width=16, n_heads=4, sequence=32, tied=True)


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """One folder a model, written from its random weights."""
    where = tmp_path_factory.mktemp("models")
    for config in (LLAMA, GPT):
        export_hf(where / config.kind, config, weights(config))
    return lambda config: str(where / config.kind)


def weights(config):
    return build_model(config).init(99, np.float64)


def recipe_of(config, init, pp=1, steps=2, tp=1):
    return Recipe(
        model=dataclasses.replace(config, sequence=8),
        data=DataRecipe(path=mpipar.errors.__file__),
        train=TrainRecipe(
            steps=steps, batch=4, init=init, dtype="float64", learning_rate=0.0,
            final_learning_rate=0.0, weight_decay=0.0,
        ),
        mesh=MeshRecipe(pp=pp, tp=tp),
        run=RunRecipe(held_out_sequences=4),
    )  # fmt: skip


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("config", [LLAMA, GPT], ids=["llama", "gpt"])
@pytest.mark.parametrize("axis", ["dp", "pp", "tp"])
def test_a_run_starts_from_the_weights_of_the_file(comm, places, config, axis):
    pp, tp = (comm.size if axis == name else 1 for name in ("pp", "tp"))
    trainer = Trainer(comm, recipe_of(config, places(config), pp, tp=tp))
    mine = set(trainer.dp.parameters)
    figures = trainer.run()
    # The learning rate is 0: what was loaded is still there.
    expected = weights(config)
    for name in mine:
        rows = expected[name][:8] if name == "pos.weight" else expected[name]
        rows = trainer.engine.model.shards[name].cut(rows, comm.rank if axis == "tp" else 0)
        np.testing.assert_array_equal(trainer.dp.parameters[name], rows)
    assert (mine == set(expected)) == (pp == 1)
    rows = trainer.held_out.rows(0, min(4, trainer.held_out.n_rows))
    reference = build_model(config).loss(expected, rows[:, :-1], rows[:, 1:]) / rows[:, 1:].size
    assert figures["held_out_loss"] == pytest.approx(reference, rel=1e-10)


@pytest.mark.ranks(1, 2)
def test_other_models_are_refused_on_every_rank(comm, places):
    def run(config, **changes):
        recipe = recipe_of(config, places(config))
        model = dataclasses.replace(recipe.model, **changes)
        Trainer(comm, dataclasses.replace(recipe, model=model)).run()

    with pytest.raises(
        RecipeError, match=r"model\.rope_base=5\.0, but train\.init .* has rope_base"
    ):
        run(LLAMA, rope_base=5.0)
    with pytest.raises(RecipeError, match=r"model\.n_kv_heads=1, but .* has n_kv_heads=2"):
        run(LLAMA, n_kv_heads=1)
    with pytest.raises(RecipeError, match="learned 32 positions; 32 or fewer would do"):
        run(GPT, sequence=40)
    with pytest.raises(RecipeError, match=r"model\.hidden=None|model\.hidden_factor=4"):
        Trainer(comm, recipe_of(GPT, places(LLAMA))).run()
    with pytest.raises(CheckpointError, match="neither a folder"):
        Trainer(comm, recipe_of(GPT, "nowhere")).run()


def test_the_command_takes_the_shape_from_the_file(tmp_path):
    export_hf(tmp_path, LLAMA, weights(LLAMA))
    parser = argparse.ArgumentParser()
    configure(parser)
    arguments = parser.parse_args(["--init", str(tmp_path), "--set", "model.sequence=8"])
    recipe = _recipe(arguments, None)
    assert recipe.model == dataclasses.replace(LLAMA, sequence=8)
    assert recipe.train.init == str(tmp_path)


@pytest.mark.ranks(1, 2)
def test_tokens_beyond_the_vocabulary_are_refused_on_every_rank(comm, tmp_path):
    np.save(tmp_path / f"{comm.rank}.npy", np.arange(300))
    recipe = recipe_of(GPT, "")
    data = DataRecipe(path=str(tmp_path / f"{comm.rank}.npy"))
    with pytest.raises(RecipeError, match=r"token 299, .*model\.vocabulary=300 would do"):
        Trainer(comm, dataclasses.replace(recipe, data=data))
