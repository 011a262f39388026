"""What a group that shares its block tables does next: one rank decides, all apply the same plan.

Ranks of a tensor-parallel group hold other heads of the same tokens, so their pools make the same
steps. Were each to decide for itself, a free block more on one rank would end in mixed data.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpipar.comm.base import Communicator
from mpipar.errors import CacheError


class PlanStream:
    """Numbered plans of one group.

    Parameters
    ----------
    group : Communicator
        Ranks that apply the same plans; rank 0 decides.
    """

    def __init__(self, group: Communicator) -> None:
        self.group, self.number = group, 0

    def next(self, decide: Callable[[], Any]) -> Any:
        """The next plan. Collective, in every step and on every rank, with or without work.

        Parameters
        ----------
        decide : callable
            Called on rank 0; gives what JSON holds. Its error is raised on every rank.

        Returns
        -------
        object
            The same on every rank; two broadcasts.

        Raises
        ------
        CacheError
            If this rank has applied fewer or more plans than rank 0.
        """
        number, plan = self.group.made_by_root(lambda: [self.number, decide()])
        if number != self.number:
            raise CacheError(f"plan {number} came to a rank that has applied {self.number} plans")
        self.number += 1
        return plan
