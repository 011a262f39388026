"""DualPipeV: DeepSeek's DualPipe cut in half, two chunks per rank there and back.

Steps and their lengths are those of the DualPipe repository's description; a forward and a full
backward of the steady state run as one overlapped pair, so that the communication inside one
hides behind the computation of the other.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from mpipar.errors import ScheduleError
from mpipar.pipeline_parallel.action import Kind
from mpipar.pipeline_parallel.generate.assemble import assemble, check_sizes
from mpipar.pipeline_parallel.schedule import Bools, Schedule, placement


def dualpipe_v(n_ranks: int, n_microbatches: int) -> Schedule:
    """The DualPipeV schedule.

    Parameters
    ----------
    n_ranks : int
        Any number from 1.
    n_microbatches : int
        At least ``2 * n_ranks``: below that its steady state does not exist.

    Returns
    -------
    Schedule
        With ``2 * n_ranks`` stages and overlapped pairs.

    Raises
    ------
    ScheduleError
        For fewer microbatches.
    """
    check_sizes(n_ranks, n_microbatches)
    if n_microbatches < 2 * n_ranks:
        raise ScheduleError(
            f"dualpipe-v over {n_ranks} ranks is not defined for {n_microbatches} microbatches; "
            f"{2 * n_ranks} is the least"
        )
    rows = [_Rank(rank, n_ranks).run(n_microbatches) for rank in range(n_ranks)]
    return assemble(
        "dualpipe-v",
        n_microbatches,
        placement("v", n_ranks, 2 * n_ranks),
        [row.cells() for row in rows],
        [row.overlapped() for row in rows],
    )


class _Rank:
    """One rank's list; chunk 0 is on the way there, chunk 1 on the way back."""

    def __init__(self, rank: int, n_ranks: int) -> None:
        self.rank, self.n_ranks = rank, n_ranks
        self._stage = (rank, 2 * n_ranks - 1 - rank)
        self._next = {Kind.F: [0, 0], Kind.I: [0, 0]}
        self._weights: deque[tuple[int, int]] = deque()
        self._rows: list[tuple[int, int, int, bool]] = []

    def cells(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        table = np.array(self._rows, dtype=np.int64)
        return table[:, 0], table[:, 1], table[:, 2]

    def overlapped(self) -> Bools:
        return np.array([row[3] for row in self._rows], dtype=bool)

    def run(self, n_microbatches: int) -> _Rank:
        p, r = self.n_ranks, self.rank
        behind = p - 1 - r
        for _ in range(2 * behind):  # 1: forwards there
            self._put(Kind.F, 0)
        for _ in range(r + 1):  # 2: forwards there and back in turn
            self._put(Kind.F, 0)
            self._put(Kind.F, 1)
        for _ in range(behind):  # 3: split backwards, no bubble
            self._put(Kind.I, 1)
            self._put_weight()
            self._put(Kind.F, 1)
        for i in range(n_microbatches - 2 * p + r + 1):  # 4: overlapped both ways
            if i == 0 and r == p - 1:  # its first pair has nothing to overlap with
                self._put(Kind.F, 0)
                self._put(Kind.B, 1)
            else:
                self._put_pair(0, 1)
            self._put_pair(1, 0)
        for _ in range(behind):  # 5: backward back, overlapped there
            self._put(Kind.B, 1)
            self._put_pair(1, 0)
        # 6 and 7: backwards, split from the middle on; 8: the weights that are left
        turns = [chunk for _ in range(r + 1) for chunk in (1, 0)]
        for i, chunk in enumerate(turns):
            self._put(Kind.I if i > r else Kind.B, chunk)
        for _ in range(behind):
            self._put_weight()
            self._put(Kind.I, 0)
        while self._weights:
            self._put_weight()
        return self

    def _put(self, kind: Kind, chunk: int, overlapped: bool = False) -> None:
        counted = self._next[Kind.F if kind == Kind.F else Kind.I]
        number = counted[chunk]
        counted[chunk] = number + 1
        self._rows.append((kind, self._stage[chunk], number, overlapped))
        if kind == Kind.I:
            self._weights.append((self._stage[chunk], number))

    def _put_pair(self, forward: int, backward: int) -> None:
        self._put(Kind.F, forward, overlapped=True)
        self._put(Kind.B, backward)

    def _put_weight(self) -> None:
        if self._weights:
            stage, number = self._weights.popleft()
            self._rows.append((Kind.W, stage, number, False))
