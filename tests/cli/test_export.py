"""A run over several ranks, exported, is the model that other tools read."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mpipar import ThreadWorld, checkpoint
from mpipar.comm import IdentityCommunicator
from mpipar.models import build_model
from mpipar.train import Trainer
from mpipar.train.recipe import dump_recipe
from mpipar.train.run_folder import RECIPE
from tests.train.test_tensor_parallel import curve, trainer_of


def exported(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mpipar", "export", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("name", "degrees"),
    [("gpt tied", {"tp": 2, "pp": 2}), ("llama", {"tp": 3}), ("llama tied", {"pp": 2, "dp": 2})],
)
def test_a_run_on_any_mesh_is_exported_as_one_file(tmp_path: Path, name: str, degrees):
    run = tmp_path / "run"
    n = int(np.prod(list(degrees.values())))

    def body(comm):
        trainer: Trainer = trainer_of(comm, name, run, **degrees)
        curve(trainer, 2)
        if comm.rank == 0:
            run.mkdir()
            text = dump_recipe(trainer.recipe).replace("dropout = 0.1", "dropout = 0.0")
            (run / RECIPE).write_text(text)
        comm.barrier()
        trainer.save()
        return trainer.held_out_loss()

    losses = ThreadWorld(n).run(body)
    done = exported(run, tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "step 2 of" in done.stdout
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
    found = checkpoint.open_pretrained(tmp_path / "out")
    again = trainer_of(IdentityCommunicator(), name)
    read = found.load(dtype=np.float64)
    assert read.keys() == build_model(found.config).shapes().keys()
    for key, array in again.dp.parameters.items():
        array[...] = read[key]
    assert again.held_out_loss() == pytest.approx(losses[0], rel=1e-12)


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path):
    done = exported(tmp_path, tmp_path / "out")
    assert done.returncode != 0
    assert "recipe.toml" in done.stderr
    assert not (tmp_path / "out").exists()
