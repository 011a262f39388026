"""The founding surface, and its eight weak points mended."""

from itertools import permutations

import pytest

from mpipar.comm import Communicator
from mpipar.distributed_cache.founding import (
    CacheRoutingHint,
    CacheShardInfo,
    CacheSyncProtocol,
    EventKind,
    SyncEvent,
)
from mpipar.errors import CountOutOfRange, LayoutError


def updated(rank: int, layer: int, position: int, sequence: int = 0, number: int = 0) -> SyncEvent:
    kind = EventKind.SHARD_UPDATED
    return SyncEvent(kind, rank, layer, sequence, position, number=number)


def evicted(rank: int, layer: int, position: int, sequence: int = 0, number: int = 0) -> SyncEvent:
    kind = EventKind.SHARD_EVICTED
    return SyncEvent(kind, rank, layer, sequence, position, number=number)


def confirmed(rank: int, prefix: int, n_tokens: int, number: int = 0) -> SyncEvent:
    kind = EventKind.PREFIX_CONFIRMED
    return SyncEvent(kind, rank, position=n_tokens, prefix=prefix, number=number)


def both_own(n_layers: int = 2) -> CacheSyncProtocol:
    """Two tensor-parallel ranks: each owns (heads of) every layer."""
    layers = tuple(range(n_layers))
    return CacheSyncProtocol([CacheShardInfo(r, 2, n_layers, layers) for r in range(2)])


def test_layers_are_spread_without_overlap() -> None:
    shards = [CacheShardInfo.spread(rank, 3, 10) for rank in range(3)]
    assert [len(s.layers) for s in shards] == [4, 3, 3]
    assert [layer for s in shards for layer in s.layers] == list(range(10))
    assert [s.rank for s in shards if s.owns_layer(4)] == [1]


def test_the_minimum_is_over_owners_only() -> None:
    """Weak point 7: with layers spread over ranks the minimum was None for ever."""
    both = both_own()
    both.record_event(updated(0, 0, 10))
    assert both.min_synced_position(0, 0) is None
    both.record_event(updated(1, 0, 8))
    assert both.min_synced_position(0, 0) == 8
    stages = CacheSyncProtocol.spread(2, 2)
    stages.record_event(updated(1, 1, 8))
    assert stages.min_synced_position(1, 0) == 8
    assert stages.min_synced_position(0, 0) is None


def test_one_confirmation_does_not_speak_for_all() -> None:
    """Weak point 1."""
    protocol = both_own()
    protocol.record_event(confirmed(0, 7, 32))
    assert protocol.prefix_tokens(7) is None
    assert protocol.routing_hint(7) == CacheRoutingHint(7, (0,), 0)
    protocol.record_event(confirmed(1, 7, 16))
    assert protocol.prefix_tokens(7) == 16
    assert protocol.routing_hint(7) == CacheRoutingHint(7, (0, 1), 16)
    assert not protocol.routing_hint(8).has_targets


def test_an_eviction_only_lowers() -> None:
    """Weak point 2."""
    protocol = both_own()
    for event in (updated(0, 0, 10), evicted(0, 0, 50, number=1)):
        protocol.record_event(event)
    assert protocol.latest_position(0, 0, 0) == 10
    protocol.record_event(evicted(0, 0, 4, number=2))
    assert protocol.latest_position(0, 0, 0) == 4


def test_an_eviction_takes_back_what_it_makes_untrue() -> None:
    """Weak point 3: also the hints."""
    protocol = both_own()
    for event in (updated(0, 0, 32), confirmed(0, 7, 32, 1), confirmed(0, 8, 8, 2)):
        protocol.record_event(event)
    for event in (confirmed(1, 7, 32), confirmed(1, 8, 8, 1)):
        protocol.record_event(event)
    before = protocol.routing_hint(7)
    protocol.record_event(evicted(0, 0, 16, sequence=5, number=3))
    assert protocol.routing_hint(7) == before
    protocol.record_event(evicted(0, 0, 16, number=4))
    assert protocol.prefix_tokens(7) is None
    assert protocol.routing_hint(7) != before
    assert protocol.prefix_tokens(8) == 8


def test_sequences_have_positions_of_their_own() -> None:
    """Weak point 4."""
    protocol = both_own()
    protocol.record_event(updated(0, 0, 10, sequence=1))
    protocol.record_event(updated(0, 0, 3, sequence=2, number=1))
    assert protocol.latest_position(0, 0, 1) == 10
    assert protocol.latest_position(0, 0, 2) == 3


def test_any_order_and_repetition_end_in_the_same_state() -> None:
    """Weak point 5."""
    events = [updated(0, 0, 10), evicted(0, 0, 4, number=1), updated(0, 0, 6, number=2)]
    for order in permutations(events):
        protocol = both_own()
        for event in [*order, *order]:
            protocol.record_event(event)
        assert protocol.latest_position(0, 0, 0) == 6
        assert protocol.recent_events(9) == events


def test_what_is_out_of_range_is_refused() -> None:
    """Weak point 6."""
    protocol = CacheSyncProtocol.spread(2, 4)
    for event in (updated(2, 0, 1), updated(0, 4, 1), updated(-1, 0, 1)):
        with pytest.raises(CountOutOfRange):
            protocol.record_event(event)
    with pytest.raises(LayoutError, match="rank 0 does not own layer 3"):
        protocol.record_event(updated(0, 3, 1))
    with pytest.raises(LayoutError, match="layer 1 has no owner"):
        CacheSyncProtocol([CacheShardInfo(0, 1, 2, (0,))])
    with pytest.raises(CountOutOfRange):
        CacheShardInfo(0, 1, 2, (2,))
    with pytest.raises(LayoutError, match="rank order"):
        CacheSyncProtocol([])


def test_the_log_is_bounded() -> None:
    protocol = CacheSyncProtocol([CacheShardInfo(0, 1, 1, (0,))], max_log_size=3)
    for number in range(10):
        protocol.record_event(updated(0, 0, number, number=number))
    assert [event.position for event in protocol.recent_events(10)] == [7, 8, 9]
    assert [event.position for event in protocol.recent_events(2)] == [8, 9]


@pytest.mark.ranks(1, 2, 3, 4)
def test_events_travel_and_a_flush_ends_what_was_before(comm: Communicator) -> None:
    """Weak point 8: and every rank knows the same afterwards."""
    me, n = comm.rank, comm.size
    shards = [CacheShardInfo(r, n, 2, (0, 1)) for r in range(n)]
    protocol = CacheSyncProtocol(shards)
    protocol.publish(updated(me, 1, 20 - me, sequence=3))
    protocol.publish(confirmed(me, 7, 16 + me))
    assert protocol.min_synced_position(1, 3) is None or n == 1
    protocol.exchange(comm)
    assert protocol.min_synced_position(1, 3) == 20 - (n - 1)
    assert protocol.prefix_tokens(7) == 16
    assert protocol.routing_hint(7).relevant_ranks == tuple(range(n))
    if me == n - 1:
        protocol.publish(SyncEvent(EventKind.FLUSH_ALL, me))
        protocol.publish(updated(me, 0, 5))
    else:
        protocol.publish(updated(me, 0, 9))  # before it heard of the flush: void everywhere
    protocol.exchange(comm)
    protocol.exchange(comm)
    assert protocol.epoch == 1
    assert protocol.prefix_tokens(7) is None
    assert [protocol.latest_position(r, 0, 0) for r in range(n)] == [None] * (n - 1) + [5]
    assert not protocol.record_event(updated(0, 0, 9))
