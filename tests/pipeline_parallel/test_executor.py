"""The executor runs what the validator allows, gives the sums of one rank, and tells both sides."""

import os
import threading
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest

from mpipar.comm import Communicator, Op, ThreadWorld
from mpipar.errors import CollectiveMismatch, ParallelismError, ScheduleError
from mpipar.pipeline_parallel import (
    Costs,
    Kind,
    PipelineExecutor,
    build_schedule,
    compare_timelines,
    format_schedule,
    load_measured,
    measured_costs,
    parse_schedule,
    peak_memory,
    read_schedule,
    save_measured,
)
from tests.pipeline_parallel.chain import (
    WIDTH,
    chain,
    defined_schedules,
    inputs,
    microbatches,
    reference,
    rows_of,
    synchronous,
    weights,
)
from tests.spy import Spy


def assert_near(values, expected):
    scale = max(np.abs(expected).max(), 1e-300)
    assert np.abs(np.asarray(values) - expected).max() <= 1e-12 * scale


class Messages(Spy):
    """Counts messages only."""

    def _bytes(self, call):
        return super()._bytes(call) if call.op is Op.SEND else 0


def run_and_compare(comm, schedule):
    """One step against the reference; bytes, peaks and microbatches against their formulas."""
    stages = chain(schedule, comm.rank)
    spy = Messages(comm)
    executor = PipelineExecutor(spy, schedule, stages)
    spy.reset()
    timeline = executor.step()
    loss, gradients = reference(weights(schedule.n_stages), inputs(schedule.n_microbatches))
    for s, stage in stages.items():
        assert sorted(stage.seen) == list(range(schedule.n_microbatches))
        assert_near(stage.gradient, gradients[s])
        if stage.last:
            assert_near(stage.loss, loss)
    owners = schedule.stage_to_rank.tolist()
    ends = [(a, b) for a, b in pairwise(owners) if a != b]
    n_rows = sum(rows_of(schedule.n_microbatches))
    assert spy.sent["send"] == sum(comm.rank in pair for pair in ends) * n_rows * WIDTH * 8
    expected = peak_memory(schedule, Costs(held_for_weight=1))
    living = next(iter(stages.values())).peak[0]
    assert Fraction(living * schedule.n_ranks, schedule.n_stages) == expected[comm.rank]
    assert executor.gather_timeline(timeline).peak_memory == expected


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("is_synchronous", [False, True], ids=["eager", "synchronous"])
def test_every_schedule_gives_the_sums_of_one_rank(comm: Communicator, is_synchronous: bool):
    n = 0
    with synchronous(comm, is_synchronous):
        for schedule in defined_schedules(comm.size, microbatches(comm, is_synchronous)):
            run_and_compare(comm, schedule)
            n += 1
    assert n >= 6 * len(
        microbatches(comm, is_synchronous)
    )  # most of eight schedules, some of them split too


@pytest.mark.ranks(2, 4)
def test_a_step_repeats_and_a_peer_that_is_disturbed_changes_my_result(comm: Communicator):
    schedule = build_schedule("1f1b", comm.size, 4)
    results = []
    for seeds in ([0] * comm.size, [0] * comm.size, [0] * (comm.size - 1) + [5]):
        stages = chain(schedule, comm.rank, seeds[comm.rank])
        executor = PipelineExecutor(comm, schedule, stages)
        executor.step()
        executor.step()
        results.append(stages[comm.rank].gradient)
    np.testing.assert_array_equal(results[0], results[1])
    assert np.abs(results[0] - results[2]).max() > 1e-3
    me = [os.getpid(), threading.get_ident()]
    assert len({tuple(other) for other in comm.all_gather_json(me)}) == comm.size


class Pool:
    """Counts what is out."""

    def __init__(self):
        self.out, self.most = {}, 0

    def take(self, like, shape):
        array = np.empty(shape, like.dtype)
        self.out[id(array)] = array
        self.most = max(self.most, len(self.out))
        return array

    def give(self, *arrays):
        for array in arrays:
            self.out.pop(id(array), None)


def test_receives_are_posted_one_ahead_and_never_more():
    schedule = build_schedule("gpipe", 3, 8)

    def body(comm):
        pool = Pool()
        stages = chain(schedule, comm.rank)
        for stage in stages.values():
            forward, backward = stage.forward, stage.backward

            def taking(m, x, call=forward):
                pool.give(x)  # the stage's own from here on
                return call(m, x)

            stage.forward = taking
            stage.backward = lambda m, g, call=backward: (pool.give(g), call(m, g))[1]
        PipelineExecutor(comm, schedule, stages, pool=pool).step()
        assert not pool.out
        return pool.most

    # One posted ahead in each channel, and the one computed on.
    assert max(ThreadWorld(3).run(body)) <= 4


# -- what is refused ------------------------------------------------------------------------


def errors_of(n_ranks, body, **options):
    """What each rank raises; a hang is a failure of the world's deadline."""
    results = ThreadWorld(n_ranks, deadline_s=20, **options).run(body, return_errors=True)
    assert all(isinstance(r, Exception) for r in results), results
    return results


def test_a_schedule_from_a_file_runs_and_a_wrong_one_is_refused_everywhere_with_the_grid(tmp_path):
    text = format_schedule(build_schedule("zb-h1", 2, 3)).replace("zb-h1", "mine")
    (tmp_path / "good.txt").write_text(text)
    good = read_schedule(tmp_path / "good.txt")
    ThreadWorld(2).run(run_and_compare, good)

    (tmp_path / "bad.csv").write_text("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n")
    bad = read_schedule(tmp_path / "bad.csv")
    for error in errors_of(2, lambda c: PipelineExecutor(c, bad, chain(bad, c.rank))):
        assert isinstance(error, ScheduleError)
        assert "deadlock" in str(error)
        assert ">0B0<" in str(error) or ">1F1<" in str(error)


def test_schedules_that_differ_between_ranks_or_do_not_fit_are_refused_everywhere():
    pair = (build_schedule("1f1b", 2, 3), build_schedule("gpipe", 2, 3))

    def differ(comm):
        PipelineExecutor(comm, pair[comm.rank], chain(pair[0], comm.rank))

    for error in errors_of(2, differ):
        assert isinstance(error, ScheduleError)
        assert "different schedules" in str(error)

    def wrong_stage(comm):
        PipelineExecutor(comm, pair[0], chain(pair[0], 0))

    for error in errors_of(2, wrong_stage):
        assert "rank 1 owns stages (1,)" in str(error)
    for error in errors_of(3, lambda c: PipelineExecutor(c, pair[0], {})):
        assert "for 2 ranks, the pipeline group has 3" in str(error)


def test_orders_of_a_channel_that_differ_are_refused():
    text = """schedule twisted ranks=2 stages=2 microbatches=2 placement=loop
rank 0: 0F0 0F1 0SEND_F0 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
rank 1: 1RECV_F1 1RECV_F0 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1
"""
    schedule = parse_schedule(text)
    for error in errors_of(2, lambda c: PipelineExecutor(c, schedule, chain(schedule, c.rank))):
        assert isinstance(error, ScheduleError)


def working_afterwards(comm, schedule, broken):
    """Run the broken stages, then good ones on the same group; what the first run raised."""
    executor = PipelineExecutor(comm, schedule, broken)
    raised = None
    try:
        executor.step()
    except Exception as error:
        raised = error
    run_and_compare(comm, schedule)
    return raised


@pytest.mark.ranks(2, 4)
def test_shapes_that_differ_at_a_boundary_are_told_to_every_rank(comm: Communicator):
    schedule = build_schedule("1f1b", comm.size, 3)
    stages = chain(schedule, comm.rank)
    if comm.rank == 1:
        stages[1].rows = [3, 2, 1]
    raised = working_afterwards(comm, schedule, stages)
    assert isinstance(raised, CollectiveMismatch)
    assert "stage 0 gives shape (3, 3) of float64 for microbatch 1" in str(raised)
    assert "stage 1 takes shape (2, 3)" in str(raised)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("is_synchronous", [False, True], ids=["eager", "synchronous"])
def test_a_result_of_a_wrong_shape_is_told_on_both_sides(comm: Communicator, is_synchronous: bool):
    schedule = build_schedule("zb-h1", comm.size, 5)
    stages = chain(schedule, comm.rank)
    if comm.rank == 0:
        forward = stages[0].forward
        stages[0].forward = lambda m, x: forward(m, x)[: None if m != 2 else 2]
    with synchronous(comm, is_synchronous):
        raised = working_afterwards(comm, schedule, stages)
    assert isinstance(raised, CollectiveMismatch)
    if comm.rank == 0:
        assert "stage 0 returned shape (2, 3) of float64 from 0F2 for microbatch 2" in str(raised)
    elif comm.rank == 1:
        assert "stage 1 has got no microbatch 2 from stage 0 (rank 0)" in str(raised)
    else:
        assert f"stage {comm.rank} has got no microbatch" in str(raised)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("place", ["forward", "backward_input", "backward_weight"])
def test_a_stage_that_raises_ends_the_step_of_its_peers(comm: Communicator, place: str):
    schedule = build_schedule("zb-h1", comm.size, 4)
    stages = chain(schedule, comm.rank)
    if comm.rank == 1:

        def failing(m, *_):
            raise ArithmeticError(f"at {m}")

        setattr(stages[1], place, failing)
    raised = working_afterwards(comm, schedule, stages)
    if comm.rank == 1:
        assert isinstance(raised, ArithmeticError)
    else:
        assert raised is None or isinstance(raised, CollectiveMismatch)
        assert raised is not None or place != "forward"


# -- the measured timeline ------------------------------------------------------------------


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["1f1b", "dualpipe-v", "zb-v"])
def test_the_measured_timeline_respects_the_order_and_is_read_back(
    comm: Communicator, name, tmp_path
):
    schedule = build_schedule(name, comm.size, 4)
    executor = PipelineExecutor(comm, schedule, chain(schedule, comm.rank))
    measured = executor.gather_timeline(executor.step())
    lowered = measured.schedule
    compute = lowered.kind <= Kind.B
    assert (measured.end[compute] > measured.start[compute]).all()
    at = {str(lowered.action(i)): i for i in range(len(lowered))}
    for rank in range(lowered.n_ranks):
        low, high = lowered.offsets[rank : rank + 2]
        mine = np.flatnonzero(compute[low:high]) + low
        starts = measured.start[mine]
        assert (np.diff(starts) >= 0).all()
        first = lowered.overlapped[mine[:-1]]
        np.testing.assert_array_equal(starts[:-1][first], starts[1:][first])
    for s in range(1, lowered.n_stages):
        if lowered.stage_to_rank[s] != lowered.stage_to_rank[s - 1]:
            assert measured.start[at[f"{s}RECV_F0"]] <= measured.start[at[f"{s - 1}SEND_F0"]]
    path = tmp_path / f"timeline-{comm.rank}.json"
    save_measured(measured, path)
    again = load_measured(path)
    assert again.schedule == lowered
    np.testing.assert_allclose(again.start, measured.start, atol=1e-3)
    text = compare_timelines(again)
    assert text.count("rank 0") == 2
    assert "bubble/total" in text


def test_measured_costs_are_medians_of_each_stage_and_kind():
    from mpipar.pipeline_parallel import Timeline, simulate

    schedule = build_schedule("zb-h1", 2, 3)
    costs = Costs([5, 7], [11, 13], [17, 19])
    exact = simulate(schedule, costs)
    found = measured_costs(Timeline(schedule, exact.start, exact.end))
    assert (found.forward_us, found.input_us, found.weight_us) == ((5, 7), (11, 13), (17, 19))
    assert simulate(schedule, found).makespan == exact.makespan


def test_a_file_without_a_timeline_is_refused(tmp_path):
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(ParallelismError, match="holds no measured timeline"):
        load_measured(tmp_path / "x.json")
