"""Lazy arrays: operations build one graph; nothing is computed before `realize`.

Shapes, dtypes and devices are checked while the graph is built, so that a run cannot fail on them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpipar.comm.arrays import accumulation_dtype, as_array, result_dtype
from mpipar.comm.call import Array, ReduceOp
from mpipar.device_group.arithmetic import Arithmetic
from mpipar.device_group.device import Device
from mpipar.errors import CountOutOfRange, EmptyInput, LayoutError, UnsupportedArray

Shape = tuple[int, ...]
PLAIN = (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.MEAN)


class Graph:
    """What a set of lazy arrays belongs to; arrays of two graphs never meet."""

    def constant(self, values: Any, device: Device) -> LazyArray:
        """Copy values to a device.

        Parameters
        ----------
        values : array-like
            Numbers.
        device : Device
            Where they live.

        Returns
        -------
        LazyArray
            Realized.
        """
        host = as_array(values, "values")
        found = self.placeholder(host.shape, host.dtype, device)
        found.op, found.buffer = "constant", device.upload(host)
        return found

    def placeholder(self, shape: Sequence[int], dtype: Any, device: Device) -> LazyArray:
        """An array without data, for `trace`.

        Parameters
        ----------
        shape : sequence of int
            Its shape.
        dtype : dtype
            Its element type.
        device : Device
            Where it would live.

        Returns
        -------
        LazyArray
            Cannot be realized.

        Raises
        ------
        UnsupportedArray
            For a dtype that is no number.
        """
        dtype = np.dtype(dtype)
        accumulation_dtype(dtype, ReduceOp.MAX if dtype.kind == "b" else ReduceOp.SUM)
        return LazyArray(self, "placeholder", (), tuple(shape), dtype, device)


class LazyArray(Arithmetic):
    """One array of a graph: what it will be, where it lives, and from what it is made.

    Made by `Graph.constant`, by operators and by collectives, never by hand.

    Parameters
    ----------
    graph : Graph
        What it belongs to.
    op : str
        Operation.
    inputs : tuple of LazyArray
        Arrays it is made from.
    shape : tuple of int
        Its shape.
    dtype : dtype
        Its element type.
    device : Device
        Where it lives.
    **options : object
        Of the operation.
    """

    __array_ufunc__ = None  # a NumPy array on the left must not take over

    def __init__(
        self,
        graph: Graph,
        op: str,
        inputs: tuple[LazyArray, ...],
        shape: Shape,
        dtype: np.dtype[Any],
        device: Device,
        **options: Any,
    ) -> None:
        self.graph = graph
        self.op = op
        self.inputs = inputs
        self.shape = shape
        self.dtype = dtype
        self.device = device
        self.options = options
        self.buffer: Any = None

    def __repr__(self) -> str:
        return f"LazyArray({self.op}, {self.shape}, {self.dtype}, on {self.device.name})"

    def __bool__(self) -> bool:
        raise UnsupportedArray(f"{self!r} has no truth value before it is computed: use numpy()")

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.size * self.dtype.itemsize

    def made(self, op: str, *more: LazyArray, shape: Shape, **options: Any) -> LazyArray:
        """An array made from this one and others, unchecked; for this room's own use.

        Parameters
        ----------
        op : str
            Operation.
        *more : LazyArray
            Inputs after this array.
        shape : tuple of int
            Of the result.
        **options : object
            Of the operation; `dtype` where it is not that of `self`.

        Returns
        -------
        LazyArray
            On the same device.
        """
        dtype = options.pop("dtype", self.dtype)
        return LazyArray(self.graph, op, (self, *more), shape, dtype, self.device, **options)

    def _unary(self, name: str) -> LazyArray:
        dtype = getattr(np, name)(np.ones(1, self.dtype)).dtype
        return self.made("elementwise", shape=self.shape, dtype=dtype, name=name)

    def _binary(self, name: str, other: Any, swapped: bool = False) -> LazyArray:
        if not isinstance(other, LazyArray):
            if not isinstance(other, int | float | complex):
                raise UnsupportedArray(
                    f"{name} of {self!r} and {type(other).__name__}: wrap it with Graph.constant"
                )
            dtype = getattr(np, name)(np.ones(1, self.dtype), other).dtype
            return self.made("elementwise", shape=self.shape, dtype=dtype, name=name,
                             scalar=other, swapped=swapped)  # fmt: skip
        check_together((self, other), name)
        alike = self.shape == other.shape and self.dtype == other.dtype
        if name == "add" and alike and self.dtype.kind != "b":
            return self.made("combine", other, shape=self.shape, reduce_op=ReduceOp.SUM)
        try:
            shape = np.broadcast_shapes(self.shape, other.shape)
        except ValueError:
            raise LayoutError(
                f"{name}: shapes {self.shape} and {other.shape} do not broadcast"
            ) from None
        dtype = getattr(np, name)(np.ones(1, self.dtype), np.ones(1, other.dtype)).dtype
        return self.made("elementwise", other, shape=shape, dtype=dtype, name=name)

    def __matmul__(self, other: LazyArray) -> LazyArray:
        check_together((self, other), "matmul")
        if self.ndim < 2 or other.ndim < 2 or self.shape[-1] != other.shape[-2]:
            raise LayoutError(
                f"matmul: shapes {self.shape} and {other.shape} need 2 dims or more, and the last "
                "dim of the first equal to the last but one of the second"
            )
        try:
            stack = np.broadcast_shapes(self.shape[:-2], other.shape[:-2])
        except ValueError:
            raise LayoutError(
                f"matmul: stacks of {self.shape} and {other.shape} do not broadcast"
            ) from None
        shape = (*stack, self.shape[-2], other.shape[-1])
        return self.made(
            "matmul", other, shape=shape, dtype=np.result_type(self.dtype, other.dtype)
        )

    def reduce(
        self,
        op: ReduceOp = ReduceOp.SUM,
        dims: int | Sequence[int] | None = None,
        keepdims: bool = False,
    ) -> LazyArray:
        """Reduce over dims of this array; one reduction after another becomes a single one.

        Parameters
        ----------
        op : ReduceOp
            Not a location form.
        dims : int or sequence of int, optional
            Which; all by default.
        keepdims : bool
            Leave them with extent 1.

        Returns
        -------
        LazyArray
            Of the dtype of `self` (float64 for the mean of whole numbers).

        Raises
        ------
        EmptyInput
            For min, max or mean of nothing.
        """
        given = range(self.ndim) if dims is None else [dims] if isinstance(dims, int) else dims
        over = tuple(sorted({self.dim(d) for d in given}))
        dtype = reduced_dtype(self.dtype, op)
        if not math.prod(self.shape[d] for d in over) and op not in PLAIN[:2]:
            raise EmptyInput(f"{op} over dims {over}", f"shape {self.shape} has no values there")
        kept = [1 if d in over else n for d, n in enumerate(self.shape)]
        shape = tuple(n for d, n in enumerate(kept) if keepdims or d not in over)
        left = tuple(d for d in range(self.ndim) if keepdims or d not in over)
        return self.made("reduce", shape=shape, dtype=dtype, reduce_op=op, dims=over, left=left)

    def sum(self, dims: int | Sequence[int] | None = None, keepdims: bool = False) -> LazyArray:
        """`reduce` with a sum.

        Parameters
        ----------
        dims, keepdims
            As in `reduce`.

        Returns
        -------
        LazyArray
            The sums.
        """
        return self.reduce(ReduceOp.SUM, dims, keepdims)

    def reshape(self, *shape: int) -> LazyArray:
        """The same elements in another shape; no copy.

        Parameters
        ----------
        *shape : int
            With as many elements; one extent may be -1, what remains.

        Returns
        -------
        LazyArray
            Shares the memory.
        """
        known = math.prod(n for n in shape if n >= 0)
        if shape.count(-1) == 1 and known and self.size % known == 0:
            shape = tuple(self.size // known if n == -1 else n for n in shape)
        if min(shape, default=1) < 0 or math.prod(shape) != self.size:
            raise LayoutError(
                f"reshape: {self.shape} has {self.size} elements, {shape} has {math.prod(shape)}"
            )
        return self if shape == self.shape else self.made("view", shape=shape, start=0)

    def block(self, dim: int, start: int, stop: int) -> LazyArray:
        """The elements from `start` to `stop` along one dim; no copy where they are contiguous.

        Parameters
        ----------
        dim : int
            Which dim.
        start, stop : int
            Half-open range.

        Returns
        -------
        LazyArray
            The block.
        """
        dim = self.dim(dim)
        if not 0 <= start <= stop <= self.shape[dim]:
            raise LayoutError(f"block {start}..{stop} leaves dim {dim} of {self.shape}")
        if stop - start == self.shape[dim]:
            return self
        shape = (*self.shape[:dim], stop - start, *self.shape[dim + 1 :])
        if math.prod(self.shape[:dim]) == 1:
            return self.made("view", shape=shape, start=start * math.prod(self.shape[dim + 1 :]))
        return self.made("block", shape=shape, dim=dim, start=start)

    def to(self, device: Device) -> LazyArray:
        """Copy to a device.

        Parameters
        ----------
        device : Device
            Where to; its own device costs nothing.

        Returns
        -------
        LazyArray
            On that device.
        """
        if device is self.device:
            return self
        return LazyArray(self.graph, "copy", (self,), self.shape, self.dtype, device)

    def numpy(self) -> Array:
        """Compute this array and copy it to the host.

        Returns
        -------
        ndarray
            A copy of its own.
        """
        from mpipar.device_group.run import realize

        realize(self)
        out = np.empty(self.shape, self.dtype)
        self.device.download(self.buffer, out)
        return out

    def dim(self, dim: int) -> int:
        """Check a dim.

        Parameters
        ----------
        dim : int
            Counted from the end where it is negative.

        Returns
        -------
        int
            Counted from 0.

        Raises
        ------
        CountOutOfRange
            If there is no such dim.
        """
        if not -self.ndim <= dim < self.ndim:
            raise CountOutOfRange(
                f"dim of shape {self.shape}", f"{-self.ndim}..{self.ndim - 1}", dim
            )
        return dim % self.ndim


def reduced_dtype(dtype: np.dtype[Any], op: ReduceOp) -> np.dtype[Any]:
    """Element type of a reduction, the same as through a communicator; what has none is refused."""
    if op not in PLAIN:
        raise UnsupportedArray(f"{op} is not offered here; {', '.join(PLAIN)} are")
    accumulation_dtype(dtype, op)
    return result_dtype(dtype, op)


def check_together(arrays: Sequence[Any], what: str) -> None:
    """Refuse arrays that cannot meet in one operation."""
    for array in arrays:
        if not isinstance(array, LazyArray):
            raise UnsupportedArray(
                f"{what} needs lazy arrays, got {type(array).__name__}: wrap it with Graph.constant"
            )
    first = arrays[0]
    for i, array in enumerate(arrays):
        if array.graph is not first.graph:
            raise LayoutError(
                f"{what}: arrays 0 and {i} belong to different graphs; make both with one Graph "
                "(DeviceGroup(devices, graph=...) shares it between groups)"
            )
        if array.device is not first.device:
            raise LayoutError(
                f"{what}: array 0 is on {first.device.name}, array {i} on {array.device.name}; "
                "bring them together with .to(device)"
            )
