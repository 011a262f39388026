"""The founding surface: its counts, and the order that its own 1F1B violated."""

import pytest

from mpipar.errors import CountOutOfRange
from mpipar.pipeline_parallel import PipelineConfig, ScheduleKind, ScheduleStep, StageOp


@pytest.mark.parametrize("kind", ScheduleKind)
@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 2), (4, 8), (8, 8), (3, 1)])
def test_slots(kind: ScheduleKind, p: int, m: int) -> None:
    slots = PipelineConfig(p, m).build_schedule(kind)
    assert (slots.num_stages, slots.num_microbatches) == (p, m)
    assert slots.total_steps == 2 * (p + m - 1)
    assert slots.bubble_steps == p * 2 * (p - 1)
    assert slots.bubble_ratio == pytest.approx((p - 1) / (p + m - 1))
    ran = {
        (step.op, step.stage, step.microbatch): step.time
        for stage in range(p)
        for step in slots.steps(stage)
        if step.op is not StageOp.Idle
    }
    assert len(ran) == 2 * p * m
    for (op, stage, number), time in ran.items():
        if op is StageOp.Forward and stage:
            assert ran[op, stage - 1, number] < time
        if op is StageOp.Backward:
            assert ran[StageOp.Forward, stage, number] < time
            assert stage == p - 1 or ran[op, stage + 1, number] < time


def test_four_by_eight() -> None:
    slots = PipelineConfig(4, 8).build_schedule(ScheduleKind.OneForwardOneBackward)
    assert slots.total_steps == 22
    assert slots.steps(0)[0] == ScheduleStep(0, 0, StageOp.Forward, 0)
    assert [step.stage for step in slots.at_time(4)] == [0, 1, 2, 3]
    assert slots.at_time(4)[3] == ScheduleStep(3, 4, StageOp.Backward, 0)
    assert slots.at_time(22) == ()
    assert slots.at_time(-1) == ()


def test_gpipe_runs_backward_in_reverse() -> None:
    slots = PipelineConfig(2, 3).build_schedule(ScheduleKind.GPipe)
    backward = [s.microbatch for s in slots.steps(1) if s.op is StageOp.Backward]
    assert backward == [2, 1, 0]


def test_counts_are_checked() -> None:
    with pytest.raises(CountOutOfRange, match="num_stages"):
        PipelineConfig(0, 1)
    with pytest.raises(CountOutOfRange):
        PipelineConfig(1, 1).build_schedule(ScheduleKind.GPipe).steps(1)
