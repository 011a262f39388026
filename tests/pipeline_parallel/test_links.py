"""Slots in node memory carry what messages carry, and stages compute straight into them."""

import numpy as np
import pytest

from mpipar import ThreadWorld
from mpipar.comm.port import HEADER_BYTES, NodePort
from mpipar.errors import CollectiveMismatch
from mpipar.models import GPTConfig, LlamaConfig, build_model
from mpipar.models.parts import Streams
from mpipar.models.stage import ModelStage
from mpipar.pipeline_parallel import build_schedule, parse_schedule
from mpipar.pipeline_parallel.executor import PipelineExecutor
from mpipar.pipeline_parallel.links import MessageLinks, SlotLinks
from tests.pipeline_parallel.chain import chain, defined_schedules, inputs, reference, weights

CONFIGS = {
    "gpt": GPTConfig(n_layers=4, width=8, n_heads=2, vocabulary=29, sequence=12),
    "llama": LlamaConfig(n_layers=4, width=8, n_heads=2, vocabulary=29, sequence=12),
}


def chain_step(comm, schedule):
    """Loss and gradients of a chain, by stage, and what carried them."""
    stages = chain(schedule, comm.rank)
    executor = PipelineExecutor(comm, schedule, stages)
    executor.step()
    return {s: (t.loss, t.gradient) for s, t in stages.items()}, type(executor.links)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_every_schedule_gives_bitwise_what_messages_give(n):
    for schedule in defined_schedules(n, (1, 3, 8) if n < 4 else (5,)):
        apart = ThreadWorld(n).run(chain_step, schedule)
        shared = ThreadWorld(n, node_size=n).run(chain_step, schedule)
        for (wanted, first), (found, second) in zip(apart, shared, strict=True):
            assert (first, second) == (MessageLinks, SlotLinks)
            for s, (loss, gradient) in wanted.items():
                assert found[s][0] == loss
                np.testing.assert_array_equal(found[s][1], gradient)


def model_step(comm, name, into, recompute=False, n_microbatches=5, schedule_name="1f1b", cuts=()):
    """Loss, gradients and copies of a small model on stages."""
    schedule = build_schedule(schedule_name, comm.size, n_microbatches)
    model = build_model(CONFIGS[name])
    cuts = cuts or [4 * s // schedule.n_stages for s in range(schedule.n_stages + 1)]
    stages = {
        s: ModelStage(
            model, range(cuts[s], cuts[s + 1]), s == 0, s == schedule.n_stages - 1, np.float64,
            recompute and s < schedule.n_stages - 1,
        )
        for s in schedule.stages_of(comm.rank)
    }  # fmt: skip
    for stage in stages.values():
        stage.computes_into = into
    names = [n for stage in stages.values() for n in stage.names()]
    parameters = model.init(3, np.float64, names)
    gradients = {n: np.zeros_like(p) for n, p in parameters.items()}
    rng = np.random.default_rng(4)
    rows = [rng.integers(0, 29, (2, 13)) for _ in range(n_microbatches - 1)]
    rows.append(rng.integers(0, 29, (1, 13)))  # an uneven last one
    executor = PipelineExecutor(comm, schedule, stages, pool=model.workspace)
    copies = []
    for _ in range(2):
        for stage in stages.values():
            stage.begin(parameters, gradients, rows, 0.1, [Streams(None) for _ in rows])
        executor.step()
        copies.append(getattr(executor.links, "n_copied", None))
    lowered = executor.schedule
    low, high = lowered.offsets[comm.rank : comm.rank + 2]
    sends = sum("SEND" in str(lowered.action(i)) for i in range(low, high))
    return sum(s.loss for s in stages.values()), gradients, copies, sends


@pytest.mark.parametrize("name", list(CONFIGS))
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("n", [2, 4])
def test_a_model_computes_into_the_slots_and_copies_nothing(n, name, recompute):
    apart = ThreadWorld(n).run(model_step, name, True, recompute)
    shared = ThreadWorld(n, node_size=n).run(model_step, name, True, recompute)
    for (loss, wanted, none, _), (found, gradients, copies, sends) in zip(
        apart, shared, strict=True
    ):
        assert none == [None, None]
        assert copies == [0, 0]
        assert sends >= 5
        assert found == loss
        for key, gradient in wanted.items():
            np.testing.assert_array_equal(gradients[key], gradient)


def test_a_stage_that_cannot_compute_into_slots_is_counted():
    for _, _, copies, sends in ThreadWorld(2, node_size=2).run(model_step, "gpt", False):
        assert copies == [sends, sends]


def test_a_stage_without_layers_hands_its_input_on():
    apart = ThreadWorld(4).run(model_step, "gpt", True, False, 3, "1f1b", (0, 0, 1, 1, 4))
    shared = ThreadWorld(4, node_size=4).run(
        model_step, "gpt", True, False, 3, "1f1b", (0, 0, 1, 1, 4)
    )
    for (loss, wanted, *_), (found, gradients, *_) in zip(apart, shared, strict=True):
        assert found == loss
        for key, gradient in wanted.items():
            np.testing.assert_array_equal(gradients[key], gradient)


def test_more_results_than_slots_wait_in_line_and_none_is_lost():
    """GPipe gives eight activations before the first gradient; there are four slots."""
    apart = ThreadWorld(3).run(model_step, "gpt", True, False, 11, "gpipe")
    shared = ThreadWorld(3, node_size=3).run(model_step, "gpt", True, False, 11, "gpipe")
    for (loss, wanted, *_), (found, gradients, *_) in zip(apart, shared, strict=True):
        assert found == loss
        for key, gradient in wanted.items():
            np.testing.assert_array_equal(gradients[key], gradient)


def test_a_result_that_leaves_before_an_earlier_one_does_not_overwrite_it():
    schedule = parse_schedule("""schedule twisted ranks=2 stages=2 microbatches=2 placement=loop
rank 0: 0F0 0F1 0SEND_F1 0SEND_F0 0RECV_B1 0B1 0RECV_B0 0B0
rank 1: 1RECV_F1 1RECV_F0 1F1 1B1 1SEND_B1 1F0 1B0 1SEND_B0
""")

    def body(comm):
        stages = chain(schedule, comm.rank)
        for stage in stages.values():
            stage.computes_into = True
            for verb in ("forward", "backward", "backward_input"):
                plain = getattr(stage, verb)

                def into(m, x, out=None, plain=plain):
                    y = plain(m, None if x is None else x.copy())
                    if y is None or out is None:
                        return y
                    out[...] = y
                    return out

                if verb != "backward_input":  # which backward calls itself
                    setattr(stage, verb, into)
        PipelineExecutor(comm, schedule, stages).step()
        return [(s, t.gradient) for s, t in stages.items()]

    _, expected = reference(weights(2), inputs(2))
    for rows in ThreadWorld(2, node_size=2).run(body):
        for s, gradient in rows:
            np.testing.assert_allclose(gradient, expected[s], rtol=1e-12)


def test_too_little_node_memory_on_one_rank_leaves_it_to_messages(monkeypatch):
    take = NodePort.take

    def short(port, n_bytes):
        full = port._group.rank == 1 and n_bytes > HEADER_BYTES
        return -1 if full else take(port, n_bytes)

    monkeypatch.setattr(NodePort, "take", short)
    schedule = build_schedule("1f1b", 3, 4)
    _, expected = reference(weights(3), inputs(4))
    for found, kind in ThreadWorld(3, node_size=3).run(chain_step, schedule):
        assert kind is MessageLinks
        for s, (_, gradient) in found.items():
            np.testing.assert_allclose(gradient, expected[s], rtol=1e-12)


@pytest.mark.parametrize("place", ["forward", "backward_input", "backward_weight"])
@pytest.mark.parametrize("name", ["gpipe", "zb-h1"])
def test_a_stage_that_raises_ends_the_step_and_the_slots_can_be_used_again(place, name):
    schedule = build_schedule(name, 3, 7)

    def body(comm):
        stages = chain(schedule, comm.rank)
        executor = PipelineExecutor(comm, schedule, stages)

        def failing(m, *_):
            raise ArithmeticError(f"at {m}")

        raised = None
        if comm.rank == 1:
            setattr(stages[1], place, failing)
        try:
            executor.step()
        except (ArithmeticError, CollectiveMismatch) as error:
            raised = error
        for s, stage in chain(schedule, comm.rank).items():
            stages[s].__dict__.clear()
            stages[s].__dict__.update(stage.__dict__)
        executor.step()
        return raised, [(s, t.gradient) for s, t in stages.items()]

    _, expected = reference(weights(3), inputs(7))
    for rank, (raised, rows) in enumerate(ThreadWorld(3, node_size=3).run(body)):
        if rank == 1:
            assert isinstance(raised, ArithmeticError)
        elif place == "forward":
            assert "has got no microbatch" in str(raised)
        for s, gradient in rows:
            np.testing.assert_allclose(gradient, expected[s], rtol=1e-12, atol=1e-15)
