"""Training gives the same numbers on any mesh with tensor parallelism, in float64."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import mpipar.errors
from mpipar.comm import IdentityCommunicator, ThreadWorld
from mpipar.models import GPTConfig, LlamaConfig
from mpipar.train import Recipe, Trainer
from mpipar.train.recipe import DataRecipe, MeshRecipe, RunRecipe, TrainRecipe

SHAPE = {"n_layers": 2, "width": 24, "n_heads": 12, "sequence": 12, "vocabulary": 257}
MODELS = {
    "gpt": GPTConfig(**SHAPE, dropout=0.1),
    "gpt tied": GPTConfig(**SHAPE, tied=True),
    "llama": LlamaConfig(**SHAPE | {"width": 48}, hidden=36),
    "llama tied": LlamaConfig(**SHAPE | {"width": 48}, hidden=36, tied=True),
}
STEPS = 4
ways = pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sp"])


def trainer_of(comm, name, folder=None, sp=False, **degrees):
    recipe = Recipe(
        model=MODELS[name],
        data=DataRecipe(path=mpipar.errors.__file__),
        mesh=MeshRecipe(**degrees),
        train=TrainRecipe(
            steps=STEPS,
            batch=12,
            microbatches=2,
            sequence_parallel=sp,
            dtype="float64",
            learning_rate=0.01,
            warmup_steps=2,
            eps=1e-5,
            clip_norm=0.3,
            seed=7,
        ),
        run=RunRecipe(held_out_sequences=10),
    )
    return Trainer(comm, recipe, folder)


def curve(trainer, n_steps):
    results = [trainer.train_step() for _ in range(n_steps)]
    return [[r.loss, r.gradient_norm, r.learning_rate] for r in results]


@functools.cache
def alone(name):
    trainer = trainer_of(IdentityCommunicator(), name)
    numbers = curve(trainer, STEPS)
    assert numbers[0][1] > 0.3  # it is clipped
    assert numbers[-1][0] < numbers[0][0]
    return numbers, trainer.held_out_loss(), trainer.dp.parameters


def assert_like_one_rank(trainer, name, numbers, first=0):
    expected, held_out, parameters = alone(name)
    np.testing.assert_allclose(numbers, expected[first:], rtol=1e-12)
    assert trainer.held_out_loss() == pytest.approx(held_out, rel=1e-12)
    model, tp = trainer.engine.model, trainer.mesh.comm("tp")
    for n, local in trainer.dp.parameters.items():
        whole = model.shards[n].join(tp.all_gather(local[None]))
        distance = np.linalg.norm(whole - parameters[n])
        assert distance <= 1e-12 * np.linalg.norm(parameters[n]), n


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("name", ["gpt", "llama tied"])
@ways
def test_a_run_over_tp_is_that_of_one_rank(comm, name, sequence_parallel):
    trainer = trainer_of(comm, name, sp=sequence_parallel, tp=comm.size)
    assert_like_one_rank(trainer, name, curve(trainer, STEPS))
    assert trainer.n_parameters == sum(p.size for p in alone(name)[2].values())
    assert trainer.engine.communication_s > 0
    # Of every split parameter, with its gradient and moments, a rank holds 1/n (257 is padded).
    whole = {n: p.size for n, p in alone(name)[2].items()}
    kinds = [trainer.dp.parameters, trainer.dp.gradients, trainer.optimizer.m, trainer.optimizer.v]
    for arrays in kinds:
        for n in ("blocks.0.qkv.weight", "blocks.1.proj.weight", "blocks.1.down.weight"):
            assert arrays[n].size == whole[n] // comm.size
        padded = -(-257 // comm.size)
        assert arrays["tok.weight"].shape[0] == padded


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", ["gpt tied", "llama"])
@pytest.mark.parametrize(
    "degrees", [{"dp": 2, "tp": 2}, {"pp": 2, "tp": 2}, {"dp": 2, "tp": 2, "order": "tp dp pp cp"}]
)
@ways
def test_two_axes_are_one_rank(comm, name, degrees, sequence_parallel):
    trainer = trainer_of(comm, name, sp=sequence_parallel, **degrees)
    assert_like_one_rank(trainer, name, curve(trainer, STEPS))


def three_axes(world, name, sequence_parallel):
    trainer = trainer_of(world, name, sp=sequence_parallel, pp=2, dp=2, tp=2)
    assert_like_one_rank(trainer, name, curve(trainer, STEPS))


@pytest.mark.parametrize("name", ["gpt tied", "llama"])
@ways
def test_three_axes_are_one_rank(name, sequence_parallel):
    ThreadWorld(8).run(three_axes, name, sequence_parallel)


@pytest.mark.slow
@pytest.mark.parametrize("is_synchronous", [False, True], ids=["eager", "synchronous"])
def test_three_axes_are_one_rank_on_eight_processes(is_synchronous, tmp_path):
    """More ranks than most machines for tests have cores: every wait has to give way."""
    program = tmp_path / "program.py"
    program.write_text("""import mpipar
from tests.train.test_tensor_parallel import three_axes
comm = mpipar.init()
for name in ("gpt tied", "llama"):
    for sequence_parallel in (False, True):
        three_axes(comm, name, sequence_parallel)
print(f"rank {comm.rank} of {comm.size} is done", flush=True)
""")
    root = str(Path(__file__).parents[2])
    command = [sys.executable, "-m", "mpipar", "run", "-n", "8", "--", str(program)]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": root, "MPIPAR_SYNC_SENDS": str(+is_synchronous)},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert sum(f"rank {rank} of 8 is done" in done.stdout for rank in range(8)) == 8


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", ["gpt tied", "llama"])
def test_a_run_goes_on_at_other_degrees(comm, name, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tp") if comm.rank == 0 else None
    folder = Path(comm.broadcast_json(str(folder)))
    first = trainer_of(comm, name, folder, dp=2, tp=2)
    np.testing.assert_allclose(curve(first, 2), alone(name)[0][:2], rtol=1e-12)
    first.save()
    groups = [comm, comm.split(0 if comm.rank < 3 else None), comm.split(comm.rank), comm, comm]
    meshes = [{"tp": 4}, {"dp": 3}, {}, {"pp": 2, "tp": 2}, {"dp": 4}]
    for group, mesh in zip(groups, meshes, strict=True):
        if group is None:
            continue
        again = trainer_of(group, name, folder, **mesh)
        assert again.resume() == 2
        assert_like_one_rank(again, name, curve(again, 2), 2)


@pytest.mark.ranks(4)
def test_each_rank_writes_its_part_and_replicated_arrays_are_written_once(comm, tmp_path_factory):
    folder = tmp_path_factory.mktemp("parts") if comm.rank == 0 else None
    folder = Path(comm.broadcast_json(str(folder)))
    trainer = trainer_of(comm, "gpt tied", folder, dp=2, tp=2)
    trainer.save()
    comm.barrier()
    [place] = (folder / "checkpoints").iterdir()
    assert sorted(p.name for p in place.glob("*.safetensors")) == [
        "arrays-0.safetensors", "arrays-1.safetensors"
    ]  # fmt: skip
    written = [load_file(place / f"arrays-{rank}.safetensors") for rank in (0, 1)]
    # Three arrays a parameter, each number once: no padding, no second copy.
    n_written = sum(array.size for arrays in written for array in arrays.values())
    assert n_written == 3 * trainer.n_parameters
    assert "ln.weight" in written[0]
    assert "ln.weight" not in written[1]
    assert written[1]["tok.weight"].shape == (257 - 129, 24)
    index = json.loads((place / "index.json").read_text())
    arrays = index["files"]["arrays-1.safetensors"]["arrays"]
    assert arrays["adam.v.blocks.1.qkv.weight"] == {
        "shape": [72, 24], "dim": 0, "runs": [[12, 24], [36, 48], [60, 72]]
    }  # fmt: skip
