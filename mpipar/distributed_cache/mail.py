"""Frames between ranks that nobody waits for: small ones at any time, large ones when asked for.

Each rank keeps one receive for a small frame of each peer posted; a large frame is sent only where
its reader has said that it posted the receive. So no send depends on buffers of the MPI, and every
frame says itself what it is: lost order harms nothing.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from typing import Any, NamedTuple

import numpy as np

from mpipar.comm.base import Communicator
from mpipar.comm.request import Request, pause
from mpipar.errors import CacheError, CollectiveTimeout, CountOutOfRange

Array = Any
N_WORDS = 12
HEAD_BYTES = 8 * N_WORDS
CLOSE, FILLER = 0, 1  # kinds below 8 are the mail's own
_SMALL, _LARGE = 0, 1  # tags


class Frame(NamedTuple):
    """What came: from whom, its numbers and its bytes.

    Attributes
    ----------
    peer, kind : int
        Who sent it, and what it is.
    words : tuple of int
        Up to ten numbers.
    payload : array of uint8
        What follows; of a large frame without copying.
    """

    peer: int
    kind: int
    words: tuple[int, ...]
    payload: Array


class Mail:
    """The frames of one group. Creation and `close` are collective.

    Parameters
    ----------
    comm : Communicator
        A group of its own is split from it.
    small_bytes, large_bytes : int
        Sizes of the two kinds of frames, equal on all ranks.
    """

    def __init__(self, comm: Communicator, small_bytes: int, large_bytes: int) -> None:
        if min(small_bytes, large_bytes) < 2 * HEAD_BYTES:
            raise CountOutOfRange("bytes of a frame", f"{2 * HEAD_BYTES} or more", small_bytes)
        group = comm.split(0, comm.rank, purpose="cache mail")
        if group is None:
            raise CacheError("the cache's own group is empty")
        self.comm, self.small_bytes, self.large_bytes = group, small_bytes, large_bytes
        self.peers = [rank for rank in range(group.size) if rank != group.rank]
        self.closed: dict[int, tuple[int, int]] = {}  # large frames that a peer sent and posted
        self._sends: list[Request] = []
        self._small: dict[int, tuple[Request, Array]] = {}
        self._large: dict[int, deque[tuple[Request, Array]]] = {p: deque() for p in self.peers}
        self._n_sent: Counter[int] = Counter()
        self._n_expected: Counter[int] = Counter()
        for peer in self.peers:
            self._listen(peer)

    @property
    def room(self) -> int:
        """Bytes of payload in a small frame."""
        return self.small_bytes - HEAD_BYTES

    def post(self, peer: int, kind: int, *words: int, payload: bytes = b"") -> None:
        """Send a small frame.

        Parameters
        ----------
        peer : int
            To whom.
        kind : int
            8 or more.
        *words : int
            At most ten.
        payload : bytes
            At most `room`.
        """
        if len(payload) > self.room:
            raise CountOutOfRange(
                "bytes of a small frame's payload", f"0..{self.room}", len(payload)
            )
        data = np.frombuffer(payload, np.uint8)
        self._send(peer, _SMALL, self.small_bytes, kind, words, data)

    def expect(self, peer: int) -> None:
        """Post the receive of a large frame, before asking the peer for it.

        Parameters
        ----------
        peer : int
            Who will send it.
        """
        buffer = np.empty(self.large_bytes, np.uint8)
        self._large[peer].append((self.comm.begin_recv(buffer, peer, _LARGE), buffer))
        self._n_expected[peer] += 1

    def n_waiting(self, peer: int) -> int:
        """Receives of large frames that are posted and not met.

        Parameters
        ----------
        peer : int
            From whom.

        Returns
        -------
        int
            0 or more.
        """
        return len(self._large[peer])

    def post_large(self, peer: int, kind: int, *words: int, payload: Array) -> None:
        """Send a large frame that the peer asked for.

        Parameters
        ----------
        peer, kind, *words
            As in `post`.
        payload : array of uint8
            At most ``large_bytes - HEAD_BYTES``.
        """
        self._n_sent[peer] += 1
        self._send(peer, _LARGE, self.large_bytes, kind, words, payload)

    def progress(self) -> list[Frame]:
        """Move everything on without waiting.

        Returns
        -------
        list of Frame
            What has come, small frames first.
        """
        self.comm.progress()
        self._sends = [request for request in self._sends if not request.test()]
        frames = []
        for peer in list(self._small):
            while peer in self._small and self._small[peer][0].test():
                frame = _opened(peer, self._small.pop(peer)[1])
                if frame.kind == CLOSE:
                    self.closed[peer] = (frame.words[0], frame.words[1])
                else:
                    self._listen(peer)
                    frames.append(frame)
        for peer, queue in self._large.items():
            while queue and queue[0][0].test():
                frame = _opened(peer, queue.popleft()[1])
                if frame.kind != FILLER:
                    frames.append(frame)
        return frames

    def close(self, timeout_s: float = 60.0) -> None:
        """Meet every posted receive and finish every send, on both sides. Collective.

        Parameters
        ----------
        timeout_s : float
            After which the peers that did not close are named.
        """
        for peer in self.peers:
            words = (self._n_sent[peer], self._n_expected[peer])
            self._send(peer, _SMALL, self.small_bytes, CLOSE, words, np.empty(0, np.uint8))
        self._until(lambda: len(self.closed) == len(self.peers), timeout_s)
        for peer, (n_sent, n_expected) in self.closed.items():
            for _ in range(n_sent - self._n_expected[peer]):
                self.expect(peer)
            for _ in range(n_expected - self._n_sent[peer]):
                self.post_large(peer, FILLER, payload=np.empty(0, np.uint8))
        self._until(lambda: not self._sends and not any(self._large.values()), timeout_s)
        self.comm.close()

    def _until(self, done: Any, timeout_s: float) -> None:
        stop, turns = time.monotonic() + timeout_s, 0
        while not done():
            self.progress()
            turns += 1
            pause(turns)
            if time.monotonic() > stop:
                missing = sorted(set(self.peers) - set(self.closed))
                raise CollectiveTimeout(f"closing the cache mail: ranks {missing} do not close")

    def _listen(self, peer: int) -> None:
        buffer = np.empty(self.small_bytes, np.uint8)
        self._small[peer] = self.comm.begin_recv(buffer, peer, _SMALL), buffer

    def _send(
        self, peer: int, tag: int, size: int, kind: int, words: tuple[int, ...], data: Array
    ) -> None:
        frame = np.zeros(size, np.uint8) if tag == _SMALL else np.empty(size, np.uint8)
        head = frame[:HEAD_BYTES].view(np.int64)
        head[:] = 0
        head[0], head[1], head[2 : 2 + len(words)] = kind, data.size, words
        frame[HEAD_BYTES : HEAD_BYTES + data.size] = data
        self._sends.append(self.comm.begin_send(frame, peer, tag))


def _opened(peer: int, frame: Array) -> Frame:
    kind, size, *words = frame[:HEAD_BYTES].view(np.int64).tolist()
    return Frame(peer, kind, tuple(words), frame[HEAD_BYTES : HEAD_BYTES + size])
