"""The engine that fetches prefixes between ranks and keeps every rank's directory fed.

The reader pulls: it reserves blocks, asks the holders to pin the chain, gets an answer that may be
shorter, and asks for chunks, each with its receive posted before, a bounded number of bytes at a
time. Everything moves on in `progress`. A lost, late or repeated frame costs time, never data: a
frame names its transfer, and data goes into a block only while its transfer is alive.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict

import numpy as np

from mpipar.comm.base import Communicator
from mpipar.distributed_cache.directory import Batch, PrefixDirectory, PrefixLog, events_in
from mpipar.distributed_cache.eviction import Blocks
from mpipar.distributed_cache.hashing import Chain
from mpipar.distributed_cache.holder import PoolHolder
from mpipar.distributed_cache.layout import Piece, plan_transfer
from mpipar.distributed_cache.mail import HEAD_BYTES, Frame, Mail
from mpipar.distributed_cache.storage import CacheStorage
from mpipar.distributed_cache.transfer import State, Transfer, agreed_layouts, cut
from mpipar.errors import CacheError, LayoutError, RankMismatch

WANT, HAVE, GONE, GET, DATA, DONE, EVENTS, ASK = range(8, 16)
Key = tuple[int, int]  # peer, its number of the transfer


class TransferEngine:
    """Fetches for one rank, and serves the others. Creation, `new_epoch`, `close` are collective.

    Parameters
    ----------
    comm : Communicator
        All ranks that may hold or want blocks; a group of its own is made of them.
    storage : CacheStorage
        This rank's blocks; block size, head dim and dtype are the same on every rank.
    window_bytes : int
        Data asked for and not yet here, at most (one chunk is always allowed).
    small_bytes, large_bytes : int
        Sizes of the frames: a small one carries the digests of a fetch, 16 bytes a block.
    retry_s, limit_s, lease_s : float
        Ask again after the first, fail after the second without any news; a pin that nobody uses
        ends after the third.
    clock : callable
        Seconds, growing.
    mail : callable, optional
        Makes the `Mail`.
    """

    def __init__(
        self,
        comm: Communicator,
        storage: CacheStorage,
        *,
        window_bytes: int = 4 << 20,
        small_bytes: int = 4096,
        large_bytes: int = 256 << 10,
        retry_s: float = 5.0,
        limit_s: float = 60.0,
        lease_s: float = 120.0,
        clock: Callable[[], float] = time.monotonic,
        mail: Callable[..., Mail] = Mail,
    ) -> None:
        self.storage, self.window_bytes = storage, window_bytes
        self.retry_s, self.limit_s, self.lease_s, self._clock = retry_s, limit_s, lease_s, clock
        sizes = [small_bytes, large_bytes]
        self.layouts = agreed_layouts(comm.all_gather_json([asdict(storage.layout), sizes]))
        self.mail = mail(comm, small_bytes, large_bytes)
        self.rank, self.epoch = comm.rank, 0
        self.log, self.directory = PrefixLog(comm.rank), PrefixDirectory(comm.size)
        self.holder: PoolHolder | None = None
        self._told = (0, 0)
        self._number = 0
        self._live: dict[int, Transfer] = {}
        self._leases: dict[Key, tuple[Blocks, float]] = {}
        self._open: Counter[int] = Counter()  # chunks asked of a peer
        self._open_bytes = 0
        self._handlers = {
            WANT: self._on_want, HAVE: self._on_have, GONE: self._on_gone, GET: self._on_get,
            DATA: self._on_data, DONE: self._on_done, EVENTS: self._on_events, ASK: self._on_ask,
        }  # fmt: skip

    # -- what the owner of the cache calls ----------------------------------------------------

    def serve(self, holder: PoolHolder) -> None:
        """Give the blocks that this rank offers; again after a restart with an empty pool.

        Parameters
        ----------
        holder : PoolHolder
            Over ``self.log``. Transfers under way fail, pins are forgotten with the old pool.
        """
        if self.holder is not None:
            for transfer in list(self._live.values()):
                transfer.blocks = transfer.blocks[:0]
                self._end(transfer, State.FAILED, "this rank's cache began anew")
            self._leases.clear()
            self.log.restart()
        self.holder = holder

    def fetch(self, group: Sequence[int], chain: Chain, *, waits: bool = False) -> Transfer:
        """Begin to bring a prefix here. Local: the sources answer in their `progress`.

        Parameters
        ----------
        group : sequence of int
            Ranks that together hold it, such as a tensor-parallel group and its stages.
        chain : Chain
            The blocks wanted; fewer may come, as fit a frame, the free blocks and the sources.
        waits : bool
            Stop at READY until `accept`, so that a group of readers can agree on the length.

        Returns
        -------
        Transfer
            COMPLETE or READY with ``n_blocks`` blocks once `progress` was called often enough.

        Raises
        ------
        LayoutError
            If the group does not hold all layers and heads of this rank.
        """
        if self.rank in group:
            raise LayoutError(f"rank {self.rank} cannot fetch from itself; group {list(group)}")
        turn = self.rank % max(1, len(group))  # replicas of a shard share the readers
        group = (*group[turn:], *group[:turn])
        layouts = [self.layouts[rank] for rank in group]
        pieces = plan_transfer(layouts, [self.storage.layout], (0, 0))
        n = min(len(chain), self.mail.room // 16)
        blocks = self._holding.reserve(n)
        self._number += 1
        transfer = Transfer(self._number, group, chain[: len(blocks)], blocks, waits)
        transfer.pieces, transfer.touched = pieces, self._clock()
        self._live[transfer.number] = transfer
        self._want(transfer)
        return transfer

    def accept(self, transfer: Transfer, n_blocks: int) -> None:
        """Take the first blocks of a READY transfer into the cache and give the others back.

        Parameters
        ----------
        transfer : Transfer
            At READY.
        n_blocks : int
            0 to ``transfer.n_blocks``.
        """
        if transfer.state is not State.READY or not 0 <= n_blocks <= transfer.n_blocks:
            raise CacheError(
                f"transfer {transfer.number} is {transfer.state} with {transfer.n_blocks} blocks; "
                f"{n_blocks} cannot be accepted"
            )
        self._holding.discard(transfer.blocks[n_blocks:])
        transfer.blocks, transfer.n_blocks = transfer.blocks[:n_blocks], n_blocks
        self._holding.commit(transfer.blocks, transfer.chain[:n_blocks])
        self._end(transfer, State.COMPLETE)

    def cancel(self, transfer: Transfer) -> None:
        """Give a transfer up; one that is over stays as it is.

        Parameters
        ----------
        transfer : Transfer
            Of this rank.
        """
        if not transfer.is_over:
            self._end(transfer, State.CANCELLED)

    def publish(self) -> None:
        """Tell every peer what this rank's cache gained and lost; with no news, where it stands."""
        for batch in self.log.since(*self._told, events_in(self.mail.room)):
            self.directory.apply(batch)
            for peer in self.mail.peers:
                self._post(peer, EVENTS, payload=batch.to_bytes())
        self._told = (self.log.epoch, self.log.sequence)

    def progress(self) -> None:
        """Move everything on without waiting: answer peers, take in data, ask for more."""
        for frame in self.mail.progress():
            if frame.words[0] == self.epoch:  # another epoch's words mean nothing here
                self._handlers[frame.kind](frame)
        now = self._clock()
        for key, (_, used) in list(self._leases.items()):
            if now - used > self.lease_s or key[0] in self.mail.closed:
                self._unpin(key)
        for transfer in list(self._live.values()):
            self._advance(transfer, now)

    def new_epoch(self) -> int:
        """Cancel everything and begin a new epoch, as when weights change. Collective.

        Returns
        -------
        int
            The epoch; what was sent in earlier ones is refused. The pools are the callers'.
        """
        self._drop_all()
        epochs = self.mail.comm.all_gather_json(self.epoch)
        if len(set(epochs)) > 1:
            raise RankMismatch("new cache epoch", f"ranks stand at epochs {epochs}")
        self.epoch += 1
        return self.epoch

    def close(self) -> None:
        """Cancel everything and drain what is on its way, on all ranks. Collective."""
        self._drop_all()
        self.mail.close()

    @property
    def n_bytes_asked(self) -> int:
        """Bytes of data that were asked for and are not here yet."""
        return self._open_bytes

    @property
    def n_pinned(self) -> int:
        """Fetches of peers that hold blocks of this rank now."""
        return len(self._leases)

    # -- the reader ---------------------------------------------------------------------------

    @property
    def _holding(self) -> PoolHolder:
        if self.holder is None:
            raise CacheError("this rank serves no pool yet: call serve first")
        return self.holder

    def _want(self, transfer: Transfer) -> None:
        transfer.asked_at = self._clock()
        text = transfer.chain.digests.astype("<u8").tobytes()
        for peer in set(transfer.sources) - set(transfer.answers):
            self._post(peer, WANT, transfer.number, payload=text)

    def _advance(self, transfer: Transfer, now: float) -> None:
        if transfer.state is State.READY:
            return
        gone = [peer for peer in transfer.sources if peer in self.mail.closed]
        if gone or now - transfer.touched > self.limit_s:
            why = f"ranks {gone} closed" if gone else f"no news within {self.limit_s:g} s"
            self._end(transfer, State.FAILED, f"{why}: {transfer.missing()}")
        elif transfer.state is State.RESERVED:
            if now - transfer.asked_at > self.retry_s:
                self._want(transfer)
        else:
            for index, asked in list(transfer.asked.items()):
                if now - asked > self.retry_s:
                    self._get(transfer, index)
            while transfer.next_chunk < len(transfer.chunks):
                size = transfer.chunks[transfer.next_chunk].n_bytes
                if self._open_bytes and self._open_bytes + size > self.window_bytes:
                    break
                self._open_bytes += size
                self._open[transfer.group[transfer.chunks[transfer.next_chunk].source]] += 1
                self._get(transfer, transfer.next_chunk)
                transfer.next_chunk += 1

    def _get(self, transfer: Transfer, index: int) -> None:
        chunk, transfer.asked[index] = transfer.chunks[index], self._clock()
        peer = transfer.group[chunk.source]
        self._cover(peer)
        box = (*chunk.layers, *chunk.heads, *chunk.tokens)
        self._post(peer, GET, transfer.number, index, *box)

    def _cover(self, peer: int) -> None:
        """A posted receive for every chunk that is asked of a peer."""
        for _ in range(self._open[peer] - self.mail.n_waiting(peer)):
            self.mail.expect(peer)

    def _on_have(self, frame: Frame) -> None:
        transfer = self._live.get(frame.words[1])
        if transfer is None or transfer.state is not State.RESERVED:
            return
        transfer.answers[frame.peer] = frame.words[2]
        transfer.touched = self._clock()
        if len(transfer.answers) < len(transfer.sources):
            return
        n = transfer.n_blocks = min(len(transfer.blocks), *transfer.answers.values())
        self._holding.discard(transfer.blocks[n:])
        transfer.blocks, transfer.state = transfer.blocks[:n], State.MOVING
        layout = self.storage.layout
        room = self.mail.large_bytes - HEAD_BYTES
        transfer.chunks = cut(transfer.pieces, n * layout.block_size, layout, room)
        self._look_whether_ready(transfer)

    def _on_gone(self, frame: Frame) -> None:
        transfer = self._live.get(frame.words[1])
        if transfer is not None and transfer.state is State.MOVING:
            self._end(transfer, State.FAILED, f"rank {frame.peer} has ended its pin")

    def _on_data(self, frame: Frame) -> None:
        number, index = frame.words[1], frame.words[2]
        transfer = self._live.get(number)
        if transfer is not None and transfer.asked.pop(index, None) is not None:
            chunk = transfer.chunks[index]
            self._close_chunk(transfer, chunk)
            self.storage.put_bytes(transfer.blocks, chunk, frame.payload)
            transfer.n_bytes += chunk.n_bytes
            transfer.touched = self._clock()
            self._look_whether_ready(transfer)
        self._cover(frame.peer)

    def _close_chunk(self, transfer: Transfer, chunk: Piece) -> None:
        self._open[transfer.group[chunk.source]] -= 1
        self._open_bytes -= chunk.n_bytes

    def _look_whether_ready(self, transfer: Transfer) -> None:
        if transfer.asked or transfer.next_chunk < len(transfer.chunks):
            return
        transfer.state = State.READY
        self._tell_done(transfer)
        if not transfer.waits:
            self.accept(transfer, transfer.n_blocks)

    def _tell_done(self, transfer: Transfer) -> None:
        for peer in transfer.sources:
            self._post(peer, DONE, transfer.number)

    def _end(self, transfer: Transfer, state: State, reason: str = "") -> None:
        was = transfer.state
        transfer.end(state, reason)
        del self._live[transfer.number]
        for index in transfer.asked:
            self._close_chunk(transfer, transfer.chunks[index])
        transfer.asked.clear()
        if state is not State.COMPLETE:
            self._holding.discard(transfer.blocks)
            transfer.blocks, transfer.n_blocks = transfer.blocks[:0], 0
            if was is not State.READY:
                self._tell_done(transfer)

    # -- the holder ---------------------------------------------------------------------------

    def _on_want(self, frame: Frame) -> None:
        key = (frame.peer, frame.words[1])
        if key not in self._leases:
            digests = frame.payload.view("<u8").reshape(-1, 2).astype(np.uint64)
            found = digests[:0, 0].astype(np.int32)
            if self.holder is not None:
                found = self.holder.pin(digests)
            self._leases[key] = (found, self._clock())
        self._post(frame.peer, HAVE, key[1], len(self._leases[key][0]))

    def _on_get(self, frame: Frame) -> None:
        peer, (_, number, index, *box, _) = frame.peer, frame.words
        blocks = self._leases.get((peer, number), (None, 0.0))[0]
        chunk = Piece(0, 0, (box[0], box[1]), (box[2], box[3]), (box[4], box[5]), 0)
        if blocks is None or chunk.tokens[1] > len(blocks) * self.storage.layout.block_size:
            self._post(peer, GONE, number)
            return
        self._leases[peer, number] = (blocks, self._clock())
        data = self.storage.get_bytes(blocks, chunk)
        self.mail.post_large(peer, DATA, self.epoch, number, index, payload=data)

    def _on_done(self, frame: Frame) -> None:
        self._unpin((frame.peer, frame.words[1]))

    def _unpin(self, key: Key) -> None:
        blocks, _ = self._leases.pop(key, (None, 0.0))
        if blocks is not None and self.holder is not None:
            self.holder.unpin(blocks)

    # -- the directory ------------------------------------------------------------------------

    def _on_events(self, frame: Frame) -> None:
        if not self.directory.apply(Batch.from_bytes(frame.payload.tobytes())):
            self._post(frame.peer, ASK, *self.directory.position(frame.peer))

    def _on_ask(self, frame: Frame) -> None:
        for batch in self.log.since(frame.words[1], frame.words[2], events_in(self.mail.room)):
            self._post(frame.peer, EVENTS, payload=batch.to_bytes())

    def _post(self, peer: int, kind: int, *words: int, payload: bytes = b"") -> None:
        self.mail.post(peer, kind, self.epoch, *words, payload=payload)

    def _drop_all(self) -> None:
        for transfer in list(self._live.values()):
            self.cancel(transfer)
        for key in list(self._leases):
            self._unpin(key)
