"""Which part of a parameter a rank holds. Pure.

A parameter is split along one dim, in segments that are split each for itself: a fused query, key
and value weight has three, a fused gate and up weight two. So rank r holds the r-th run of heads of
each, and what it computes needs no peer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpipar.errors import LayoutError, UnevenSplit
from mpipar.units.remainder import divisors, exact_size, padded_size

Array = NDArray[Any]


@dataclass(frozen=True)
class ShardedParameter:
    """A parameter of which each of n ranks holds an equal part, or all of it.

    Parameters
    ----------
    shape : tuple of int
        Of the whole parameter.
    n_ranks : int
        Number of ranks.
    dim : int or None
        Which dim is split; None for a parameter that every rank holds.
    segments : tuple of int
        Sizes along `dim` that are split each for itself; by default one.
    padded : bool
        The last ranks are padded with zeros to equal size (vocabularies); else a size that does
        not divide is refused.

    Raises
    ------
    UnevenSplit
        If a segment does not divide; names the nearest degrees that would do.
    """

    shape: tuple[int, ...]
    n_ranks: int
    dim: int | None = None
    segments: tuple[int, ...] = ()
    padded: bool = False

    def __post_init__(self) -> None:
        if self.dim is None:
            return
        segments = self.segments or (self.shape[self.dim],)
        if sum(segments) != self.shape[self.dim]:
            raise LayoutError(
                f"segments {segments} sum to {sum(segments)}, but dim {self.dim} of shape "
                f"{self.shape} has {self.shape[self.dim]}"
            )
        object.__setattr__(self, "segments", tuple(segments))
        if not self.padded:
            for size in segments:
                exact_size(size, self.n_ranks, f"size of dim {self.dim}", "tp")

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of every rank's array."""
        if self.dim is None:
            return self.shape
        local = sum(padded_size(size, self.n_ranks) // self.n_ranks for size in self.segments)
        return (*self.shape[: self.dim], local, *self.shape[self.dim + 1 :])

    def ranges(self, rank: int) -> tuple[tuple[int, int], ...]:
        """What a rank holds along the split dim, as runs of global indices.

        Parameters
        ----------
        rank : int
            Which rank.

        Returns
        -------
        tuple of tuple of int
            A half-open range for each segment; the whole for a parameter that is not split.
        """
        if self.dim is None:
            return ()
        found, start = [], 0
        for size in self.segments:
            part = padded_size(size, self.n_ranks) // self.n_ranks
            low, high = (min(size, part * r) for r in (rank, rank + 1))
            found.append((start + low, start + high))
            start += size
        return tuple(found)

    def cut(self, whole: Array, rank: int) -> Array:
        """A rank's array, copied out of the whole parameter.

        Parameters
        ----------
        whole : ndarray
            The whole parameter.
        rank : int
            Which rank.

        Returns
        -------
        ndarray
            Of `local_shape`.
        """
        if tuple(whole.shape) != self.shape:
            raise LayoutError(f"the parameter has shape {self.shape}, got {tuple(whole.shape)}")
        if self.dim is None:
            return whole.copy()
        local = np.zeros(self.local_shape, whole.dtype)
        at = 0
        for start, stop in self.ranges(rank):
            local[self._at(at, at + stop - start)] = whole[self._at(start, stop)]
            at += stop - start
        return local

    def join(self, locals_: Sequence[Array]) -> Array:
        """The whole parameter from the arrays of all ranks: the inverse of `cut`.

        Parameters
        ----------
        locals_ : sequence of ndarray
            In rank order.

        Returns
        -------
        ndarray
            Of `shape`.
        """
        if self.dim is None:
            return np.asarray(locals_[0])
        whole = np.empty(self.shape, locals_[0].dtype)
        for rank, local in enumerate(locals_):
            at = 0
            for start, stop in self.ranges(rank):
                whole[self._at(start, stop)] = local[self._at(at, at + stop - start)]
                at += stop - start
        return whole

    def _at(self, start: int, stop: int) -> tuple[slice, ...]:
        return (slice(None),) * (self.dim or 0) + (slice(start, stop),)


def check_heads(n_heads: int, kv_heads: int, n_ranks: int) -> tuple[int, int]:
    """Query and key heads of each rank.

    Parameters
    ----------
    n_heads, kv_heads : int
        Of the whole layer.
    n_ranks : int
        Degree of tensor parallelism.

    Returns
    -------
    tuple of int
        Query heads and key heads of one rank.

    Raises
    ------
    UnevenSplit
        If either does not divide; names the nearest degrees that divide both.
    """
    if n_heads % n_ranks or kv_heads % n_ranks:
        valid = divisors(math.gcd(n_heads, kv_heads))
        near = [d for d in valid if d < n_ranks][-1:] + [d for d in valid if d > n_ranks][:1]
        what = f"n_heads={n_heads}" if n_heads % n_ranks else f"kv_heads={kv_heads}"
        raise UnevenSplit(
            "heads / tp",
            f"{what} cannot be split exactly over tp={n_ranks}; tp={' or '.join(map(str, near))} "
            f"would do (n_heads={n_heads}, kv_heads={kv_heads})",
        )
    return n_heads // n_ranks, kv_heads // n_ranks
