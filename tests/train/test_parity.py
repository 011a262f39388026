"""Training gives the same numbers on any number of data-parallel ranks, in float64.

The same bodies run on threads and on real ranks. What keeps them honest: ranks are distinct, each
sees its share of the rows only, the transport counts the bytes of the formula, and what a peer
computes changes my result.
"""

import dataclasses
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import mpipar.errors
from mpipar.comm import Communicator, IdentityCommunicator, Op
from mpipar.models import GPTConfig
from mpipar.train import Recipe, Trainer
from mpipar.train.recipe import DataRecipe, RunRecipe, TrainRecipe
from mpipar.train.run_folder import read_metrics

pytestmark = pytest.mark.ranks(1, 2, 3, 4)

STEPS, BATCH = 20, 12
MODEL = GPTConfig(n_layers=2, width=8, n_heads=2, sequence=6)
# Width d: 256 d in and out, 6 d positions, blocks of 12 d^2 weights and 13 d vectors, a norm.
N_PARAMETERS = 2 * 256 * 8 + 6 * 8 + 2 * (12 * 64 + 13 * 8) + 2 * 8
RECIPE = Recipe(
    model=MODEL,
    data=DataRecipe(path=mpipar.errors.__file__),
    # The gradient of a key bias is zero but for rounding, of the order 1e-17; AdamW divides it by
    # its own size plus eps, and an eps of 1e-8 would make 1e-9 of a learning rate out of it.
    train=TrainRecipe(
        steps=STEPS,
        batch=BATCH,
        dtype="float64",
        learning_rate=0.02,
        warmup_steps=3,
        eps=1e-5,
        seed=7,
    ),
    run=RunRecipe(held_out_sequences=20, checkpoint_every=10),
)


def changed(recipe=RECIPE, **train):
    return dataclasses.replace(recipe, train=dataclasses.replace(recipe.train, **train))


def run(comm, recipe=RECIPE, steps=STEPS):
    """Train; the trainer, and loss, norm and learning rate of each step."""
    trainer = Trainer(comm, recipe)
    results = [trainer.train_step() for _ in range(steps)]
    return trainer, np.array([[r.loss, r.gradient_norm, r.learning_rate] for r in results])


def assert_same_numbers(trainer, curve, other_trainer, other_curve):
    """To 1e-12 relative: of each number of the curve, and of the largest of each parameter."""
    np.testing.assert_allclose(curve, other_curve, rtol=1e-12, atol=0)
    parameters, others = trainer.dp.parameters, other_trainer.dp.parameters
    assert parameters.keys() == others.keys()
    for name, array in parameters.items():
        assert array.dtype == np.float64
        distance = np.abs(array - others[name]).max()
        assert distance <= 1e-12 * np.abs(others[name]).max(), name


def watch(trainer):
    """What this rank gives to the transport, and the positions in the data that it reads."""
    group, sampler = trainer.dp.comm, trainer.sampler
    calls, positions = [], []
    submit, rows = group.submit, sampler.rows

    def counted_submit(call):
        calls.append(call)
        return submit(call)

    def noted_rows(start, stop):
        positions.extend(range(start, stop))
        return rows(start, stop)

    group.submit, sampler.rows = counted_submit, noted_rows
    return calls, positions


@pytest.mark.parametrize("microbatches", [1, 3])
def test_the_curve_and_the_parameters_are_those_of_one_rank(comm: Communicator, microbatches: int):
    together = run(comm, changed(microbatches=microbatches))
    alone = run(IdentityCommunicator())
    assert alone[0].n_rows_seen == STEPS * BATCH
    assert alone[1][0, 0] == pytest.approx(np.log(256), rel=0.1)
    assert alone[1][-1, 0] < alone[1][0, 0] - 0.5  # it has learned something on the way
    assert_same_numbers(*together, *alone)
    assert together[0].held_out_loss() == pytest.approx(alone[0].held_out_loss(), rel=1e-12)


def test_ranks_are_distinct_and_each_sees_its_share_and_sends_the_bytes(comm: Communicator):
    me = [os.getpid(), threading.get_ident()]
    assert len({tuple(other) for other in comm.all_gather_json(me)}) == comm.size

    trainer = Trainer(comm, RECIPE)
    calls, positions = watch(trainer)
    for _ in range(STEPS):
        trainer.train_step()
    # Rows: every rank its own part of each batch, together each row of the run once.
    share = BATCH // comm.size
    assert trainer.n_rows_seen == len(positions) == STEPS * share
    everyone = comm.all_gather(np.array(positions))
    assert sorted(everyone.tolist()) == list(range(STEPS * BATCH))
    # Bytes: each gradient once a step in float64, and the loss.
    sums = [c for c in calls if c.op is Op.ALL_REDUCE]
    gradients = [c.n_bytes for c in sums if not c.blocking]
    assert sum(gradients) == STEPS * N_PARAMETERS * 8
    assert trainer.n_parameters == N_PARAMETERS
    assert trainer.dp.communicates == (Op.ALL_REDUCE, N_PARAMETERS * 8)


def test_what_a_peer_reads_changes_my_result(comm: Communicator):
    _, curve = run(comm, steps=2)
    trainer = Trainer(comm, RECIPE)
    peer = comm.size - 1
    if comm.rank == peer:
        sampler = trainer.sampler
        sampler._text = np.ascontiguousarray(sampler._text[::-1])
    disturbed = [trainer.train_step() for _ in range(2)]
    for i, result in enumerate(disturbed):
        assert abs(result.loss - curve[i, 0]) > 1e-6
        assert abs(result.gradient_norm - curve[i, 1]) > 1e-6


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_two_runs_with_one_seed_are_bitwise_equal(comm: Communicator, dtype: str):
    recipe = changed(dtype=dtype, microbatches=2)
    (first, curve), (second, again) = run(comm, recipe, steps=8), run(comm, recipe, steps=8)
    np.testing.assert_array_equal(curve, again)
    for name, array in first.dp.parameters.items():
        np.testing.assert_array_equal(array, second.dp.parameters[name])
    _, other = run(comm, changed(dtype=dtype, microbatches=2, seed=8), steps=2)
    assert (other[:, 0] != curve[:2, 0]).all()
    # Every rank tells the same numbers.
    curves = comm.all_gather(curve[None])
    np.testing.assert_array_equal(curves, np.broadcast_to(curve, curves.shape))


@contextmanager
def shared_folder(comm: Communicator) -> Iterator[Path]:
    """A new folder of all ranks, until all have left it."""
    made = tempfile.mkdtemp(prefix="mpipar-parity-") if comm.rank == 0 else None
    yield (folder := Path(comm.broadcast_json(made)))
    comm.barrier()
    if comm.rank == 0:
        shutil.rmtree(folder)


def test_going_on_at_another_degree_continues_the_curve(comm: Communicator):
    """All ranks stop after 10 of 20 steps; all but one, or one alone, go on."""
    expected_trainer, expected = run(IdentityCommunicator())
    with shared_folder(comm) as folder:
        stopped = Trainer(comm, RECIPE, folder)
        for _ in range(10):
            stopped.train_step()
        stopped.save()
        for n_ranks in sorted({max(1, comm.size - 1), 1}):
            group = comm.split(0 if comm.rank < n_ranks else None)
            if group is None:
                continue
            trainer = Trainer(group, RECIPE, folder)
            assert trainer.resume() == 10
            rest = [trainer.train_step() for _ in range(10)]
            curve = np.array([[r.loss, r.gradient_norm, r.learning_rate] for r in rest])
            assert_same_numbers(trainer, curve, expected_trainer, expected[10:])
            assert trainer.n_rows_seen == 10 * BATCH // n_ranks
            group.close()


class Stop(Exception):
    """A run is cut off."""


def cut_off(trainer, after):
    """Make a trainer raise `Stop` before the step that follows step `after`."""
    step = trainer.train_step

    def stopping():
        if trainer.step == after:
            raise Stop
        return step()

    trainer.train_step = stopping


def test_a_run_that_was_cut_off_and_goes_on_has_the_same_metrics(comm: Communicator):
    """The lines after the last checkpoint are written again, equal to the bit."""
    with shared_folder(comm) as whole, shared_folder(comm) as cut:
        Trainer(comm, RECIPE, whole).run()
        interrupted = Trainer(comm, RECIPE, cut)
        cut_off(interrupted, after=13)
        lines: list[str] = []
        with pytest.raises(Stop):
            interrupted.run(lines.append)
        assert bool(lines) == (comm.rank == 0)
        comm.barrier()
        again = Trainer(comm, RECIPE, cut)
        assert again.resume() == 10
        again.run()
        comm.barrier()
        keys = ("step", "loss", "gradient_norm", "learning_rate")
        curves = [[[r[k] for k in keys] for r in read_metrics(f)] for f in (whole, cut)]
        assert len(curves[0]) == STEPS
        assert curves[0] == curves[1]
