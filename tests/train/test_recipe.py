"""Recipes: precedence, refusals that name the nearest key, and text that reads back exactly."""

import dataclasses
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpipar.errors import RecipeError
from mpipar.models import GPTConfig, LlamaConfig
from mpipar.train.recipe import (
    DataRecipe,
    MeshRecipe,
    Recipe,
    RunRecipe,
    TrainRecipe,
    dump_recipe,
    load_recipe,
    merge_recipe,
)

WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
FRACTIONS = st.floats(0, 1, exclude_min=True, exclude_max=True)
POSITIVE = st.floats(0, 1e300)
SHAPES = {
    "n_layers": st.integers(1, 9),
    "width": st.just(64),
    "n_heads": st.sampled_from([4, 8]),
    "n_kv_heads": st.sampled_from([None, 2]),
    "dropout": st.floats(0, 0.9),
    "tied": st.booleans(),
}
RECIPES = st.builds(
    Recipe,
    model=st.one_of(
        st.builds(GPTConfig, hidden_factor=st.integers(1, 5), **SHAPES),
        st.builds(LlamaConfig, hidden=st.integers(1, 99), rope_base=st.floats(1, 1e7), **SHAPES),
    ),
    data=st.builds(DataRecipe, path=WORDS, digest=WORDS, held_out=FRACTIONS),
    train=st.builds(
        TrainRecipe,
        steps=st.integers(1, 2**62),
        learning_rate=POSITIVE,
        eps=POSITIVE,
        beta2=st.floats(0, 1, exclude_max=True),
        deterministic=st.booleans(),
        dtype=WORDS,
    ),
    mesh=st.builds(MeshRecipe, dp=st.integers(0, 9), order=WORDS),
    run=st.builds(RunRecipe, folder=WORDS, keep=st.integers(0, 9)),
)


@given(RECIPES)
def test_text_reads_back_exactly(tmp_path_factory, recipe):
    text = dump_recipe(recipe)
    assert merge_recipe(Recipe(), tomllib.loads(text)) == recipe
    path = tmp_path_factory.getbasetemp() / "recipe.toml"
    path.write_text(text, encoding="utf-8")
    assert load_recipe(path) == recipe


def test_every_key_is_written_so_that_later_defaults_change_no_run():
    table = tomllib.loads(dump_recipe(Recipe()))
    for section in dataclasses.fields(Recipe):
        keys = {f.name for f in dataclasses.fields(getattr(Recipe(), section.name))}
        assert keys - set(table[section.name]) <= {"n_kv_heads"}  # None: as many as query heads


def test_the_kind_of_a_model_decides_its_keys(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("[model]\nn_layers = 3\nkind = 'llama'\nhidden = 40\n")
    recipe = load_recipe(path, ["model.rope_base=500"])
    assert isinstance(recipe.model, LlamaConfig)
    assert (recipe.model.n_layers, recipe.model.hidden, recipe.model.rope_base) == (3, 40, 500.0)
    assert merge_recipe(Recipe(), dataclasses.asdict(recipe)) == recipe
    assert isinstance(load_recipe(path, ["model.kind=gpt"]).model, GPTConfig)
    other = LlamaConfig(n_layers=7)
    assert load_recipe(path, ["model.dropout=0.5"], other).model.n_layers == 7
    with pytest.raises(
        RecipeError, match=r"no key model\.hidden in a recipe; did you mean hidden_f"
    ):
        load_recipe(None, ["model.hidden=40"])
    with pytest.raises(RecipeError, match=r"model\.kind='mamba': gpt or llama would do"):
        load_recipe(None, ["model.kind=mamba"])
    with pytest.raises(RecipeError, match=r"no key model\.has_bias"):
        load_recipe(None, ["model.has_bias=true"])
    with pytest.raises(RecipeError, match="kind='llama' of a GPTConfig; 'gpt' would do"):
        GPTConfig(kind="llama")


def test_defaults_then_file_then_settings(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("[train]\nsteps = 7\nbatch = 24\nlearning_rate = 1\n[model]\nn_layers = 3\n")
    recipe = load_recipe(path, ["train.steps=9", "train.steps = 10", "data.path=a b", "run.keep=5"])
    assert recipe.train.steps == 10  # the last setting
    assert recipe.data.path == "a b"  # a bare word
    assert recipe.run.keep == 5
    assert (recipe.train.batch, recipe.train.learning_rate) == (24, 1.0)  # the file
    assert recipe.model.n_layers == 3
    assert recipe.train.beta1 == TrainRecipe().beta1  # the default
    assert recipe.model.width == Recipe().model.width
    assert isinstance(recipe.train.learning_rate, float)
    assert load_recipe(settings=['data.path="7"']).data.path == "7"


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("train.stepz=1", "no key train.stepz in a recipe; did you mean steps?"),
        ("trian.steps=1", "no section [trian] in a recipe; did you mean train?"),
        ("model.xyzzy=1", "no key model.xyzzy in a recipe; known: kind, n_layers, width,"),
        ("train.steps", "--set 'train.steps' must read section.key=value, e.g. train.steps=10"),
        ("steps=3", "must read section.key=value"),
        ("train.steps=many", "train.steps must be int, got 'many'"),
        ("train.steps=1.5", "train.steps must be int, got 1.5"),
        ("train.steps=true", "train.steps must be int, got True"),
        ("train.deterministic=1", "train.deterministic must be bool, got 1"),
        ("data.path=3", "data.path must be str, got 3"),
        ("model.n_kv_heads=x", "model.n_kv_heads must be int, got 'x'"),
        ("model.n_heads=3", "section [model]: uneven split in width / n_heads: width=128 cannot"),
        ("train.steps=0", "section [train]: steps must be in range 1 or more, got 0"),
        ("train.batch=-4", "section [train]: batch must be in range 1 or more, got -4"),
        ("train.seed=-1", "section [train]: seed must be in range 0 or more, got -1"),
        ("train.learning_rate=nan", "learning_rate must be in range 0 or more, got nan"),
        ("train.eps=inf", "eps must be in range 0 or more, got inf"),
        ("train.beta2=1.0", "beta2 must be in range [0, 1), got 1.0"),
        ("data.held_out=1", "held_out must be in range above 0 and below 1, got 1.0"),
        ("run.held_out_sequences=0", "held_out_sequences must be in range 1 or more, got 0"),
        ("run.keep=-1", "keep must be in range 0 or more, got -1"),
    ],
)
def test_refused_settings(setting, says):
    with pytest.raises(RecipeError) as e:
        load_recipe(settings=[setting])
    assert says in str(e.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[train]\nlerning_rate = 1.0\n", "no key train.lerning_rate in a recipe; did you mean"),
        ("train = 3\n", "train is a section: write [train] and its keys below"),
        ("[train\n", "is no TOML: "),
        (None, "cannot be read: No such file or directory"),
    ],
)
def test_refused_files(tmp_path, text, says):
    path = tmp_path / "bad.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(RecipeError) as e:
        load_recipe(path)
    assert says in str(e.value)
