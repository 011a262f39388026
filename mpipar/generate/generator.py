"""Many requests at once: admission by free blocks, preemption, shared prefixes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from mpipar import distributed_cache as cache
from mpipar.errors import CacheError, CountOutOfRange, EmptyInput, OutOfRange
from mpipar.generate.decoder import Decoder, Span
from mpipar.generate.fetching import PrefixFetcher
from mpipar.generate.sampling import Sampling

Emit = Callable[[int, int], None]


@dataclass
class Figures:
    """What a run of requests did.

    Attributes
    ----------
    prompt_tokens, skipped_tokens : int
        Tokens of all prompts, and those that the cache had.
    prompt_blocks, hit_blocks : int
        Full blocks of all prompts, and those that the cache had.
    prefilled, decoded : int
        Tokens computed in steps with a new or resumed request, and in steps of one token each.
    prefill_s, decode_s : float
        Seconds of these steps.
    preemptions : int
        How often a request gave up its blocks.
    peak_blocks : int
        Most blocks that requests held at once.
    fetched_blocks, fetched_bytes : int
        What other ranks sent.
    failed_fetches : int
        Fetches that brought nothing; the blocks were computed.
    """

    prompt_tokens: int = 0
    skipped_tokens: int = 0
    prompt_blocks: int = 0
    hit_blocks: int = 0
    prefilled: int = 0
    decoded: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    preemptions: int = 0
    peak_blocks: int = 0
    fetched_blocks: int = 0
    fetched_bytes: int = 0
    failed_fetches: int = 0


@dataclass(eq=False)
class _Request:
    number: int
    prompt: list[int]
    new: list[int] = field(default_factory=list)
    pending: list[int] = field(default_factory=list)
    sequence: cache.Sequence | None = None
    asked: bool = False
    transfer: cache.Transfer | None = None


class Generator:
    """Continues prompts; keys and values of earlier calls stay cached.

    Parameters
    ----------
    decoder : Decoder
        This rank's layers.
    sampling : Sampling, optional
        Greedy by default.
    shares_prefixes : bool
        Reuse the blocks of equal prefixes.
    engine : TransferEngine, optional
        Over the decoder's storage: blocks that another replica holds are fetched before prefill.
        Then `generate` is collective over its ranks; one without prompts answers the others.

    Attributes
    ----------
    figures : Figures
        Of the last call.
    sequences : PagedSequences
        Block tables, equal on every rank.
    """

    def __init__(
        self,
        decoder: Decoder,
        sampling: Sampling | None = None,
        shares_prefixes: bool = True,
        engine: cache.TransferEngine | None = None,
    ) -> None:
        self.decoder = decoder
        self.sampling = sampling or Sampling()
        self.figures = Figures()
        self.shares_prefixes = shares_prefixes
        storage = decoder.storage
        pool = cache.BlockPool(storage.n_blocks)
        self.sequences = cache.PagedSequences(pool, storage.layout.block_size)
        self.fetcher = None if engine is None else PrefixFetcher(engine, decoder, self.sequences)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        stop: int | None = None,
        emit: Emit | None = None,
    ) -> list[list[int]]:
        """Continue every prompt. Collective over all ranks of the decoder and of the engine.

        Parameters
        ----------
        prompts : sequence of sequence of int
            Tokens; the same on every rank.
        max_tokens : int
            New tokens of each.
        stop : int, optional
            A token that ends a text, and is not part of it.
        emit : callable, optional
            Called with a request's number and a new token, as they come.

        Returns
        -------
        list of list of int
            New tokens of each prompt.

        Raises
        ------
        EmptyInput
            If a prompt has no token.
        CountOutOfRange
            If a text would be longer than the model's context or than the cache.
        """
        self._check(prompts, max_tokens)
        self.figures = Figures()
        requests = [_Request(i, [int(t) for t in p]) for i, p in enumerate(prompts)]
        waiting, running = deque(requests), list[_Request]()
        try:
            while waiting or running:
                self._grow(running, waiting)
                is_prefill = self._admit(running, waiting)
                if running:
                    self._step(running, is_prefill)
                    self._take(running, max_tokens, stop, emit)
                if self.fetcher is not None:
                    self.fetcher.turn(is_prefill)
        finally:  # an error leaves no block held
            for sequence in list(self.sequences.live):
                self.sequences.finish(sequence)
            if self.fetcher is not None:
                self.fetcher.cancel()
        if self.fetcher is not None:
            self.fetcher.meet()
        return [request.new for request in requests]

    def _check(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
        c, storage = self.decoder.model.config, self.decoder.storage
        if max_tokens < 1:
            raise CountOutOfRange("new tokens", "1 or more", max_tokens)
        room = storage.n_blocks * storage.layout.block_size
        for number, prompt in enumerate(prompts):
            if not len(prompt):
                raise EmptyInput(f"prompt {number}", "it needs at least one token")
            if wrong := [t for t in prompt if not 0 <= t < c.vocabulary]:
                raise OutOfRange(f"token of prompt {number}", f"0..{c.vocabulary - 1}", wrong[0])
            n = len(prompt) + max_tokens
            for what, most in (("the model's context", c.sequence), ("the cache", room)):
                if n > most:
                    raise CountOutOfRange(
                        f"tokens of prompt {number} ({len(prompt)} and {max_tokens} new) in {what}",
                        f"1..{most} (at most {max(0, most - len(prompt))} new)",
                        n,
                    )

    def _grow(self, running: list[_Request], waiting: deque[_Request]) -> None:
        """Make room for the token that each request has chosen; the youngest gives way."""
        for request in list(running):
            while request in running and request.pending:
                try:
                    self._append(request)
                except CacheError:
                    youngest = running.pop()
                    self.sequences.preempt(_of(youngest))
                    self.figures.preemptions += 1
                    waiting.appendleft(youngest)

    def _append(self, request: _Request) -> None:
        copies = self.sequences.append(_of(request), request.pending)
        request.pending = []
        if copies:
            sources, targets = zip(*copies, strict=True)
            self.decoder.storage.copy(sources, targets)

    def _admit(self, running: list[_Request], waiting: deque[_Request]) -> bool:
        """One request a step, so that the next one can hit its blocks."""
        if not waiting:
            return False
        request = waiting[0]
        if not self._has_fetched(request, not running):
            return False
        try:
            if request.sequence is not None:
                self.sequences.resume(request.sequence)
            else:
                salt = "" if self.shares_prefixes else str(request.number)
                request.sequence = self.sequences.start(request.prompt, salt=salt)
                self._count(request)
        except CacheError:
            if running or (self.fetcher is not None and self.fetcher.holds_blocks):
                return False
            raise
        running.append(waiting.popleft())
        if request.pending:
            try:
                self._append(request)
            except CacheError:
                self.sequences.preempt(_of(running.pop()))
                waiting.appendleft(request)
                return False
        return True

    def _has_fetched(self, request: _Request, waits: bool) -> bool:
        """Whether a new request's blocks are here, as far as others have them."""
        fetcher = self.fetcher
        if fetcher is None or not self.shares_prefixes or request.sequence is not None:
            return True
        if not request.asked:
            request.asked, request.transfer = True, fetcher.begin(request.prompt)
        if (transfer := request.transfer) is None:
            return True
        if waits:
            fetcher.until(lambda: transfer.is_over)
        if not transfer.is_over:
            return False
        request.transfer = None
        self.figures.fetched_blocks += transfer.n_blocks
        self.figures.fetched_bytes += transfer.n_bytes
        self.figures.failed_fetches += not transfer.n_blocks
        return True

    def _count(self, request: _Request) -> None:
        figures, size = self.figures, self.sequences.block_size
        hit = _of(request).n_hit_tokens
        figures.prompt_tokens += len(request.prompt)
        figures.skipped_tokens += hit
        figures.prompt_blocks += len(request.prompt) // size
        figures.hit_blocks += hit // size

    def _step(self, running: list[_Request], is_prefill: bool) -> None:
        sequences = [_of(request) for request in running]
        spans = [Span(s.tokens[s.n_committed :], s.n_committed, s.table) for s in sequences]
        held = len(set(np.concatenate([s.table for s in sequences]).tolist()))
        figures, n = self.figures, sum(len(span.tokens) for span in spans)
        figures.peak_blocks = max(figures.peak_blocks, held)
        start = time.perf_counter()
        scores = self.decoder.step(spans)
        chosen = np.zeros(len(spans), np.int64)
        if scores is not None:
            for row, (request, s) in enumerate(zip(running, sequences, strict=True)):
                chosen[row] = self.sampling.choose(scores[row], request.number, s.n_tokens)
        if (pp := self.decoder.pp) is not None:
            chosen = pp.broadcast(chosen, root=pp.size - 1)
        seconds = time.perf_counter() - start
        if is_prefill:
            figures.prefilled, figures.prefill_s = (
                figures.prefilled + n,
                figures.prefill_s + seconds,
            )
        else:
            figures.decoded, figures.decode_s = figures.decoded + n, figures.decode_s + seconds
        for request, s, token in zip(running, sequences, chosen.tolist(), strict=True):
            self.sequences.commit(s)
            request.pending = [token]

    def _take(
        self, running: list[_Request], max_tokens: int, stop: int | None, emit: Emit | None
    ) -> None:
        for request in list(running):
            [token] = request.pending
            if token != stop:
                request.new.append(token)
                if emit is not None:
                    emit(request.number, token)
            if token == stop or len(request.new) == max_tokens:
                running.remove(request)
                self.sequences.finish(_of(request))


def _of(request: _Request) -> cache.Sequence:
    if request.sequence is None:
        raise CacheError(f"request {request.number} was never started")
    return request.sequence
