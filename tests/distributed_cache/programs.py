"""Random programs on one rank of the cache, held against a slow model: tokens and nothing else."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import lru_cache
from hashlib import blake2b
from typing import Any

import numpy as np

from mpipar.comm import Communicator
from mpipar.distributed_cache.holder import digest_bytes
from mpipar.distributed_cache.layout import CacheLayout, Piece
from mpipar.distributed_cache.mail import Mail
from mpipar.distributed_cache.pool import RESERVED
from mpipar.distributed_cache.transfer import State, Transfer
from mpipar.errors import CacheError
from tests.distributed_cache.holding import CacheRank

STEPS = ["start", "append", "append", "commit", "fork", "truncate", "preempt", "resume", "evict"]
STEPS += ["finish", "finish"]
REMOTE = ["fetch", "fetch", "abort", "publish", "restart"]
LAYOUT = CacheLayout((0, 2), (0, 2), 2, block_size=4, dtype="float64")


@lru_cache(100_000)
def token_content(prefix: tuple[int, ...]) -> np.ndarray:
    """What the last token of a prefix leaves: [layer, k/v, head, dim], each element its own."""
    text = np.array(prefix, "<i4").tobytes()
    number = int.from_bytes(blake2b(text, digest_size=5).digest(), "little")
    return np.arange(16.0).reshape(2, 2, 2, 2) + 16.0 * number


def row_content(tokens: list[int], start: int, stop: int) -> np.ndarray:
    """[layer, k/v, head, token, dim] of tokens start..stop."""
    return np.stack([token_content(tuple(tokens[: i + 1])) for i in range(start, stop)], axis=3)


class FaultyMail(Mail):
    """Loses, repeats, delays and reorders frames, as no MPI does; a close is left alone."""

    def __init__(self, *arguments: Any, rng: random.Random) -> None:
        super().__init__(*arguments)
        self.rng, self.is_faulty, self.counts = (
            rng,
            True,
            dict.fromkeys(["drop", "twice", "late"], 0),
        )
        self._held: list[Callable[[], None]] = []

    def post(self, *arguments: Any, **options: Any) -> None:
        self._perhaps(lambda: Mail.post(self, *arguments, **options))

    def post_large(self, *arguments: Any, **options: Any) -> None:
        self._perhaps(lambda: Mail.post_large(self, *arguments, **options))

    def _perhaps(self, send: Callable[[], None]) -> None:
        roll = self.rng.random() if self.is_faulty else 1.0
        if roll < 0.1:
            self.counts["drop"] += 1
            return
        if roll < 0.2:
            self.counts["twice"] += 1
            send()
        if roll < 0.4:
            self.counts["late"] += 1
            self._held.append(send)
        else:
            send()

    def close(self, timeout_s: float = 60.0) -> None:
        while self._held:  # nothing may follow the last frame
            self._held.pop()()
        super().close(timeout_s)

    def progress(self) -> Any:
        self.rng.shuffle(self._held)
        while self._held and (not self.is_faulty or self.rng.random() < 0.3):
            self._held.pop()()
        return super().progress()


class Program(CacheRank):
    """One rank's program; the model of a sequence is its list of tokens."""

    def __init__(self, comm: Communicator, seed: int, n_blocks: int, **options: Any) -> None:
        self.rng = random.Random(seed * 1000 + comm.rank)
        shared = random.Random(seed)
        stem = [shared.randrange(50) for _ in range(16)]
        self.prompts = [stem[: 4 * i] + [shared.randrange(50) for _ in range(24)] for i in range(5)]
        self.known: dict[bytes, list[int]] = {}
        self.live: list[Any] = []
        self.transfers: list[tuple[Transfer, list[int]]] = []
        self.ends: dict[State, int] = {}
        self.n_fetched = 0
        super().__init__(
            comm, LAYOUT, n_blocks, small_bytes=512, large_bytes=400, window_bytes=600, **options
        )

    def learn(self, tokens: list[int]) -> list[int]:
        for i, digest in enumerate(digest_bytes(self.chain(tokens).digests)):
            self.known[digest] = tokens[: 4 * i + 4]
        return tokens

    def write(self, sequence: Any, start: int) -> None:
        tokens = sequence.tokens.tolist()
        for i in range(start, len(tokens)):
            self.storage.data[sequence.table[i // 4], :, :, :, i % 4] = token_content(
                tuple(tokens[: i + 1])
            )

    def copy(self, copies: list[tuple[int, int]]) -> None:
        if copies:
            self.storage.copy([s for s, _ in copies], [t for _, t in copies])

    def prompt(self) -> list[int]:
        tokens = self.rng.choice(self.prompts)
        return self.learn(tokens[: self.rng.randrange(1, len(tokens) + 1)])

    def pick(self, running: bool = True) -> Any:
        return self.rng.choice([s for s in self.live if s.running is running])

    # -- steps --------------------------------------------------------------------------------

    def do_start(self) -> None:
        sequence = self.sequences.start(self.prompt())
        self.live.append(sequence)
        self.write(sequence, sequence.n_hit_tokens)

    def do_append(self) -> None:
        sequence, before = self.pick(), 0
        before = sequence.n_tokens
        self.copy(self.sequences.append(sequence, [self.rng.randrange(50) for _ in range(3)]))
        self.learn(sequence.tokens.tolist())
        self.write(sequence, before)

    def do_commit(self) -> None:
        self.sequences.commit(self.pick())

    def do_fork(self) -> None:
        child, copies = self.sequences.fork(self.pick())
        self.live.append(child)
        self.copy(copies)

    def do_truncate(self) -> None:
        sequence = self.pick()
        self.sequences.truncate(sequence, self.rng.randrange(1, sequence.n_tokens + 1))

    def do_preempt(self) -> None:
        self.sequences.preempt(self.pick())

    def do_resume(self) -> None:
        sequence = self.pick(running=False)
        self.sequences.resume(sequence)
        self.write(sequence, sequence.n_hit_tokens)

    def do_finish(self) -> None:
        sequence = self.rng.choice(self.live)
        self.live.remove(sequence)
        self.sequences.finish(sequence)

    def do_evict(self) -> None:
        blocks = self.pool.allocate(
            self.rng.randrange(1, self.pool.n_free + self.pool.n_cached + 1)
        )
        self.storage.data[blocks] = -7.0
        self.pool.release(blocks)

    def do_fetch(self) -> None:
        tokens = self.prompt()
        peer = self.rng.choice(self.engine.mail.peers)
        self.transfers.append((self.engine.fetch([peer], self.chain(tokens)), tokens))

    def do_abort(self) -> None:
        self.engine.cancel(self.rng.choice(self.transfers)[0])

    def do_publish(self) -> None:
        self.engine.publish()

    def do_restart(self) -> None:
        if self.rng.random() < 0.1:
            self.live.clear()
            self.begin()

    def step(self) -> None:
        """One step; what finds no block or no sequence changes nothing."""
        names = STEPS + (REMOTE if self.engine.mail.peers else [])
        try:
            getattr(self, f"do_{self.rng.choice(names)}")()
        except (CacheError, IndexError):
            pass
        except ValueError as error:
            if "empty range" not in str(error):
                raise
        for _ in range(self.rng.randrange(4)):
            self.engine.progress()
        for transfer, tokens in list(self.transfers):
            if transfer.is_over:
                self.transfers.remove((transfer, tokens))
                self.ends[transfer.state] = self.ends.get(transfer.state, 0) + 1
                self.n_fetched += transfer.n_blocks

    # -- the model ----------------------------------------------------------------------------

    def verify_all(self) -> None:
        """Every token of every sequence and every block that can be hit is what it must be."""
        for sequence in self.live:
            if sequence.running:
                n = sequence.n_tokens
                box = self.storage.get_box(sequence.table, Piece(0, 0, (0, 2), (0, 2), (0, n), 0))
                np.testing.assert_array_equal(box, row_content(sequence.tokens.tolist(), 0, n))
        for block in np.flatnonzero(self.pool.hashed):
            tokens = self.known[digest_bytes(self.pool.digest[block : block + 1])[0]]
            np.testing.assert_array_equal(
                self.storage.data[block], row_content(tokens, len(tokens) - 4, len(tokens))
            )
        self.index.check()
        pinned = [blocks for blocks, _ in self.engine._leases.values()]
        self.pool.check([*(sequence.table for sequence in self.live), *pinned])
        reserved = [b for t, _ in self.transfers if not t.is_over for b in t.blocks.tolist()]
        assert sorted(reserved) == np.flatnonzero(self.pool.state == RESERVED).tolist()

    def leave(self) -> None:
        """Finish everything; nothing may be left."""
        for transfer, _ in self.transfers:
            self.engine.cancel(transfer)
        self.transfers.clear()
        for sequence in self.live:
            self.sequences.finish(sequence)
        self.live.clear()
        super().leave()
        assert self.pool.n_free + self.pool.n_cached == self.pool.n_blocks


def run_program(
    comm: Communicator,
    seed: int,
    n_steps: int = 150,
    faulty: bool = False,
    n_blocks: int = 24,
    kind: type[Program] = Program,
) -> dict[str, Any]:
    """The body: a program, checked as it goes; says what happened."""
    options: dict[str, Any] = {}
    if faulty:
        ticks = iter(range(10**9))
        options = {
            "clock": lambda: float(next(ticks)), "retry_s": 60.0, "limit_s": 900.0,
            "lease_s": 1500.0,
            "mail": lambda *a: FaultyMail(*a, rng=random.Random(seed * 77 + comm.rank)),
        }  # fmt: skip
    program = kind(comm, seed, n_blocks, **options)
    for step in range(n_steps):
        program.step()
        if step % 10 == 0:
            program.verify_all()
    mail: Any = program.engine.mail
    counts = getattr(mail, "counts", {})
    if faulty:
        mail.is_faulty = False
    program.meet()  # nobody asks for more
    program.engine.publish()
    program.meet()
    if comm.size > 1:  # on a fabric that loses nothing every fetch that is left alone arrives
        tokens = program.learn(program.prompts[0])
        last = program.bring([(comm.rank + 1) % comm.size], tokens)
        assert last.state is State.COMPLETE, last.reason
        program.ends[State.COMPLETE] = program.ends.get(State.COMPLETE, 0) + 1
    program.leave()
    return {"ends": program.ends, "n_fetched": program.n_fetched, "faults": counts}
