"""The directory follows its owners through lost, late and repeated batches."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpipar.distributed_cache.directory import Batch, PrefixDirectory, PrefixLog, events_in
from mpipar.errors import CacheError, CountOutOfRange

NAMES = [bytes([i]) * 16 for i in range(12)]


def test_copies_are_counted_and_only_the_last_one_is_told() -> None:
    log = PrefixLog(0)
    log.add([NAMES[0], NAMES[0], NAMES[1]])
    log.remove([NAMES[0], NAMES[5]])
    assert log.sequence == 2
    log.remove([NAMES[0], NAMES[0]])
    assert [event for batch in log.since(0, 0) for event in batch.events] == [
        (True, NAMES[0]), (True, NAMES[1]), (False, NAMES[0]),
    ]  # fmt: skip
    with pytest.raises(CacheError, match="16 bytes"):
        log.add([b"short"])


def test_lengths_count_leading_blocks() -> None:
    directory = PrefixDirectory(3)
    for owner, held in enumerate(([0, 1, 2], [0, 2, 3], [])):
        log = PrefixLog(owner)
        log.add([NAMES[i] for i in held])
        (batch,) = log.since(0, 0)
        assert directory.apply(batch)
    assert directory.lengths(NAMES[:4]) == [3, 1, 0]
    assert directory.lengths(NAMES[:2]) == [2, 1, 0]
    assert directory.lengths([]) == [0, 0, 0]
    assert directory.holders(NAMES[2]) == [0, 1]
    directory.forget(0)
    assert directory.holders(NAMES[2]) == [1]
    with pytest.raises(CountOutOfRange):
        directory.apply(Batch(3, 0, 0, 0, 0, 0, ()))


def test_a_gap_is_asked_for_and_answered_from_the_ring_or_with_a_snapshot() -> None:
    log, directory = PrefixLog(0, n_kept=4), PrefixDirectory(1)
    log.add(NAMES[:3])
    late = log.since(0, 1)
    assert not directory.apply(late[0])
    assert directory.position(0) == (0, 0)
    replay = log.since(0, 0, limit=2)
    assert [b.n_parts for b in replay] == [0, 0]
    assert all(directory.apply(b) for b in replay)
    assert directory.apply(late[0])
    log.add(NAMES[3:9])
    snapshot = log.since(*directory.position(0), limit=2)
    assert [b.n_parts for b in snapshot] == [5] * 5
    for batch in reversed(snapshot):
        assert directory.holders(NAMES[8]) == []
        directory.apply(batch)
    assert directory.position(0) == (0, 9)
    assert directory.lengths(NAMES) == [9]


def test_a_new_epoch_drops_the_old_one_and_its_late_batches() -> None:
    log, directory = PrefixLog(0), PrefixDirectory(1)
    log.add(NAMES[:3])
    old = log.since(0, 0)[0]
    log.restart()
    log.add(NAMES[4:6])
    assert directory.apply(old)
    assert directory.apply(log.since(1, 0)[0])
    assert directory.apply(old)
    assert [directory.holders(n) for n in NAMES[:6]] == [[], [], [], [], [0], [0]]


@given(st.integers(0, 10**9), st.booleans(), st.lists(st.booleans(), max_size=9))
def test_a_batch_is_read_as_it_was_written(number: int, gained: bool, kinds: list[bool]) -> None:
    events = tuple((kind, NAMES[i]) for i, kind in enumerate(kinds))
    batch = Batch(3, 1, number, number + len(events), 0, int(gained), events)
    text = batch.to_bytes()
    assert Batch.from_bytes(text) == batch
    assert events_in(len(text)) == len(events)


@given(st.integers(0, 2**32), st.integers(1, 8), st.integers(1, 4))
def test_lost_late_and_repeated_batches_end_in_the_owners_truth(
    seed: int, n_kept: int, limit: int
) -> None:
    rng = random.Random(seed)
    log, directory, held = PrefixLog(0, n_kept), PrefixDirectory(1), set()
    told = (0, 0)
    flying: list[Batch] = []
    for _ in range(40):
        name = rng.choice(NAMES)
        roll = rng.random()
        if roll < 0.05:
            log.restart()
            held.clear()
        elif name in held:
            log.remove([name])
            held.discard(name)
        else:
            log.add([name])
            held.add(name)
        if rng.random() < 0.5:
            flying += log.since(*told, limit)
            told = (log.epoch, log.sequence)
        rng.shuffle(flying)
        while flying and rng.random() < 0.6:
            batch = flying.pop() if rng.random() < 0.8 else flying[-1]
            if rng.random() < 0.8 and not directory.apply(batch) and rng.random() < 0.7:
                flying += log.since(*directory.position(0), limit)
    for _ in range(2):  # what a heartbeat finds out, and its answer
        (beat, *_) = log.since(log.epoch, log.sequence)
        if not directory.apply(beat):
            for batch in log.since(*directory.position(0), limit):
                directory.apply(batch)
    assert {name for name in NAMES if directory.holders(name)} == held
