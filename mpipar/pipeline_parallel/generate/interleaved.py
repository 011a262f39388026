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
        Microbatches that a rank runs through one chunk before the next, any number from 1;
        `n_ranks` if left out.

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
    first = (n_chunks - 1) * min(group, n_microbatches)
    ahead = [min(first + 2 * (n_ranks - 1 - r), len(chunk)) for r in range(n_ranks)]
    if group >= n_ranks and n_microbatches % group == 0:
        kinds = [in_turn(len(chunk), (Kind.F, 0), (Kind.B, a)) for a in ahead]
    else:
        kinds = _by_availability(chunk, number, n_chunks, ahead)
    rows = []
    for rank, kind in enumerate(kinds):
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


def _by_availability(chunk: Ints, number: Ints, n_chunks: int, ahead: list[int]) -> list[Ints]:
    """Kinds of each rank when small or uneven groups make strict alternation deadlock.

    Round by round each rank runs its next backward once `ahead` forwards are under way, else its
    next forward, and the other of the two where that one's input is not there yet.
    """
    n_ranks, n_items, last = len(ahead), len(chunk), len(ahead) * n_chunks - 1
    items = list(zip(chunk.tolist(), number.tolist(), strict=True))
    done: set[tuple[Kind, int, int]] = set()
    count = {kind: [0] * n_ranks for kind in (Kind.F, Kind.B)}
    kinds: list[list[Kind]] = [[] for _ in ahead]

    def ready(kind: Kind, rank: int) -> tuple[Kind, int, int] | None:
        if count[kind][rank] == n_items:
            return None
        local, mb = items[count[kind][rank]]
        if kind is Kind.F:
            stage = local * n_ranks + rank
            met = stage == 0 or (Kind.F, stage - 1, mb) in done
        else:
            stage = (n_chunks - 1 - local) * n_ranks + rank
            met = ((Kind.F, stage, mb) if stage == last else (Kind.B, stage + 1, mb)) in done
        return (kind, stage, mb) if met else None

    while len(done) < 2 * n_items * n_ranks:
        chosen = []
        for rank in range(n_ranks):
            forward, backward = ready(Kind.F, rank), ready(Kind.B, rank)
            full = count[Kind.F][rank] - count[Kind.B][rank] > ahead[rank]
            pick = backward if full or forward is None else forward
            if pick is not None:
                chosen.append((rank, pick))
        for rank, pick in chosen:
            done.add(pick)
            count[pick[0]][rank] += 1
            kinds[rank].append(pick[0])
    return [np.array(row, dtype=np.int8) for row in kinds]
