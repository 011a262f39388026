"""Random numbers of a part of a global array: what one rank would draw, whatever the degree.

Every rank draws from the same stream and keeps its own part, a run of rows at a time. So masks and
parameters are equal on replicas, different on shards, and the same for any degree; nothing of the
global size is ever held. Drawing costs every rank the time of the whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from mpipar import nn
from mpipar.errors import LayoutError
from mpipar.nn.array import placed
from mpipar.tensor_parallel.operators import Array
from mpipar.tensor_parallel.parameter import ShardedParameter

_CHUNK_BYTES = 256 * 1024
Part = tuple[slice, ...]


def draw_shard(
    draw: Callable[[tuple[int, int]], Array],
    shape: tuple[int, ...],
    part: Part,
    dtype: DTypeLike = np.float32,
) -> Array:
    """Draw an array row by row and keep a part of it.

    Parameters
    ----------
    draw : callable
        Draws some rows, such as ``lambda shape: generator.normal(0.0, 0.02, shape)``; the values
        must not depend on how many rows are drawn at a time, as NumPy's of 64 bits do not.
    shape : tuple of int
        Of the global array.
    part : tuple of slice
        What is kept, one slice a dim, with steps of 1.
    dtype : dtype
        Of the result.

    Returns
    -------
    ndarray
        Equal to ``draw(shape)[part]``.
    """
    width = shape[-1] if shape else 1
    kept = _kept_rows(shape, part)
    columns = part[-1] if part else slice(None)
    out = np.empty(
        tuple(len(range(*s.indices(n))) for s, n in zip(part, shape, strict=True)), dtype
    )
    rows = out.reshape(int(kept.sum()), out.shape[-1] if shape else 1)
    at = 0
    for run in _runs(len(kept), width):
        drawn, wanted = draw((run.stop - run.start, width)), kept[run]
        n = int(wanted.sum())
        rows[at : at + n] = drawn[wanted][:, columns]
        at += n
    return out


def draw_parameter(
    draw: Callable[[tuple[int, int]], Array],
    shard: ShardedParameter,
    rank: int,
    dtype: DTypeLike = np.float32,
) -> Array:
    """Draw a matrix row by row and keep what a rank holds of it.

    Parameters
    ----------
    draw : callable
        As in `draw_shard`.
    shard : ShardedParameter
        Of a matrix.
    rank : int
        Which rank.
    dtype : dtype
        Of the result.

    Returns
    -------
    ndarray
        Equal to ``shard.cut(draw(shard.shape), rank)``.
    """
    n_in = shard.shape[1]
    if shard.dim is None:
        return draw_shard(draw, shard.shape, (slice(None), slice(None)), dtype)
    if shard.dim == 1:
        [columns] = shard.ranges(rank)
        return draw_shard(draw, shard.shape, (slice(None), slice(*columns)), dtype)
    local, at, first = np.zeros(shard.local_shape, dtype), 0, 0
    for size, (start, stop) in zip(shard.segments, shard.ranges(rank), strict=True):
        part = (slice(start - first, stop - first), slice(None))
        local[at : at + stop - start] = draw_shard(draw, (size, n_in), part, dtype)
        at, first = at + stop - start, first + size
    return local


def dropout_slope_shard(
    like: Array,
    rate: float,
    generator: np.random.Generator,
    shape: tuple[int, ...],
    part: Part,
) -> Array:
    """This rank's part of a global dropout mask; see `mpipar.nn.dropout_slope`.

    Parameters
    ----------
    like : ndarray
        This rank's array: gives shape and dtype.
    rate : float
        Probability of dropping.
    generator : numpy.random.Generator
        In the same state on every rank; ends in the same state on every rank.
    shape : tuple of int
        Of the global array.
    part : tuple of slice
        Which part of it `like` is.

    Returns
    -------
    ndarray
        Shape of `like`; for an even last size of `shape` equal to the part of what
        `mpipar.nn.dropout_slope` draws for the global array.
    """
    row = np.empty((1, 1), like.dtype)

    def draw(size: tuple[int, int]) -> Array:
        mask: Array = nn.dropout_slope(np.broadcast_to(row, size), rate, generator)
        return mask

    found = draw_shard(draw, shape, part, like.dtype)
    if found.shape != like.shape:
        raise LayoutError(f"the part {part} of {shape} has shape {found.shape}, not {like.shape}")
    return found if isinstance(like, np.ndarray) else placed(found, like)


def _kept_rows(shape: tuple[int, ...], part: Part) -> Any:
    kept = np.zeros(shape[:-1], bool)
    kept[part[:-1]] = True
    return kept.reshape(-1)


def _runs(n_rows: int, width: int) -> Iterator[slice]:
    step = max(1, _CHUNK_BYTES // max(1, 8 * width))
    for index in range(math.ceil(n_rows / step)):
        yield slice(index * step, min(n_rows, (index + 1) * step))
