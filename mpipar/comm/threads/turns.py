"""Turns: many threads of which exactly one runs, handed on where it says so."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable


class Turns:
    """Who runs: exactly one thread; every other one waits for a condition of its own.

    Parameters
    ----------
    n : int
        Number of threads, known by index.
    rng : random.Random or None
        Chooses the next one; without it they take turns.
    """

    def __init__(self, n: int, rng: random.Random | None) -> None:
        self.running = -1
        self.finished = threading.Event()
        self._gates = [threading.Semaphore(0) for _ in range(n)]
        self._ready: list[Callable[[], bool] | None] = [lambda: True] * n
        self._rng = rng
        self.stuck: Callable[[], None] = lambda: None

    def start(self) -> None:
        """Let the first one run."""
        self._pass_on(-1)

    def wait(self, rank: int) -> None:
        """Wait for the first turn of `rank`."""
        self._gates[rank].acquire()

    def leave(self, rank: int) -> None:
        """End `rank` and hand on."""
        self._ready[rank] = None
        self._pass_on(rank)

    def block(self, rank: int, ready: Callable[[], bool]) -> None:
        """Hand on, and come back when `ready()` (which must have no effects) is true."""
        self._ready[rank] = ready
        if self._pass_on(rank) != rank:
            self._gates[rank].acquire()

    def _pass_on(self, rank: int) -> int:
        n = len(self._ready)
        order = [(rank + 1 + i) % n for i in range(n)]
        able = [r for r in order if (f := self._ready[r]) is not None and f()]
        if not able and any(f is not None for f in self._ready):
            self.stuck()
            able = [r for r in order if (f := self._ready[r]) is not None and f()]
        if not able:
            self.finished.set()
            return -1
        chosen = able[0] if self._rng is None else self._rng.choice(able)
        self.running = chosen
        if chosen != rank or self._ready[rank] is None:
            self._gates[chosen].release()
        return chosen
