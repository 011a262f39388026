"""Which rank takes a request: missing blocks against load, ties the same everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from mpipar.errors import CountOutOfRange

RouterKind = Literal["cost", "round robin", "longest prefix"]


class Router:
    """Chooses a rank for each request; integers only, so every rank computes the same.

    *cost*: the least of ``weight * missing blocks + load``; ties go to the rank with the least
    work in total, then to the lowest rank. *longest prefix*: the fewest missing blocks, then the
    lowest rank. *round robin*: ranks in turn.

    Load is what was given to a rank, in missing blocks, and halves at every `half_life` boundary.

    Parameters
    ----------
    n_ranks : int
        Number of ranks, at least 1.
    kind : {"cost", "round robin", "longest prefix"}
        The rule.
    weight : int
        Cost of a missing block against a unit of load.
    half_life : int
        Time between halvings, in the unit of `choose` (milliseconds by default: 60 s).

    Attributes
    ----------
    load, work : list of int
        Decayed and total missing blocks that each rank was given.
    """

    def __init__(
        self,
        n_ranks: int,
        kind: RouterKind = "cost",
        *,
        weight: int = 100,
        half_life: int = 60_000,
    ) -> None:
        if n_ranks < 1:
            raise CountOutOfRange("number of ranks", "1 or more", n_ranks)
        if kind not in get_args(RouterKind):
            raise ValueError(f"router {kind!r} is unknown: {', '.join(get_args(RouterKind))}")
        self.n_ranks, self.kind = n_ranks, kind
        self.weight, self.half_life = weight, half_life
        self.load = [0] * n_ranks
        self.work = [0] * n_ranks
        self._turn = 0
        self._period = 0

    def choose(self, missing: Sequence[int], now: int = 0) -> int:
        """Choose a rank and charge it with its missing blocks.

        Parameters
        ----------
        missing : sequence of int
            For each rank, how many blocks of the request it lacks (as the directory knows it).
        now : int
            Time of the request; must not go back by more than a half-life.

        Returns
        -------
        int
            The rank.

        Raises
        ------
        CountOutOfRange
            If there is not one number a rank.
        """
        if len(missing) != self.n_ranks:
            raise CountOutOfRange("numbers of missing blocks", str(self.n_ranks), len(missing))
        self._decay(now)
        ranks = range(self.n_ranks)
        if self.kind == "round robin":
            chosen = self._turn % self.n_ranks
            self._turn += 1
        elif self.kind == "longest prefix":
            chosen = min(ranks, key=lambda r: (missing[r], r))
        else:
            cost = [self.weight * missing[r] + self.load[r] for r in ranks]
            chosen = min(ranks, key=lambda r: (cost[r], self.work[r], r))
        self.load[chosen] += int(missing[chosen])
        self.work[chosen] += int(missing[chosen])
        return chosen

    def _decay(self, now: int) -> None:
        periods = now // self.half_life - self._period
        if periods > 0:
            self._period += periods
            self.load = [load >> min(periods, 63) for load in self.load]
