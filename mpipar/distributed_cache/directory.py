"""Which rank holds which prefix: a hint on every rank, fed by numbered events of the owners.

An owner's `PrefixLog` numbers what it gains and loses; every rank's `PrefixDirectory` applies the
batches in order. Repeated and old ones change nothing; a gap is answered from the log's ring, or
with a snapshot. The hint may be stale: the truth is the owner's pin at a fetch.
"""

from __future__ import annotations

import struct
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple

from mpipar.errors import CacheError, CountOutOfRange

DIGEST_BYTES = 16
Event = tuple[bool, bytes]  # gained or lost, digest of the chain
_HEAD = struct.Struct("<6q")
_RECORD = struct.Struct(f"<?{DIGEST_BYTES}s")


class Batch(NamedTuple):
    """Events of one owner in a row, or one part of a snapshot.

    Attributes
    ----------
    owner, epoch : int
        Whose, and in which life of its cache.
    first, last : int
        Sequence numbers of the first event and after the last; a snapshot stands at `last`.
    part, n_parts : int
        Of a snapshot; ``n_parts`` is 0 for a run of events.
    events : tuple
        (gained or lost, digest).
    """

    owner: int
    epoch: int
    first: int
    last: int
    part: int
    n_parts: int
    events: tuple[Event, ...]

    def to_bytes(self) -> bytes:
        """The batch as a message.

        Returns
        -------
        bytes
            48 bytes and 17 for each event.
        """
        return _HEAD.pack(*self[:6]) + b"".join(_RECORD.pack(*event) for event in self.events)

    @classmethod
    def from_bytes(cls, text: bytes) -> Batch:
        """Read what `to_bytes` wrote.

        Parameters
        ----------
        text : bytes
            A whole message.

        Returns
        -------
        Batch
            As it was.
        """
        owner, epoch, first, last, part, n_parts = _HEAD.unpack_from(text)
        events = tuple(_RECORD.iter_unpack(text[_HEAD.size :]))
        return cls(owner, epoch, first, last, part, n_parts, events)


def events_in(n_bytes: int) -> int:
    """How many events fit into a message.

    Parameters
    ----------
    n_bytes : int
        Its size.

    Returns
    -------
    int
        0 or more.
    """
    return max(0, (n_bytes - _HEAD.size) // _RECORD.size)


class PrefixLog:
    """What one owner holds, and the last events that led there.

    Parameters
    ----------
    owner : int
        This rank.
    n_kept : int
        Events in the ring; who lacks older ones gets a snapshot.
    """

    def __init__(self, owner: int, n_kept: int = 65_536) -> None:
        if n_kept < 1:
            raise CountOutOfRange("events kept", "1 or more", n_kept)
        self.owner, self.epoch, self.sequence = owner, 0, 0
        self._ring: deque[Event] = deque(maxlen=n_kept)
        self._copies: Counter[bytes] = Counter()

    def add(self, digests: Iterable[bytes]) -> None:
        """Record blocks whose data is complete; a second copy is counted, not told.

        Parameters
        ----------
        digests : iterable of bytes
            Of their chains, 16 bytes each.
        """
        for digest in digests:
            self._copies[digest] += 1
            if self._copies[digest] == 1:
                self._tell(True, digest)

    def remove(self, digests: Iterable[bytes]) -> None:
        """Record blocks that go, before they are used anew; only the last copy is told.

        Parameters
        ----------
        digests : iterable of bytes
            Unknown ones are passed over.
        """
        for digest in digests:
            self._copies[digest] -= 1
            if self._copies[digest] == 0:
                self._tell(False, digest)
            if self._copies[digest] <= 0:
                del self._copies[digest]

    def _tell(self, gained: bool, digest: bytes) -> None:
        if len(digest) != DIGEST_BYTES:
            raise CacheError(f"a digest has {DIGEST_BYTES} bytes, got {len(digest)}")
        self._ring.append((gained, digest))
        self.sequence += 1

    def restart(self) -> None:
        """Begin a new epoch with nothing held; peers drop all that they knew."""
        self.epoch, self.sequence = self.epoch + 1, 0
        self._ring.clear()
        self._copies.clear()

    def since(self, epoch: int, sequence: int, limit: int = 200) -> list[Batch]:
        """What brings a peer from its position to the present.

        Parameters
        ----------
        epoch, sequence : int
            Its position.
        limit : int
            Events of one batch.

        Returns
        -------
        list of Batch
            Events from the ring, or a snapshot where the ring is too short; an empty batch tells
            a peer that is up to date where the present is.
        """
        limit = max(1, limit)
        oldest = self.sequence - len(self._ring)
        if epoch == self.epoch and oldest <= sequence <= self.sequence:
            newest = islice(reversed(self._ring), self.sequence - sequence)  # few of many
            missing = tuple(newest)[::-1]
            return [
                Batch(self.owner, epoch, sequence + at, sequence + at + len(run), 0, 0, run)
                for at in range(0, max(1, len(missing)), limit)
                for run in [missing[at : at + limit]]
            ]
        held = tuple((True, digest) for digest in self._copies)
        n_parts = max(1, -(-len(held) // limit))
        return [
            Batch(self.owner, self.epoch, 0, self.sequence, part, n_parts,
                  held[part * limit : (part + 1) * limit])
            for part in range(n_parts)
        ]  # fmt: skip


class PrefixDirectory:
    """What the owners are believed to hold.

    Parameters
    ----------
    n_ranks : int
        Owners are ranks below it.
    """

    def __init__(self, n_ranks: int) -> None:
        self.n_ranks = n_ranks
        self._at = [(0, 0)] * n_ranks
        self._of: list[set[bytes]] = [set() for _ in range(n_ranks)]
        self._holders: dict[bytes, int] = {}  # one bit a rank
        self._parts: dict[int, tuple[tuple[int, int], dict[int, tuple[Event, ...]]]] = {}

    def position(self, owner: int) -> tuple[int, int]:
        """Epoch and sequence number up to which an owner's events are applied.

        Parameters
        ----------
        owner : int
            A rank.

        Returns
        -------
        tuple of int
            What to ask `PrefixLog.since` for.
        """
        return self._at[owner]

    def apply(self, batch: Batch) -> bool:
        """Take in a batch; old and repeated ones change nothing.

        Parameters
        ----------
        batch : Batch
            As it came, in any order.

        Returns
        -------
        bool
            False if events before it are missing: ask the owner from `position` on.
        """
        owner = batch.owner
        if not 0 <= owner < self.n_ranks:
            raise CountOutOfRange("owner of cache events", f"0..{self.n_ranks}", owner)
        if batch.epoch < self._at[owner][0]:
            return True
        if batch.epoch > self._at[owner][0]:
            self.forget(owner, batch.epoch)
        if batch.n_parts:
            self._take_part(batch)
            return True
        sequence = self._at[owner][1]
        if batch.first > sequence:
            return False
        for gained, digest in batch.events[sequence - batch.first :]:
            (self._gain if gained else self._lose)(owner, digest)
        self._at[owner] = (batch.epoch, max(sequence, batch.last))
        return True

    def forget(self, owner: int, epoch: int | None = None) -> None:
        """Drop all that an owner held, in a number of steps that only its entries set.

        Parameters
        ----------
        owner : int
            A rank that is lost or has begun anew.
        epoch : int, optional
            Its new epoch; otherwise the old one, from event 0 on.
        """
        for digest in list(self._of[owner]):
            self._lose(owner, digest)
        self._at[owner] = (self._at[owner][0] if epoch is None else epoch, 0)
        self._parts.pop(owner, None)

    def holders(self, digest: bytes) -> list[int]:
        """Ranks that are believed to hold a block.

        Parameters
        ----------
        digest : bytes
            Of its chain.

        Returns
        -------
        list of int
            Ascending.
        """
        mask = self._holders.get(digest, 0)
        return [rank for rank in range(self.n_ranks) if mask >> rank & 1]

    def lengths(self, digests: Sequence[bytes]) -> list[int]:
        """How many leading blocks of a chain each rank is believed to hold.

        Parameters
        ----------
        digests : sequence of bytes
            Of the chain, first block first.

        Returns
        -------
        list of int
            One count a rank.
        """
        found = [0] * self.n_ranks
        alive = (1 << self.n_ranks) - 1
        for depth, digest in enumerate(digests):
            left = alive & self._holders.get(digest, 0)
            gone = alive ^ left
            while gone:
                found[(gone & -gone).bit_length() - 1] = depth
                gone &= gone - 1
            alive = left
            if not alive:
                return found
        return [len(digests) if alive >> r & 1 else n for r, n in enumerate(found)]

    def _gain(self, owner: int, digest: bytes) -> None:
        self._of[owner].add(digest)
        self._holders[digest] = self._holders.get(digest, 0) | 1 << owner

    def _lose(self, owner: int, digest: bytes) -> None:
        self._of[owner].discard(digest)
        left = self._holders.get(digest, 0) & ~(1 << owner)
        if left:
            self._holders[digest] = left
        else:
            self._holders.pop(digest, None)

    def _take_part(self, batch: Batch) -> None:
        owner, stands = batch.owner, (batch.epoch, batch.last)
        known, parts = self._parts.get(owner, (stands, {}))
        if (stands <= self._at[owner] and self._of[owner]) or stands < known:
            return
        if stands > known:
            parts = {}
        parts[batch.part] = batch.events
        self._parts[owner] = (stands, parts)
        if len(parts) == batch.n_parts:
            self.forget(owner, batch.epoch)
            for events in parts.values():
                for _, digest in events:
                    self._gain(owner, digest)
            self._at[owner] = stands
