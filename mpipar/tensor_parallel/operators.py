"""Conjugate operators: what a layer does forward, and its adjoint backward.

Each is named by its two directions. Shoeybi et al. (2019) call copy/all-reduce *f* and
all-reduce/copy *g*; Korthikanti et al. (2022) call the second one *f-bar*, the sequence-parallel
all-gather/reduce-scatter *g* and its inverse *g-bar*.

A value that is the same on every rank of the group is one logical value; copies of it that are used
differently are many. That decides the adjoints, which the tests check as <Ax, y> = <x, A'y>.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from numpy.typing import NDArray

from mpipar.comm import Communicator
from mpipar.errors import LayoutError
from mpipar.nn.array import contiguous
from mpipar.units.remainder import spread_range, spread_sizes

Array = NDArray[Any]


class Operator:
    """A pair of directions over one group; B is the bytes of the whole (not split) array.

    Parameters
    ----------
    comm : Communicator
        The group.
    dim : int
        Dim that is split or joined.
    size : int, optional
        Whole size of that dim, where ranks hold uneven parts; the first ranks take one more.
    """

    _ways: ClassVar[tuple[Callable[[Any, Array], Array], Callable[[Any, Array], Array]]]

    def __init__(self, comm: Communicator, dim: int = -1, size: int | None = None) -> None:
        self.comm, self.dim, self.size = comm, dim, size

    def forward(self, x: Array) -> Array:
        """Apply the operator. Collective where it communicates.

        Parameters
        ----------
        x : ndarray
            This rank's array.

        Returns
        -------
        ndarray
            `x` itself where nothing is to be done.
        """
        return self._ways[0](self, x)

    def backward(self, grad: Array) -> Array:
        """Apply the adjoint. Collective where it communicates.

        Parameters
        ----------
        grad : ndarray
            Gradient of the output.

        Returns
        -------
        ndarray
            Gradient of the input; `grad` itself where nothing is to be done.
        """
        return self._ways[1](self, grad)

    def _copy(self, x: Array) -> Array:
        return x

    def _all_reduce(self, x: Array) -> Array:
        total: Array = x if self.comm.size == 1 else self.comm.all_reduce(x)
        return total

    def _split(self, x: Array) -> Array:
        start, stop = spread_range(self._whole(x), self.comm.size, self.comm.rank)
        index = (slice(None),) * (self.dim % x.ndim) + (slice(start, stop),)
        part: Array = contiguous(x[index])
        return part

    def _whole(self, x: Array) -> int:
        if self.size is not None and self.size != x.shape[self.dim]:
            raise LayoutError(f"dim {self.dim} of shape {x.shape} must have {self.size}")
        return int(x.shape[self.dim])

    def _counts(self, x: Array) -> list[int]:
        total = x.shape[self.dim] * self.comm.size if self.size is None else self.size
        return list(spread_sizes(total, self.comm.size))

    def _gather(self, x: Array) -> Array:
        joined: Array = self.comm.all_gather(x, self.dim, self._counts(x))
        return joined

    def _reduce_scatter(self, x: Array) -> Array:
        counts = spread_sizes(self._whole(x), self.comm.size)
        mine: Array = self.comm.reduce_scatter(x, dim=self.dim, counts=counts)
        return mine


class CopyAllReduce(Operator):
    """Copy forward, all-reduce backward: *f*, before a column-parallel product.

    Cost: 2 (n-1)/n B a rank, backward.
    """

    _ways = (Operator._copy, Operator._all_reduce)


class AllReduceCopy(Operator):
    """All-reduce forward, copy backward: *g* (*f-bar*), after a row-parallel product.

    Cost: 2 (n-1)/n B a rank, forward.
    """

    _ways = (Operator._all_reduce, Operator._copy)


class GatherSplit(Operator):
    """All-gather forward, split backward, where all ranks then do the same with the whole.

    Cost: (n-1)/n B a rank, forward.
    """

    _ways = (Operator._gather, Operator._split)


class SplitGather(Operator):
    """Split forward, all-gather backward: the inverse of `GatherSplit`.

    Cost: (n-1)/n B a rank, backward.
    """

    _ways = (Operator._split, Operator._gather)


class AllGatherReduceScatter(Operator):
    """All-gather forward, reduce-scatter backward: sequence-parallel *g*.

    Cost: (n-1)/n B a rank in each direction.
    """

    _ways = (Operator._gather, Operator._reduce_scatter)


class ReduceScatterAllGather(Operator):
    """Reduce-scatter forward, all-gather backward: sequence-parallel *g-bar*.

    Cost: (n-1)/n B a rank in each direction.
    """

    _ways = (Operator._reduce_scatter, Operator._gather)
