"""A GPT on a pipeline of stages gives the numbers of one rank, in float64, under every schedule.

The reference is the whole model, one microbatch after the other. The same bodies run on threads
and on real ranks.
"""

import dataclasses
import functools
import os
import threading

import numpy as np
import pytest

import mpipar.errors
from mpipar.comm import Communicator, IdentityCommunicator, Op
from mpipar.errors import RecipeError, ScheduleError
from mpipar.mesh.mesh import Mesh
from mpipar.models import GPTConfig, LlamaConfig, build_model
from mpipar.pipeline_parallel import (
    SCHEDULE_NAMES,
    Costs,
    Kind,
    build_schedule,
    format_schedule,
    peak_memory,
)
from mpipar.pipeline_parallel.generate import chunks_per_rank
from mpipar.train import Recipe, Trainer
from mpipar.train.engine import build_engine
from mpipar.train.recipe import DataRecipe, MeshRecipe, RunRecipe, TrainRecipe
from tests.pipeline_parallel.chain import is_real, microbatches, synchronous

MODEL = GPTConfig(n_layers=8, width=8, n_heads=2, sequence=4, vocabulary=11)
SCALE = 0.125


def batch(m, n_rows=None, seed=3):
    """Microbatches of one or two rows, the last ones smaller."""
    rows = np.random.default_rng(seed).integers(0, 11, (n_rows or 2 * m - m // 2, 5))
    return np.array_split(rows, m)


def noise(m, model):
    return [np.random.default_rng(i) if model.dropout else None for i in range(m)]


def recipe_of(model=MODEL, pp=1, schedule="1f1b", m=1, **train):
    return Recipe(
        model=model,
        mesh=MeshRecipe(pp=pp),
        train=TrainRecipe(schedule=schedule, microbatches=m, dtype="float64", batch=m, **train),
    )


@functools.cache
def one_rank(model, m, n_rows=None):
    """Loss, gradients and norm of the whole model."""
    parts = batch(m, n_rows)
    whole = build_model(model)
    parameters = whole.init(0, np.float64)
    gradients = {n: np.zeros_like(p) for n, p in parameters.items()}
    loss = 0.0
    for i, (rows, generator) in enumerate(zip(parts, noise(len(parts), model), strict=True)):
        value, context = whole.forward(parameters, rows[:, :-1], rows[:, 1:], SCALE, generator)
        whole.backward(parameters, context, gradients, i > 0)
        loss += value
    norm = np.sqrt(sum(float((g**2).sum()) for g in gradients.values()))
    return loss, gradients, norm


def share(parts, dp, rank):
    """The rows of each microbatch that belong to one data-parallel rank."""
    return [np.array_split(rows, dp)[rank] for rows in parts]


def compare(comm, recipe, parts, expected, is_bitwise=False):
    """Two steps on the ranks of `comm` against the expected loss, gradients and norm."""
    with Mesh(comm, pp=recipe.mesh.pp, dp=None) as mesh:
        engine = build_engine(mesh, recipe, np.dtype("f8"))
        mine = share(parts, mesh.degree("dp"), mesh.coordinate["dp"])
        n_allocated = []
        for _ in range(2):
            loss = engine.run(mine, noise(len(parts), recipe.model), SCALE)
            loss = float(comm.all_reduce(np.array(loss)))
            n_allocated.append(engine.model.workspace.n_allocations)
        assert engine.model.workspace.lent_bytes == 0
        if not is_real(comm):  # threads are repeatable, messages of processes are not
            assert n_allocated[0] == n_allocated[1]
        for name, gradient in engine.dp.gradients.items():
            wanted = expected[1][name]
            if is_bitwise:
                np.testing.assert_array_equal(gradient, wanted)
            assert np.abs(gradient - wanted).max() <= 1e-12 * np.abs(wanted).max() + 1e-18, name
        assert loss == expected[0] if is_bitwise else abs(loss / expected[0] - 1) <= 1e-12
        assert abs(engine.gradient_norm() / expected[2] - 1) <= 1e-12
        names = comm.all_gather_json(sorted(engine.dp.gradients))
        assert set().union(*names) == set(expected[1])
        return engine


def keeps_order(schedule):
    """Whether each stage adds its weight gradients in the order of the microbatches."""
    adds = (schedule.kind == Kind.W) | (schedule.kind == Kind.B)
    orders = [schedule.microbatch[adds & (schedule.stage == s)] for s in range(schedule.n_stages)]
    return all((np.diff(order) > 0).all() for order in orders)


def refusal_of(name, n_ranks, m):
    """Why a schedule is not defined; None where it is."""
    try:
        build_schedule(name, n_ranks, m)
    except ScheduleError as error:
        return str(error)
    return None


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("name", SCHEDULE_NAMES)
@pytest.mark.parametrize("is_synchronous", [False, True], ids=["eager", "synchronous"])
def test_every_schedule_gives_the_numbers_of_one_rank(comm: Communicator, name, is_synchronous):
    model = dataclasses.replace(MODEL, n_layers=comm.size * chunks_per_rank(name))
    for m in microbatches(comm, is_synchronous):
        recipe = recipe_of(model, comm.size, name, m)
        refusal = refusal_of(name, comm.size, m)
        if refusal is None:
            in_order = keeps_order(build_schedule(name, comm.size, m))
            assert in_order or name == "gpipe"
            with synchronous(comm, is_synchronous):
                compare(comm, recipe, batch(m), one_rank(model, m), in_order)
        elif comm.size > 1:
            with pytest.raises(ScheduleError) as raised:
                build_engine(Mesh(comm, pp=comm.size), recipe, np.dtype("f8"))
            assert str(raised.value) == refusal


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize(
    "changes", [{"tied": True}, {"dropout": 0.3}, {"tied": True, "label_smoothing": 0.1}]
)
@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-v", "zb-h1"])
def test_tied_embeddings_and_dropout_are_those_of_one_rank(comm: Communicator, name, changes):
    model, parts = dataclasses.replace(MODEL, **changes), batch(4)
    compare(comm, recipe_of(model, comm.size, name, 4), parts, one_rank(model, len(parts)))


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-v", "zb-h2"])
def test_recomputing_activations_changes_no_bit(comm: Communicator, name):
    model = dataclasses.replace(MODEL, dropout=0.2)
    parts = batch(4)
    recipe = recipe_of(model, comm.size, name, 4, recompute=True)
    expected = one_rank(model, len(parts))
    compare(comm, recipe, parts, expected, name != "gpipe")


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", ["1f1b", "zb-v", "zb-h1"])
@pytest.mark.parametrize(
    "changes", [{}, {"tied": True, "dropout": 0.3}, {"tied": True, "recompute": True}], ids=str
)
def test_a_llama_is_that_of_one_rank(comm: Communicator, name, changes):
    train = {"recompute": True} if "recompute" in changes else {}
    shape = {key: value for key, value in changes.items() if key not in train}
    model = LlamaConfig(
        n_layers=6, width=16, n_heads=4, n_kv_heads=2, sequence=4, vocabulary=11, hidden=12, **shape
    )
    recipe = recipe_of(model, comm.size, name, 4, **train)
    compare(comm, recipe, batch(4), one_rank(model, 4))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("model", [MODEL, dataclasses.replace(MODEL, tied=True)], ids=["", "tied"])
@pytest.mark.parametrize("name", ["1f1b", "zb-v", "dualpipe-v"])
def test_pipeline_and_data_parallelism_together(comm: Communicator, name, model):
    compare(comm, recipe_of(model, 2, name, 4), batch(4, 16), one_rank(model, 4, 16))


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("stages", ["balanced", "last", "first", "middle"])
def test_layers_go_where_the_recipe_says_also_to_stages_without_any(comm: Communicator, stages):
    n, model = comm.size, dataclasses.replace(MODEL, n_layers=3)
    sizes = {"last": [0] * (n - 1) + [3], "first": [3] + [0] * (n - 1)}
    sizes["middle"] = [2, 0, 1][:n] if n == 3 else [1, 2]
    how = ",".join(map(str, sizes[stages])) if stages in sizes else stages
    parts = batch(3)
    engine = compare(
        comm, recipe_of(model, n, "1f1b", 3, stages=how), parts, one_rank(model, len(parts))
    )
    held = comm.all_gather_json([len(s.layers) for s in engine.stages.values()])
    if stages in sizes:
        assert [k for each in held for k in each] == sizes[stages]


@pytest.mark.ranks(2)
def test_stages_that_do_not_fit_are_refused_on_every_rank(comm: Communicator):
    def build(**train):
        recipe = recipe_of(dataclasses.replace(MODEL, n_layers=1), 2, m=2, **train)
        build_engine(Mesh(comm, pp=2), recipe, np.dtype("f8"))

    with pytest.raises(RecipeError, match="n_layers=1 cannot fill 2 stages; n_layers=2 would do"):
        build()
    with pytest.raises(RecipeError, match="must give 2 numbers whose sum is"):
        build(stages="1,1")
    with pytest.raises(RecipeError, match="write uniform, balanced, or the layers"):
        build(stages="even")
    with pytest.raises(ScheduleError, match="did you mean"):
        build(schedule="1f1bb")
    with pytest.raises(ScheduleError, match="cannot read the schedule"):
        build(schedule="nowhere.txt")


@pytest.mark.ranks(2)
def test_a_schedule_file_runs_and_a_wrong_one_is_refused_with_the_grid(
    comm: Communicator, tmp_path
):
    good, parts = build_schedule("zb-h1", 2, 3), batch(3)
    path = tmp_path / f"mine-{comm.rank}.txt"
    path.write_text(format_schedule(good))
    compare(comm, recipe_of(MODEL, 2, str(path), 3), parts, one_rank(MODEL, len(parts)), True)
    with pytest.raises(RecipeError, match="for 2 ranks and 3 microbatches"):
        build_engine(Mesh(comm, pp=2), recipe_of(MODEL, 2, str(path), 4), np.dtype("f8"))
    path.write_text(format_schedule(good).replace("1I1 ", ""))
    with pytest.raises(ScheduleError, match=r"(?s)1I1 or 1B1 never runs.*rank 0: +0F0.*>end<"):
        build_engine(Mesh(comm, pp=2), recipe_of(MODEL, 2, str(path), 3), np.dtype("f8"))


# -- honesty --------------------------------------------------------------------------------


def watch(comm):
    """Calls that this rank gives to the transport."""
    calls, submit = [], comm.submit

    def noting(call):
        calls.append(call)
        return submit(call)

    comm.submit = noting
    return calls


@pytest.mark.ranks(2, 4)
def test_ranks_hold_their_stages_only_and_send_the_bytes_of_the_formula(comm: Communicator):
    me = [os.getpid(), threading.get_ident()]
    assert len({tuple(other) for other in comm.all_gather_json(me)}) == comm.size
    n, m = comm.size, 5
    engine = build_engine(Mesh(comm, pp=n), recipe_of(pp=n, m=m), np.dtype("f8"))
    parts = batch(m)
    n_rows = sum(len(part) for part in parts)
    block = 12 * 8 * 8 + 13 * 8
    ends = {0: (11 + 4) * 8, n - 1: (11 + 2) * 8}
    held = sum(p.size for p in engine.dp.parameters.values())
    assert held == 8 // n * block + ends.get(comm.rank, 0)
    calls = watch(engine.pp)
    engine.run(parts, noise(m, MODEL), SCALE)
    del engine.pp.submit
    links = engine.executor.links
    by_messages = sum(c.n_bytes for c in calls if c.op is Op.SEND)
    n_directions = (comm.rank > 0) + (comm.rank < n - 1)
    sent = by_messages
    if engine.pp.shares_memory:  # two ends of 16 bytes a neighbour, and no array
        assert (by_messages, links.n_copied) == (2 * 16 * n_directions, 0)
        sent = links.sent_bytes
    assert sent == n_directions * n_rows * 4 * 8 * 8  # tokens, width, float64


@pytest.mark.ranks(2, 4)
def test_a_peer_with_other_parameters_changes_my_gradients(comm: Communicator):
    gradients = []
    for factor in (1.0, 1.01):
        engine = build_engine(
            Mesh(comm, pp=comm.size), recipe_of(pp=comm.size, m=2), np.dtype("f8")
        )
        if comm.rank == comm.size - 1:
            for array in engine.dp.parameters.values():
                array *= factor
        engine.run(batch(2), noise(2, MODEL), SCALE)
        gradients.append({n: g.copy() for n, g in engine.dp.gradients.items()})
    for name, before in gradients[0].items():
        if not name.endswith("qkv.bias"):
            assert np.abs(gradients[1][name] - before).max() > 1e-7, name


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v"])
def test_activations_held_between_actions_are_those_of_the_simulation(comm: Communicator, name):
    n, m = comm.size, 4
    recipe = recipe_of(pp=n, schedule=name, m=m)
    engine = build_engine(Mesh(comm, pp=n), recipe, np.dtype("f8"))
    most = [0.0]
    held = {}
    for stage in engine.stages.values():

        def counted(number, *given, call=stage.forward, stage=stage):
            y = call(number, *given)
            held[id(stage), number] = sum(
                a.nbytes
                for a in {id(v): v for s in stage._saved[number] for v in s.values()}.values()
                if isinstance(a, np.ndarray) and a.shape[:2] == (1, 4) and a.ndim == 3  # of tokens
            )
            most[0] = max(most[0], sum(held.values()))
            return y

        def freed(number, *given, call=None, stage=stage):
            result = call(number, *given)
            held.pop((id(stage), number))
            return result

        stage.forward = counted
        for method in ("backward", "backward_weight"):
            call = getattr(stage, method)
            setattr(stage, method, lambda i, *g, f=freed, c=call: f(i, *g, call=c))
    engine.run([np.zeros((1, 5), int)] * m, noise(m, MODEL), SCALE)
    schedule = engine.executor.schedule
    # A block of 16 widths; head: two widths and the logits.
    whole = 8 // n * 16 * 8 * 4 * 8
    head = (2 * 8 + 11) * 4 * 8
    peak = float(peak_memory(schedule, Costs(held_for_weight=1))[comm.rank])
    has_head = schedule.stage_to_rank[-1] == comm.rank
    assert peak * whole <= most[0] <= peak * whole + has_head * m * head
    assert not held


# -- whole runs -----------------------------------------------------------------------------


def trainer_of(comm, folder, pp=1, **train):
    recipe = Recipe(
        model=dataclasses.replace(MODEL, vocabulary=256, tied=True, n_layers=4),
        data=DataRecipe(path=mpipar.errors.__file__),
        mesh=MeshRecipe(pp=pp),
        train=TrainRecipe(
            steps=6, batch=8, microbatches=4, dtype="float64", warmup_steps=2, eps=1e-5,
            clip_norm=0.05, **train,
        ),
        run=RunRecipe(held_out_sequences=10),
    )  # fmt: skip
    return Trainer(comm, recipe, folder)


def curve(trainer, n_steps):
    results = [trainer.train_step() for _ in range(n_steps)]
    return [[r.loss, r.gradient_norm] for r in results]


@pytest.mark.ranks(4)
def test_a_run_goes_on_at_another_mesh(comm: Communicator, tmp_path_factory):
    alone = trainer_of(IdentityCommunicator(), None)
    expected = curve(alone, 6)
    assert expected[0][1] > 0.05  # it is clipped
    folder = tmp_path_factory.mktemp("run") if comm.rank == 0 else None
    folder = type(tmp_path_factory.getbasetemp())(comm.broadcast_json(str(folder)))
    pair = comm.split(comm.rank // 2)
    if comm.rank < 2:
        first = trainer_of(pair, folder, pp=2, schedule="zb-h1")
        found = curve(first, 3)
        np.testing.assert_allclose(found, expected[:3], rtol=1e-12)
        first.save()
    comm.barrier()
    for group, pp, schedule in ((comm, 4, "1f1b"), (comm, 2, "zb-v"), (pair, 1, "1f1b")):
        again = trainer_of(group, folder, pp=pp, schedule=schedule)
        assert again.resume() == 3
        np.testing.assert_allclose(curve(again, 3), expected[3:], rtol=1e-12)
        assert again.held_out_loss() == pytest.approx(alone.held_out_loss(), rel=1e-12)


@pytest.mark.ranks(2)
def test_a_run_shows_its_timeline_when_asked(comm: Communicator, tmp_path):
    folder = tmp_path / str(comm.rank)
    folder.mkdir()
    trainer = trainer_of(comm, folder, pp=2)
    trainer.recipe = dataclasses.replace(
        trainer.recipe,
        train=dataclasses.replace(trainer.recipe.train, steps=2),
        run=dataclasses.replace(trainer.recipe.run, timeline=True, checkpoint_every=0),
    )
    trainer.save = lambda: None
    said = []
    trainer.run(said.append)
    assert any("measured" in text and "simulated" in text for text in said) == (comm.rank == 0)
    assert (folder / "timeline.json").exists() == (comm.rank == 0)
