"""Random programs on several ranks at once: whatever is lost or late, data is right or absent."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from mpipar.comm import Call, Communicator, Op, ThreadWorld
from mpipar.distributed_cache.engine import TransferEngine
from mpipar.distributed_cache.mail import Frame
from mpipar.distributed_cache.transfer import State
from mpipar.errors import ParallelismError, RankFailed
from tests.distributed_cache.programs import Program, run_program


@pytest.mark.ranks(1, 2, 3, 4)
def test_programs_on_a_fabric_that_loses_nothing(comm: Communicator) -> None:
    found = run_program(comm, seed=5)
    assert comm.size == 1 or found["ends"][State.COMPLETE] > 0


def total(results: list[dict[str, Any]], key: str) -> Counter[Any]:
    summed: Counter[Any] = Counter()
    for result in results:
        summed.update(result[key])
    return summed


@pytest.mark.parametrize(
    "seeds",
    [range(12), pytest.param(range(12, 200), marks=pytest.mark.slow)],
    ids=["short", "long"],
)
def test_programs_with_lost_repeated_late_and_reordered_frames(seeds: range) -> None:
    ends: Counter[State] = Counter()
    faults: Counter[str] = Counter()
    for seed in seeds:
        world = ThreadWorld(
            2 + seed % 3, seed=seed, synchronous_sends=bool(seed % 2), on_call=delays(seed)
        )
        results = world.run(run_program, seed, 120, True, 16 + 8 * (seed % 2))
        ends += total(results, "ends")
        faults += total(results, "faults")
    assert min(ends[state] for state in State if state.is_end) > 0
    assert min(faults.values()) > 20


def delays(seed: int) -> Any:
    count = [seed]

    def on_call(rank: int, call: Call) -> str | None:
        del rank
        count[0] = count[0] * 1103515245 + 12345 & 0x7FFFFFFF
        return "delay" if call.op in (Op.SEND, Op.RECV) and count[0] >> 16 & 7 == 0 else None

    return on_call


def test_a_rank_that_crashes_costs_the_others_a_fetch_and_no_block() -> None:
    def body(comm: Communicator) -> str:
        ticks = iter(range(10**6))
        program = Program(comm, 1, 16, clock=lambda: float(next(ticks)), limit_s=200.0)
        if comm.rank == 1:
            raise RankFailed("crash")
        transfer = program.engine.fetch([1], program.chain(program.prompts[0]))
        while not transfer.is_over:
            program.engine.progress()
        program.verify_all()
        program.sequences.check()
        return transfer.reason

    results = ThreadWorld(3).run(body, return_errors=True)
    assert isinstance(results[1], RankFailed)
    assert "no answer from ranks [1]" in results[0]
    assert "no answer from ranks [1]" in results[2]


class LateData(TransferEngine):
    """Planted: data is taken in also for a transfer that has ended."""

    def fetch(self, *arguments: Any, **options: Any) -> Any:
        transfer = super().fetch(*arguments, **options)
        self.__dict__.setdefault("all", {})[transfer.number] = (transfer, transfer.blocks)
        return transfer

    def _on_data(self, frame: Frame) -> None:
        transfer, blocks = self.__dict__["all"][frame.words[1]]
        if transfer.is_over:
            self.storage.put_bytes(blocks, transfer.chunks[frame.words[2]], frame.payload)
        super()._on_data(frame)


class NoPins(TransferEngine):
    """Planted: the holder lets go of the blocks at once."""

    def _on_want(self, frame: Frame) -> None:
        fresh = (frame.peer, frame.words[1]) not in self._leases
        super()._on_want(frame)
        if fresh and self.holder is not None:
            self.holder.unpin(self._leases[frame.peer, frame.words[1]][0])


class SharedTail(Program):
    """Planted: a fork leaves the tail as it finds it."""

    def copy(self, copies: list[tuple[int, int]]) -> None:
        del copies


@pytest.mark.parametrize("plant", [LateData, NoPins, SharedTail])
def test_planted_faults_are_caught(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = Program
    if issubclass(plant, Program):
        kind = plant
    else:
        monkeypatch.setattr("tests.distributed_cache.holding.TransferEngine", plant)
    caught = 0
    for seed in range(20):
        world = ThreadWorld(3, seed=seed, deadline_s=20, synchronous_sends=False, node_size=0)
        try:
            world.run(run_program, seed, 120, True, 16, kind)
        except (AssertionError, ParallelismError):
            caught += 1
            break
    assert caught > 0
