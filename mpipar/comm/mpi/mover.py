"""Keeps calls under way moving while a thread is inside a blocking call of the MPI.

Peers may be waiting for the next step of something begun here, and the MPI knows nothing of our
steps. A blocking collective cannot be carried out by its non-blocking form instead, since the two
do not match between ranks, and only this rank knows what it has begun.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_PERIOD_S = 0.0005


class Mover:
    """A thread that is started when it is first needed.

    Parameters
    ----------
    advance : callable
        Moves on whatever no thread is at.
    """

    def __init__(self, advance: Callable[[], None]) -> None:
        self._advance = advance
        self._own: list[Callable[[], None]] = []
        self._wanted = threading.Event()
        self._step = threading.Lock()
        self._thread: threading.Thread | None = None

    @contextmanager
    def moving(self, own: Callable[[], None]) -> Iterator[None]:
        """While the caller is inside the MPI.

        Parameters
        ----------
        own : callable
            Moves on the messages of the group that the caller is at.

        Yields
        ------
        None
            To the blocking call.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="mpipar mover", daemon=True)
            self._thread.start()
        with self._step:
            self._own.append(own)
        self._wanted.set()
        try:
            yield
        finally:
            with self._step:
                self._own.remove(own)
                if not self._own:
                    self._wanted.clear()

    def _run(self) -> None:
        while True:
            self._wanted.wait()
            with self._step:
                if self._own:
                    self._advance()
                for own in self._own:
                    own()
            time.sleep(_PERIOD_S)
