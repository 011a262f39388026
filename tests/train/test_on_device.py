"""A run whose arrays lie on a device has the losses of one on the host, also after a restart."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from mpipar.comm import Communicator
from mpipar.errors import RecipeError
from mpipar.models import GPTConfig
from mpipar.train.recipe import DataRecipe, MeshRecipe, Recipe, RunRecipe, TrainRecipe
from mpipar.train.trainer import Trainer
from tests.comm.device_math import MathArray

STEPS = 6


def recipe(path: Path, device: str, **mesh: int) -> Recipe:
    model = GPTConfig(n_layers=2, width=16, n_heads=2, sequence=12, vocabulary=256, dropout=0.1)
    train = TrainRecipe(steps=STEPS, batch=4, microbatches=2, warmup_steps=2, dtype="float64",
                        device=device)  # fmt: skip
    return Recipe(
        model=model,
        train=train,
        mesh=MeshRecipe(**mesh),
        data=DataRecipe(path=str(path)),
        run=RunRecipe(held_out_sequences=4),
    )


def losses(trainer: Trainer) -> list[float]:
    found = []
    while trainer.step < STEPS:
        found.append(trainer.train_step().loss)
        if trainer.step == 3:
            trainer.save()
    return [*found, trainer.held_out_loss()]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("of arrays that lie on devices and of those that do not " * 40)
    return path


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("axis", ["dp", "tp"])
def test_losses_are_those_of_the_host(comm: Communicator, text: Path, axis: str) -> None:
    mesh: Any = {"dp": 1, "pp": 1, "tp": 1} | {axis: comm.size}
    wanted = losses(Trainer(comm, recipe(text, "", **mesh)))
    folder = text.parent / "run"
    trainer = Trainer(comm, recipe(text, "device_math", **mesh), folder)
    found = losses(trainer)
    assert found == pytest.approx(wanted, rel=1e-9)
    places = (trainer.dp.parameters, trainer.dp.gradients, trainer.optimizer.m)
    assert all(isinstance(a, MathArray) for arrays in places for a in arrays.values())
    again = Trainer(comm, recipe(text, "device_math", **mesh), folder)
    assert again.resume() == 3
    assert losses(again)[-4:] == pytest.approx(wanted[-4:], rel=1e-9)


@pytest.mark.ranks(2)
def test_a_pipeline_on_devices_is_refused(comm: Communicator, text: Path) -> None:
    asked = recipe(text, "device_math", dp=1, pp=2, tp=1)
    with pytest.raises(RecipeError, match=r"mesh\.pp=1 would do"):
        Trainer(comm, dataclasses.replace(asked))
