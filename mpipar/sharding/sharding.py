"""The pure half: which mesh axes split which dims, as text and as boxes of global indices.

The text form is ``A[I_dp, J_tp_cp]{sum_pp}``. Each dim has a letter and the axes that split it,
first the outermost; a dim without axes is whole on every rank. Axes that are not named hold
replicas. The braces say *partial*: the global array is the sum (product, min, max, mean) of the
local ones over those axes. Each axis in turn splits what the axes before it left, by the spread
rule, so shards may be uneven or empty, and removing the last axis of a dim always joins neighbours.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpipar.comm import ReduceOp
from mpipar.errors import CountOutOfRange, LayoutError
from mpipar.mesh import AXES, MeshLayout
from mpipar.units.remainder import spread_range

_TEXT = re.compile(r"\s*(?:[A-Za-z]\w*)?\s*\[(.*)\]\s*(?:\{\s*([a-z]+)((?:_[a-z]+)+)\s*\})?\s*")
_DIM = re.compile(r"[A-Z][A-Z0-9]*((?:_[a-z]+)*)")
_OPS = (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.MEAN)

Boxes = NDArray[np.int64]
"""Half-open ranges of global indices, shape (n_ranks, ndim, 2)."""


@dataclass(frozen=True)
class Sharding:
    """Which mesh axes split each dim, and over which axes the values are partial.

    Parameters
    ----------
    dims : tuple of tuple of str
        Axes of each dim, outermost first.
    partial : tuple of str
        Axes over which local values are still to be reduced.
    op : ReduceOp
        How: sum, product, min, max or mean.

    Raises
    ------
    LayoutError
        For an unknown axis, or one that is named twice.

    Examples
    --------
    >>> Sharding.parse("A[I_dp, J]{sum_tp}")
    Sharding('A[I_dp, J]{sum_tp}')
    """

    dims: tuple[tuple[str, ...], ...] = ()
    partial: tuple[str, ...] = ()
    op: ReduceOp = ReduceOp.SUM

    def __post_init__(self) -> None:
        named = [axis for axes in self.dims for axis in axes] + list(self.partial)
        for axis in named:
            MeshLayout(1).check_axis(axis)
            if named.count(axis) > 1:
                raise LayoutError(f"axis {axis} is named {named.count(axis)} times in {self}")
        if self.op not in _OPS:
            choices = ", ".join(_OPS)
            raise LayoutError(f"values cannot be partial by {self.op!r}; {choices} would do")
        object.__setattr__(self, "dims", tuple(tuple(axes) for axes in self.dims))
        object.__setattr__(self, "partial", tuple(a for a in AXES if a in self.partial))
        object.__setattr__(self, "op", ReduceOp(self.op) if self.partial else ReduceOp.SUM)

    @classmethod
    def parse(cls, text: str) -> Sharding:
        """Read the text form; names and letters are free, ``str`` gives ``A`` and ``I, J, K``.

        Parameters
        ----------
        text : str
            Such as ``"A[I_dp, J_tp]"``.

        Returns
        -------
        Sharding
            The value.

        Raises
        ------
        LayoutError
            If the text does not parse.
        """
        match = _TEXT.fullmatch(text)
        words = [w.strip() for w in match[1].split(",")] if match and match[1].strip() else []
        found = [_DIM.fullmatch(word) for word in words]
        op = match[2] if match else None
        if match is None or not all(found) or (op is not None and op not in set(_OPS)):
            raise LayoutError(
                f"no sharding: {text!r}; write a capital letter for each dim with the axes that "
                "split it, such as 'A[I_dp, J_tp]', 'A[I_dp_cp, J]' or 'A[I, J]{sum_tp}'"
            )
        dims = tuple(tuple(m[1].split("_")[1:]) for m in found if m is not None)
        partial = tuple(match[3].split("_")[1:]) if match[3] else ()
        return cls(dims, partial, ReduceOp(op or "sum"))

    def without_partial(self) -> Sharding:
        """The same placements with the reduction carried out.

        Returns
        -------
        Sharding
            Not partial.
        """
        return Sharding(self.dims)

    def __str__(self) -> str:
        letters = [chr(ord("I") + d) if d < 18 else f"D{d}" for d in range(len(self.dims))]
        dims = ", ".join("_".join((n, *axes)) for n, axes in zip(letters, self.dims, strict=True))
        partial = "{" + "_".join((self.op.value, *self.partial)) + "}" if self.partial else ""
        return f"A[{dims}]{partial}"

    def __repr__(self) -> str:
        return f"Sharding({str(self)!r})"


@dataclass(frozen=True)
class ArraySpec:
    """All that is known about a sharded array on every rank: shape, dtype, mesh and sharding.

    Parameters
    ----------
    shape : tuple of int
        Of the global array.
    dtype : dtype
        Of its elements.
    layout : MeshLayout
        The mesh.
    sharding : Sharding
        One entry for each dim.

    Raises
    ------
    LayoutError
        If the number of dims differs.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    layout: MeshLayout
    sharding: Sharding

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(int(n) for n in self.shape))
        object.__setattr__(self, "dtype", np.dtype(self.dtype))
        if len(self.shape) != len(self.sharding.dims):
            raise LayoutError(
                f"{self.sharding} has {len(self.sharding.dims)} dims, the array of shape "
                f"{self.shape} has {len(self.shape)}"
            )

    @cached_property
    def partial(self) -> tuple[str, ...]:
        """Axes of a degree above 1 over which values are partial."""
        return tuple(a for a in self.sharding.partial if self.layout.degree(a) > 1)

    @property
    def boxes(self) -> Boxes:
        """Box of every rank, shape (n_ranks, ndim, 2); read-only."""
        return _boxes(self.shape, self.layout, self.sharding.dims)

    @property
    def volumes(self) -> NDArray[np.int64]:
        """Elements of every rank."""
        boxes = self.boxes
        return np.asarray(np.prod(boxes[..., 1] - boxes[..., 0], axis=-1, dtype=np.int64))

    def slices(self, rank: int) -> tuple[slice, ...]:
        """The part of the global array that a rank holds.

        Parameters
        ----------
        rank : int
            Rank of the mesh.

        Returns
        -------
        tuple of slice
            One a dim.
        """
        if not 0 <= rank < self.layout.world_size:
            raise CountOutOfRange("rank", f"0..{self.layout.world_size - 1}", rank)
        return tuple(slice(start, stop) for start, stop in self.boxes[rank].tolist())

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of a rank's array.

        Parameters
        ----------
        rank : int
            Rank of the mesh.

        Returns
        -------
        tuple of int
            Zeros where its shard is empty.
        """
        return tuple(s.stop - s.start for s in self.slices(rank))

    def owners(self, *index: int) -> tuple[int, ...]:
        """The ranks that hold one element (a term of it, where values are partial).

        Parameters
        ----------
        *index : int
            Global index, one number a dim.

        Returns
        -------
        tuple of int
            At least one rank, ascending.
        """
        valid = len(index) == len(self.shape)
        if not valid or not all(0 <= i < n for i, n in zip(index, self.shape, strict=True)):
            raise LayoutError(f"no element {index} in an array of shape {self.shape}")
        at = np.asarray(index, np.int64)
        holds = ((self.boxes[..., 0] <= at) & (at < self.boxes[..., 1])).all(axis=-1)
        return tuple(np.flatnonzero(holds).tolist())

    def with_sharding(self, sharding: Sharding, layout: MeshLayout | None = None) -> ArraySpec:
        """The same global array laid out otherwise.

        Parameters
        ----------
        sharding : Sharding
            The other sharding.
        layout : MeshLayout, optional
            The other mesh.

        Returns
        -------
        ArraySpec
            Same shape and dtype.
        """
        return ArraySpec(self.shape, self.dtype, layout or self.layout, sharding)

    def __str__(self) -> str:
        mesh = " x ".join(f"{axis}={d}" for axis, d in self.layout.degrees.items() if d > 1)
        return f"{self.dtype.name}{list(self.shape)} as {self.sharding} on {mesh or 'one rank'}"


@lru_cache(maxsize=64)
def places(layout: MeshLayout) -> dict[str, NDArray[np.int64]]:
    """Index of every rank along each axis.

    Parameters
    ----------
    layout : MeshLayout
        The mesh.

    Returns
    -------
    dict of str to ndarray
        Shape (n_ranks,) each.
    """
    degrees = layout.degrees
    found = np.unravel_index(np.arange(layout.world_size), tuple(degrees.values()))
    return dict(zip(degrees, found, strict=True))


@lru_cache(maxsize=256)
def _boxes(shape: tuple[int, ...], layout: MeshLayout, dims: tuple[tuple[str, ...], ...]) -> Boxes:
    boxes = np.empty((layout.world_size, len(shape), 2), np.int64)
    for dim, (total, axes) in enumerate(zip(shape, dims, strict=True)):
        bounds, index = [(0, total)], np.zeros(layout.world_size, np.int64)
        for axis in axes:
            degree = layout.degree(axis)
            bounds = [
                (start + low, start + high)
                for start, stop in bounds
                for low, high in (spread_range(stop - start, degree, i) for i in range(degree))
            ]
            index = index * degree + places(layout)[axis]
        boxes[:, dim] = np.asarray(bounds, np.int64)[index]
    boxes.setflags(write=False)
    return boxes
