"""Where the array of one rank lies in the whole one. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mpipar.tensor_parallel import ShardedParameter


@dataclass(frozen=True)
class Extent:
    """A part of an array: runs of indices along one dim, in the order in which they are held.

    Parameters
    ----------
    shape : tuple of int
        Of the whole array.
    dim : int
        Along which it is split.
    runs : tuple of tuple of int
        Half-open ranges of global indices.
    """

    shape: tuple[int, ...]
    dim: int
    runs: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, shard: ShardedParameter, rank: int) -> Extent | None:
        """What a rank holds of a parameter.

        Parameters
        ----------
        shard : ShardedParameter
            The parameter.
        rank : int
            Which rank.

        Returns
        -------
        Extent or None
            Without padding; None where every rank holds all.
        """
        if shard.dim is None or shard.n_ranks == 1:
            return None
        return cls(shard.shape, shard.dim, shard.ranges(rank))

    @classmethod
    def whole(cls, shape: tuple[int, ...], dim: int) -> Extent:
        """All of an array, as a part along some dim.

        Parameters
        ----------
        shape : tuple of int
            Of the array.
        dim : int
            Any of its dims.

        Returns
        -------
        Extent
            One run.
        """
        return cls(shape, dim, ((0, shape[dim]),))

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the part."""
        held = sum(stop - start for start, stop in self.runs)
        return (*self.shape[: self.dim], held, *self.shape[self.dim + 1 :])

    def at(self, along: slice = slice(None)) -> tuple[slice, ...]:
        """Index of some places along the dim; of all of the part in an array with padding.

        Parameters
        ----------
        along : slice
            Places in the part; all of them by default.

        Returns
        -------
        tuple of slice
            One a dim up to the one that is split.
        """
        if along == slice(None):
            along = slice(0, self.local_shape[self.dim])
        return (slice(None),) * self.dim + (along,)

    def overlaps(self, other: Extent) -> Iterator[tuple[slice, slice]]:
        """Places that two parts along one dim share.

        Parameters
        ----------
        other : Extent
            Of the same array.

        Yields
        ------
        tuple of slice
            Places in this part, and those in the other.
        """
        mine = 0
        for start, stop in self.runs:
            theirs = 0
            for first, last in other.runs:
                low, high = max(start, first), min(stop, last)
                if low < high:
                    yield (
                        slice(mine + low - start, mine + high - start),
                        slice(theirs + low - first, theirs + high - first),
                    )
                theirs += last - first
            mine += stop - start

    def to_mapping(self) -> dict[str, Any]:
        """As plain values for JSON.

        Returns
        -------
        dict
            By field name.
        """
        return {"shape": self.shape, "dim": self.dim, "runs": self.runs}

    @classmethod
    def from_mapping(cls, values: dict[str, Any]) -> Extent:
        """The inverse of `to_mapping`.

        Parameters
        ----------
        values : dict
            As read from JSON.

        Returns
        -------
        Extent
            Equal to the one that was written.
        """
        runs = tuple((int(start), int(stop)) for start, stop in values["runs"])
        return cls(tuple(values["shape"]), int(values["dim"]), runs)
