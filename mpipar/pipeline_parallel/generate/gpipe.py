"""GPipe (Huang et al. 2019): all forwards, then all backwards."""

from __future__ import annotations

import numpy as np

from mpipar.pipeline_parallel.action import Kind
from mpipar.pipeline_parallel.generate.assemble import assemble, check_sizes
from mpipar.pipeline_parallel.schedule import Schedule


def gpipe(n_ranks: int, n_microbatches: int) -> Schedule:
    """All forwards, then all backwards in reverse order; every activation is held at once.

    Parameters
    ----------
    n_ranks, n_microbatches : int
        Any numbers from 1.

    Returns
    -------
    Schedule
        One stage per rank; 2 (p + m - 1) slots where F and B take one each.
    """
    check_sizes(n_ranks, n_microbatches)
    kind = np.repeat(np.array([Kind.F, Kind.B], dtype=np.int8), n_microbatches)
    up = np.arange(n_microbatches)
    number = np.concatenate([up, up[::-1]])
    rows = [(kind, np.full(len(kind), rank), number) for rank in range(n_ranks)]
    return assemble("gpipe", n_microbatches, range(n_ranks), rows)
