"""Interleaved 1F1B (Narayanan et al. 2021): several chunks of the model on each rank."""

from __future__ import annotations

import numpy as np

from mpipar.errors import CountOutOfRange
from mpipar.pipeline_parallel.action import Kind
from mpipar.pipeline_parallel.generate.assemble import assemble, check_sizes, in_turn, occurrences
from mpipar.pipeline_parallel.schedule import Ints, Schedule, placement


def interleaved(
    n_ranks: int, n_microbatches: int, *, n_chunks: int = 2, group_size: int | None = None
) -> Schedule:
    """1F1B over chunks: a group of microbatches passes chunk after chunk, bubble cut by chunks.

    Parameters
    ----------
    n_ranks, n_microbatches : int
        Any numbers from 1; the last group is smaller where groups do not divide microbatches.
    n_chunks : int
        Stages per rank, placed in a loop.
    group_size : int, optional
        Microbatches that a rank runs through one chunk before the next; `n_ranks` if left out.

    Returns
    -------
    Schedule
        With ``n_ranks * n_chunks`` stages.

    Raises
    ------
    CountOutOfRange
        If a count is below 1.
    """
    check_sizes(n_ranks, n_microbatches, n_chunks)
    group = n_ranks if group_size is None else group_size
    if group < 1:
        raise CountOutOfRange("group size", "1 or more", group)
    chunk, number = _forward_order(n_microbatches, n_chunks, group)
    rows = []
    for rank in range(n_ranks):
        ahead = (n_chunks - 1) * min(group, n_microbatches) + 2 * (n_ranks - 1 - rank)
        kind = in_turn(len(chunk), (Kind.F, 0), (Kind.B, min(ahead, len(chunk))))
        item = occurrences(kind)
        local = np.where(kind == Kind.F, chunk[item], n_chunks - 1 - chunk[item])
        rows.append((kind, local * n_ranks + rank, number[item]))
    owners = placement("loop", n_ranks, n_ranks * n_chunks)
    return assemble("interleaved", n_microbatches, owners, rows)


def _forward_order(n_microbatches: int, n_chunks: int, group: int) -> tuple[Ints, Ints]:
    """Chunk and microbatch of a rank's k-th forward; its k-th backward mirrors the chunk."""
    number = np.arange(n_microbatches)
    chunk, numbers = np.meshgrid(np.arange(n_chunks), number, indexing="ij")
    order = np.lexsort((numbers.ravel(), chunk.ravel(), numbers.ravel() // group))
    return chunk.ravel()[order], numbers.ravel()[order]
