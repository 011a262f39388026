"""Fetches between ranks, on threads here and on real ranks in tests/mpi."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpipar.comm import Communicator, ReduceOp, ThreadWorld
from mpipar.distributed_cache.engine import TransferEngine
from mpipar.distributed_cache.layout import CacheLayout, cache_layouts, plan_transfer
from mpipar.distributed_cache.storage import CacheStorage
from mpipar.distributed_cache.transfer import State, cut
from mpipar.errors import CacheError, LayoutError, RankMismatch
from tests.distributed_cache.holding import CacheRank
from tests.spy import Spy

WHOLE = CacheLayout((0, 4), (0, 2), 3, block_size=4, dtype="float64")
PROMPT = list(range(100, 130))  # 7 full blocks


def small(comm: Communicator, layout: CacheLayout = WHOLE, **options: Any) -> CacheRank:
    """A rank with frames that hold little, so that much is in flight."""
    options = {"small_bytes": 512, "large_bytes": 700, "window_bytes": 1500, **options}
    return CacheRank(comm, layout, 24, **options)


@pytest.mark.ranks(2, 3, 4)
def test_prefill_on_one_rank_and_decode_on_the_others(comm: Communicator) -> None:
    rank = small(comm)
    if comm.rank == 0:
        rank.compute(PROMPT)
    rank.engine.publish()
    rank.meet()
    rank.until(lambda: rank.engine.directory.position(0) == (0, 7))
    chain = rank.chain(PROMPT)
    assert rank.engine.directory.lengths(
        [chain.digests[i].astype("<u8").tobytes() for i in range(7)]
    ) == [7] + [0] * (comm.size - 1)
    if comm.rank:
        transfer = rank.bring([0], PROMPT)
        assert transfer.state is State.COMPLETE
        assert transfer.n_blocks == rank.verified(chain) == 7
        assert transfer.n_bytes == 28 * WHOLE.bytes_per_token
        assert rank.compute([*PROMPT, 7, 8, 9]) == 28  # decode goes on from what came
    rank.leave()


@pytest.mark.ranks(4)
def test_two_heads_to_two_stages(comm: Communicator) -> None:
    """Ranks 0 and 1 prefill with tp = 2, ranks 2 and 3 decode with pp = 2."""
    layouts = [
        *cache_layouts(4, 2, 3, tp=2, block_size=4, dtype="float64"),
        *cache_layouts(4, 2, 3, pp=2, block_size=4, dtype="float64"),
    ]
    spy = Spy(comm)
    rank = small(spy, layouts[comm.rank])
    if comm.rank < 2:
        rank.compute(PROMPT)
    rank.meet()
    spy.reset()
    if comm.rank >= 2:
        transfer = rank.bring([0, 1], PROMPT)
        assert transfer.sources == [0, 1]
        assert rank.verified(rank.chain(PROMPT)) == 7
        plan = plan_transfer(layouts[:2], layouts[comm.rank :][:1], (0, 28))
        assert transfer.n_bytes == sum(p.n_bytes for p in plan) == 28 * 2 * 2 * 2 * 3 * 8
    rank.leave()


@pytest.mark.ranks(2, 3)
def test_bytes_in_flight_are_bounded_over_all_transfers(comm: Communicator) -> None:
    rank = small(comm)
    if comm.rank == 0:
        rank.compute(PROMPT)
    rank.meet()
    most = 0
    if comm.rank:
        both = [rank.engine.fetch([0], rank.chain(PROMPT)) for _ in range(2)]
        while not all(transfer.is_over for transfer in both):
            rank.engine.progress()
            most = max(most, rank.engine.n_bytes_asked)
            assert rank.engine.mail.n_waiting(0) * 700 <= 1500 + 700
        assert [transfer.n_blocks for transfer in both] == [7, 7]
        assert 600 < most <= 1500
        assert rank.engine.n_bytes_asked == 0
        assert rank.pool.n_cached == 7  # the same blocks twice are kept once
    rank.leave()


@pytest.mark.ranks(3, 4)
def test_replicas_of_a_shard_share_the_readers(comm: Communicator) -> None:
    rank = small(comm)
    n_readers = comm.size - 2
    if comm.rank < 2:
        rank.compute(PROMPT)
    rank.meet()
    found = []
    if comm.rank >= 2:
        found = rank.bring([0, 1], PROMPT).sources
        assert rank.verified(rank.chain(PROMPT)) == 7
    rank.meet()
    assert [x for s in comm.all_gather_json(found) for x in s] == [0, 1][:n_readers]
    rank.leave()


@pytest.mark.ranks(3)
def test_a_group_agrees_on_the_length_before_it_accepts(comm: Communicator) -> None:
    rank = small(comm)
    if comm.rank == 0:
        rank.compute(PROMPT)
    rank.meet()
    transfer = None
    if comm.rank:
        transfer = rank.engine.fetch([0], rank.chain(PROMPT), waits=True)
        rank.until(lambda: transfer.state is State.READY)
        assert rank.verified(rank.chain(PROMPT)) == 0
    n = comm.rank + 3 if comm.rank else 9
    request = comm.begin_all_reduce(np.array(n), ReduceOp.MIN)
    rank.until(request.test)
    agreed = int(request.wait())
    assert agreed == 4
    if transfer is not None:
        rank.engine.accept(transfer, agreed)
        assert transfer.state is State.COMPLETE
        assert rank.verified(rank.chain(PROMPT)) == 4
        with pytest.raises(CacheError, match="complete"):
            rank.engine.accept(transfer, 1)
    rank.leave()


@pytest.mark.ranks(2)
def test_a_shorter_chain_comes_where_less_is_held_or_there_is_less_room(
    comm: Communicator,
) -> None:
    rank = CacheRank(comm, WHOLE, 24 if comm.rank == 0 else 4)
    if comm.rank == 0:
        rank.compute(PROMPT[:13])  # 3 full blocks
    rank.meet()
    if comm.rank:
        assert rank.bring([0], [1, 2, 3, 4]).n_blocks == 0
        assert rank.bring([0], PROMPT).n_blocks == 3
        assert rank.pool.n_cached == 3
        sequence = rank.sequences.start(PROMPT[:13])  # holds all four blocks
        nothing = rank.bring([0], PROMPT)
        assert (nothing.state, nothing.n_blocks) == (State.COMPLETE, 0)
        rank.sequences.finish(sequence)
    rank.leave()


@pytest.mark.ranks(2)
def test_a_cancelled_transfer_leaves_nothing_on_either_side(comm: Communicator) -> None:
    rank = small(comm)
    if comm.rank == 0:
        rank.compute(PROMPT)
    rank.meet()
    if comm.rank:
        for n_turns in range(12):
            transfer = rank.engine.fetch([0], rank.chain(PROMPT))
            for _ in range(n_turns):
                rank.engine.progress()
            rank.engine.cancel(transfer)
            rank.engine.cancel(transfer)
            assert transfer.is_over
            with pytest.raises(CacheError):
                transfer.end(State.FAILED)
        assert rank.bring([0], PROMPT).n_blocks == 7
    rank.leave()


@pytest.mark.ranks(2)
def test_a_restarted_holder_ends_the_pins_and_the_reader_fails_cleanly(
    comm: Communicator,
) -> None:
    rank = small(comm)
    if comm.rank == 0:
        rank.compute(PROMPT)
        rank.engine.publish()
    rank.meet()
    if comm.rank:
        rank.until(lambda: rank.engine.directory.position(0) == (0, 7))
        transfer = rank.engine.fetch([0], rank.chain(PROMPT), waits=True)
        rank.until(lambda: transfer.state is State.MOVING)
    else:
        rank.until(lambda: rank.engine.n_pinned == 1)
        rank.begin()
        rank.engine.publish()
    if comm.rank:
        rank.until(lambda: transfer.state is not State.MOVING)
        if transfer.state is State.FAILED:
            assert "rank 0 has ended its pin" in transfer.reason
        rank.engine.cancel(transfer)
        rank.until(lambda: rank.engine.directory.position(0)[0] == 1)
        assert rank.engine.directory.holders(rank.chain(PROMPT).digests[0].tobytes()) == []
    rank.leave()


@pytest.mark.ranks(3)
def test_a_new_epoch_begins_everywhere_with_nothing(comm: Communicator) -> None:
    rank = small(comm)
    if comm.rank == 0:
        rank.compute(PROMPT)
    rank.meet()
    transfer = rank.engine.fetch([0], rank.chain(PROMPT)) if comm.rank else None
    assert rank.engine.new_epoch() == 1
    if transfer is not None:
        assert transfer.state is State.CANCELLED
    rank.begin()
    rank.meet()
    if comm.rank:
        assert rank.bring([0], PROMPT).n_blocks == 0
    rank.leave()


@pytest.mark.ranks(3)
def test_layouts_that_do_not_fit_are_refused_on_every_rank(comm: Communicator) -> None:
    odd = CacheLayout((0, 4), (0, 2), 3, block_size=4 + comm.rank // 2, dtype="float64")
    with pytest.raises(RankMismatch, match="rank 2 "):
        TransferEngine(comm, CacheStorage(odd, 2))
    with pytest.raises(LayoutError, match="holds no token"):
        TransferEngine(comm, CacheStorage(WHOLE, 2), large_bytes=191)
    assert comm.all_reduce(1) == comm.size


@pytest.mark.parametrize("room", [50, 96, 97, 1000, 10**6])
def test_chunks_fit_a_frame_and_cover_each_piece_once(room: int) -> None:
    source = cache_layouts(5, 2, 3, tp=2, dtype="float64")
    target = CacheLayout((1, 5), (0, 2), 3, dtype="float64")
    chunks = cut(plan_transfer(source, [target], (0, 0)), 20, target, room)
    count = np.zeros((5, 2, 20), int)
    for chunk in chunks:
        assert chunk.n_bytes <= room
        box = count[slice(*chunk.layers), slice(*chunk.heads), slice(*chunk.tokens)]
        box += 1
        assert chunk.n_bytes == box.size * 2 * 3 * 8
    assert (count[1:] == 1).all()
    assert not count[0].any()


def test_every_exchange_works_with_synchronous_sends_and_any_order_of_ranks() -> None:
    for seed in range(4):
        world = ThreadWorld(3, seed=seed, synchronous_sends=True)
        world.run(test_prefill_on_one_rank_and_decode_on_the_others)
    ThreadWorld(4, seed=1, synchronous_sends=True).run(test_two_heads_to_two_stages)
    ThreadWorld(2, synchronous_sends=True).run(
        test_a_cancelled_transfer_leaves_nothing_on_either_side
    )


def test_the_reader_fails_when_the_holder_is_silent() -> None:
    """Rank 0 never makes progress until the reader has given up; the message names it."""

    def body(comm: Communicator) -> str:
        clock = iter(range(10**6))
        rank = small(comm, clock=lambda: float(next(clock)), limit_s=50.0)
        reason = ""
        if comm.rank == 1:
            transfer = rank.bring([0], PROMPT)
            assert transfer.state is State.FAILED
            reason = transfer.reason
        comm.barrier()
        rank.leave()
        return reason

    assert "no answer from ranks [0]" in ThreadWorld(2).run(body)[1]
