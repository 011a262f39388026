"""The founding surface: who owns which layers, how far each is filled, which prefixes all confirm.

Positions have a sequence key, events a number and an epoch; a prefix is confirmed once every owner
has voted, and an eviction takes back the votes that it makes untrue. For blocks that can be fetched
use `PrefixDirectory` and `TransferEngine`.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum

from mpipar.comm.base import Communicator
from mpipar.errors import CountOutOfRange, LayoutError
from mpipar.units.remainder import spread_range


@dataclass(frozen=True)
class CacheShardInfo:
    """The layers whose keys and values one rank owns.

    Attributes
    ----------
    rank, world_size, n_layers : int
        Owner, ranks, and layers of the model.
    layers : tuple of int
        Owned ones, ascending; `CacheShardInfo.spread` gives the first ranks one more.
    """

    rank: int
    world_size: int
    n_layers: int
    layers: tuple[int, ...]

    def __post_init__(self) -> None:
        _check("rank", self.rank, self.world_size)
        for layer in self.layers:
            _check("layer", layer, self.n_layers)
        if list(self.layers) != sorted(set(self.layers)):
            raise LayoutError(f"layers {self.layers} must be distinct and ascending")

    @classmethod
    def spread(cls, rank: int, world_size: int, n_layers: int) -> CacheShardInfo:
        """Contiguous layers, spread over the ranks.

        Parameters
        ----------
        rank, world_size, n_layers : int
            As in the class.

        Returns
        -------
        CacheShardInfo
            10 layers over 3 ranks are 4, 3 and 3.
        """
        layers = range(*spread_range(n_layers, world_size, rank))
        return cls(rank, world_size, n_layers, tuple(layers))

    def owns_layer(self, layer: int) -> bool:
        """Whether a layer is owned here.

        Parameters
        ----------
        layer : int
            Any layer.

        Returns
        -------
        bool
            True if so.
        """
        return layer in self.layers


class EventKind(StrEnum):
    """What happened: a shard grew, a rank confirmed a prefix, a shard shrank, all was dropped."""

    SHARD_UPDATED = "shard-updated"
    PREFIX_CONFIRMED = "prefix-confirmed"
    SHARD_EVICTED = "shard-evicted"
    FLUSH_ALL = "flush-all"


@dataclass(frozen=True)
class SyncEvent:
    """One event of one rank; `CacheSyncProtocol.publish` gives it epoch and number.

    Attributes
    ----------
    kind : EventKind
        What happened.
    rank, layer, sequence : int
        Where; `layer` matters for shards only.
    position : int
        Tokens that are there now; those beyond are invalid after an eviction. Of a confirmation:
        tokens of the prefix.
    prefix : int
        Of a confirmation.
    epoch, number : int
        The sender's count; late and repeated events are known by it.
    """

    kind: EventKind
    rank: int
    layer: int = 0
    sequence: int = 0
    position: int = 0
    prefix: int = 0
    epoch: int = 0
    number: int = 0


@dataclass(frozen=True)
class CacheRoutingHint:
    """Where a request with a known prefix may go.

    Attributes
    ----------
    prefix : int
        Which one.
    relevant_ranks : tuple of int
        Ranks that confirm it.
    reusable_tokens : int
        Tokens that all owners confirm.
    """

    prefix: int
    relevant_ranks: tuple[int, ...]
    reusable_tokens: int

    @property
    def has_targets(self) -> bool:
        """Whether any rank is named."""
        return bool(self.relevant_ranks)


class CacheSyncProtocol:
    """What one rank knows of all shards. `exchange` is collective, everything else is local.

    Parameters
    ----------
    shards : sequence of CacheShardInfo
        One a rank, in rank order; a layer may have several owners, not none.
    max_log_size : int
        Events kept for `recent_events`.
    """

    def __init__(self, shards: Sequence[CacheShardInfo], max_log_size: int = 10_000) -> None:
        if not shards or [s.rank for s in shards] != list(range(len(shards))):
            raise LayoutError(f"one shard a rank, in rank order, got {[s.rank for s in shards]}")
        self.shards, self.n_layers, self.epoch = tuple(shards), shards[0].n_layers, 0
        owners = [[s.rank for s in shards if s.owns_layer(x)] for x in range(self.n_layers)]
        if not all(owners):
            raise LayoutError(f"layer {owners.index([])} has no owner")
        self._owners, self._log = owners, deque[SyncEvent](maxlen=max_log_size)
        self._outbox: list[SyncEvent] = []
        self._clear()

    @classmethod
    def spread(cls, world_size: int, n_layers: int) -> CacheSyncProtocol:
        """The protocol over layers spread over ranks.

        Parameters
        ----------
        world_size, n_layers : int
            As in `CacheShardInfo.spread`.

        Returns
        -------
        CacheSyncProtocol
            With nothing filled yet.
        """
        return cls([CacheShardInfo.spread(r, world_size, n_layers) for r in range(world_size)])

    def publish(self, event: SyncEvent) -> SyncEvent:
        """Number an event of this rank, apply it, and keep it for the next `exchange`.

        Parameters
        ----------
        event : SyncEvent
            Of this rank.

        Returns
        -------
        SyncEvent
            As it will be sent.
        """
        flushes = event.kind is EventKind.FLUSH_ALL
        number = 0 if flushes else self._next[event.rank]
        event = replace(event, epoch=self.epoch + flushes, number=number)
        self.record_event(event)
        self._outbox.append(event)
        return event

    def exchange(self, comm: Communicator) -> None:
        """Send what was published since the last time, and take in the others'. Collective.

        Parameters
        ----------
        comm : Communicator
            Of all ranks; an all-gather of JSON.
        """
        mine, self._outbox = [asdict(event) for event in self._outbox], []
        for events in comm.all_gather_json(mine):
            for event in events:
                self.record_event(SyncEvent(**{**event, "kind": EventKind(event["kind"])}))

    def record_event(self, event: SyncEvent) -> bool:
        """Apply an event; one that is early waits for those before it.

        Parameters
        ----------
        event : SyncEvent
            As it came, in any order and any number of times.

        Returns
        -------
        bool
            False for one of an earlier epoch or one that is known.
        """
        _check("rank", event.rank, len(self.shards))
        if event.kind in (EventKind.SHARD_UPDATED, EventKind.SHARD_EVICTED):
            _check("layer", event.layer, self.n_layers)
            if not self.shards[event.rank].owns_layer(event.layer):
                raise LayoutError(f"rank {event.rank} does not own layer {event.layer}")
        if event.epoch > self.epoch:
            self.epoch = event.epoch
            self._clear()
        if event.epoch < self.epoch or event.number < self._next[event.rank]:
            return False
        self._early[event.rank][event.number] = event
        while (ready := self._early[event.rank].pop(self._next[event.rank], None)) is not None:
            self._next[event.rank] += 1
            self._log.append(ready)
            self._apply(ready)
        return True

    def latest_position(self, rank: int, layer: int, sequence: int) -> int | None:
        """How far a shard is filled.

        Parameters
        ----------
        rank, layer, sequence : int
            Which shard of which sequence.

        Returns
        -------
        int or None
            Tokens; None if nothing was heard.
        """
        return self._positions.get((rank, layer, sequence))

    def min_synced_position(self, layer: int, sequence: int) -> int | None:
        """How far all owners of a layer have filled it.

        Parameters
        ----------
        layer, sequence : int
            Which.

        Returns
        -------
        int or None
            Tokens; None until every owner was heard.
        """
        _check("layer", layer, self.n_layers)
        found = [self._positions.get((r, layer, sequence)) for r in self._owners[layer]]
        known = [position for position in found if position is not None]
        return min(known) if len(known) == len(found) else None

    def prefix_tokens(self, prefix: int) -> int | None:
        """Tokens of a prefix that every rank which owns a layer confirms.

        Parameters
        ----------
        prefix : int
            Which.

        Returns
        -------
        int or None
            None while a vote is missing.
        """
        votes = self._votes[prefix]
        if {shard.rank for shard in self.shards if shard.layers} - set(votes):
            return None
        return min(n_tokens for _, n_tokens in votes.values())

    def routing_hint(self, prefix: int) -> CacheRoutingHint:
        """Where a request with this prefix may go now; compare hints to see if one still holds.

        Parameters
        ----------
        prefix : int
            Which.

        Returns
        -------
        CacheRoutingHint
            Without targets if nobody confirms it.
        """
        ranks = tuple(sorted(self._votes[prefix]))
        return CacheRoutingHint(prefix, ranks, self.prefix_tokens(prefix) or 0)

    def recent_events(self, n: int) -> list[SyncEvent]:
        """The last events applied.

        Parameters
        ----------
        n : int
            How many.

        Returns
        -------
        list of SyncEvent
            Oldest first.
        """
        return list(self._log)[max(0, len(self._log) - n) :]

    def _clear(self) -> None:
        self._next = [0] * len(self.shards)
        self._early: list[dict[int, SyncEvent]] = [{} for _ in self.shards]
        self._positions: dict[tuple[int, int, int], int] = {}
        self._votes: defaultdict[int, dict[int, tuple[int, int]]] = defaultdict(dict)

    def _apply(self, event: SyncEvent) -> None:
        at = (event.rank, event.layer, event.sequence)
        if event.kind is EventKind.SHARD_UPDATED:
            self._positions[at] = max(self._positions.get(at, 0), event.position)
        elif event.kind is EventKind.PREFIX_CONFIRMED:
            self._votes[event.prefix][event.rank] = (event.sequence, event.position)
        elif event.kind is EventKind.SHARD_EVICTED:
            self._positions[at] = min(self._positions.get(at, 0), event.position)
            for votes in self._votes.values():
                sequence, n_tokens = votes.get(event.rank, (-1, 0))
                if sequence == event.sequence and n_tokens > event.position:
                    del votes[event.rank]


def _check(role: str, value: int, stop: int) -> None:
    if not 0 <= value < stop:
        raise CountOutOfRange(role, f"0..{stop}", value)
