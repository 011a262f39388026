"""Prefixes that another replica has computed: fetched before prefill, and served to the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from mpipar import distributed_cache as cache
from mpipar.comm.request import pause
from mpipar.distributed_cache.holder import digest_bytes
from mpipar.errors import CacheError
from mpipar.generate.decoder import Decoder


class PrefixFetcher:
    """One replica's end of the caches of all; it serves the pool of a generator.

    Parameters
    ----------
    engine : TransferEngine
        Over the decoder's storage; its ranks are replicas.
    decoder : Decoder
        All layers and heads on this rank, so that no other rank's tables must stay equal.
    sequences : PagedSequences
        Over the pool, with a `PrefixIndex`.

    Raises
    ------
    CacheError
        If the engine moves another storage, or the replica has more than one rank.
    """

    def __init__(
        self, engine: cache.TransferEngine, decoder: Decoder, sequences: cache.PagedSequences
    ) -> None:
        tp, pp = decoder.model.tp.size, 1 if decoder.pp is None else decoder.pp.size
        if engine.storage is not decoder.storage:
            raise CacheError("the transfer engine moves blocks of another storage than the decoder")
        if tp * pp > 1:
            raise CacheError(
                f"fetching prefixes needs replicas of one rank; this one has tp={tp}, pp={pp}"
            )
        index = sequences.index
        if not isinstance(index, cache.PrefixIndex):
            raise CacheError(f"fetching prefixes needs a PrefixIndex, not {type(index).__name__}")
        self._engine, self._sequences = engine, sequences
        self._transfer: cache.Transfer | None = None
        engine.serve(cache.PoolHolder(sequences.pool, index, engine.log))

    @property
    def holds_blocks(self) -> bool:
        """Whether a peer's pin or a fetch under way keeps blocks that will be free later."""
        under_way = self._transfer is not None and not self._transfer.is_over
        return under_way or self._engine.n_pinned > 0

    def begin(self, tokens: Sequence[int]) -> cache.Transfer | None:
        """Ask for the blocks of a prompt where a peer is believed to hold more than this rank.

        Parameters
        ----------
        tokens : sequence of int
            The prompt.

        Returns
        -------
        Transfer or None
            Under way; None where nobody has more.
        """
        size, engine = self._sequences.block_size, self._engine
        engine.progress()
        root = cache.root_digest(self._sequences.model)
        chain = cache.chain_of(tokens, size, root)[: (len(tokens) - 1) // size]
        lengths = engine.directory.lengths(digest_bytes(chain.digests))
        lengths[engine.rank] = 0
        most = max(lengths)
        if most <= len(self._sequences.index.match(chain)):
            return None
        self._transfer = engine.fetch([lengths.index(most)], chain[:most])
        return self._transfer

    def cancel(self) -> None:
        """Give up a fetch under way."""
        if self._transfer is not None:
            self._engine.cancel(self._transfer)

    def turn(self, publishes: bool) -> None:
        """Answer peers once. Local.

        Parameters
        ----------
        publishes : bool
            Tell them first what this rank's cache gained and lost.
        """
        if publishes:
            self._engine.publish()
        self._engine.progress()

    def until(self, done: Callable[[], bool]) -> None:
        """Answer peers until something holds.

        Parameters
        ----------
        done : callable
            Looked at after each turn.
        """
        turns = 0
        while not done():
            self._engine.progress()
            pause(turns := turns + 1)

    def meet(self) -> None:
        """Publish, and answer peers until all of them come here. Collective over the engine."""
        self._engine.publish()
        arrived = self._engine.mail.comm.begin_all_reduce(np.array(1))
        self.until(arrived.test)
        arrived.wait()
