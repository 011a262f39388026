"""What is asked of a communicator, as one frozen value.

The record in the trace, the signature that ranks compare and the line that the watchdog prints
are all this object.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpipar.errors import ParallelismError

Array = NDArray[Any]


class Op(StrEnum):
    """The operations of the seam."""

    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"
    ALL_TO_ALL = "all_to_all"
    BROADCAST = "broadcast"
    REDUCE = "reduce"
    GATHER = "gather"
    SCATTER = "scatter"
    SEND = "send"
    RECV = "recv"
    BARRIER = "barrier"
    SPLIT = "split"


class ReduceOp(StrEnum):
    """How the values of several ranks become one, element by element.

    `MIN` and `MAX` propagate NaN as NumPy does; `MIN_LOCATION` and `MAX_LOCATION` also give the
    lowest rank that holds the value. `MEAN` divides before the cast back, so that four float16
    values of 30,000 have a mean.
    """

    SUM = "sum"
    PRODUCT = "product"
    MIN = "min"
    MAX = "max"
    MEAN = "mean"
    MIN_LOCATION = "min_location"
    MAX_LOCATION = "max_location"


@dataclass(frozen=True, slots=True)
class CommInfo:
    """Who am I: rank and world size.

    Parameters
    ----------
    rank : int
        Process index, from 0.
    world_size : int
        Number of ranks.
    """

    rank: int
    world_size: int

    @property
    def is_root(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0


class Cut(NamedTuple):
    """What ranks agree on where blocks are joined or cut; made into text only when it is printed.

    Parameters
    ----------
    shape : tuple of int
        Extents that are equal on every rank.
    dim : int
        Dimension of the blocks.
    counts : tuple of int or None
        Their extents, where all ranks know them.
    """

    shape: tuple[int, ...]
    dim: int
    counts: tuple[int, ...] | None = None

    def __str__(self) -> str:
        """As in a signature."""
        extents = [*map(str, self.shape)]
        extents.insert(self.dim, "*")  # ranks may differ there
        text = f"({', '.join(extents)}) dim {self.dim}"
        return text if self.counts is None else f"{text} counts {self.counts}"


class Call(NamedTuple):
    """One operation: what a transport gets, a trace keeps and ranks compare.

    Arrays are flat and C-contiguous here: dims and layouts were resolved by the verb, blocks for
    (or from) each rank stand one after the other. `shape`, `dim` and `counts` say what the user
    asked. A transport fills `output`; it never keeps either array after the call has ended.

    Parameters
    ----------
    op : Op
        The operation.
    input, output : array or None
        Flat buffers.
    reduce_op : ReduceOp or None
        For reductions.
    root : int or None
        For rooted operations.
    dim : int or None
        Array dimension that is split or joined.
    counts, recv_counts : tuple of int or None
        Elements of the flat buffer that belong to each rank (all_to_all has both).
    peer, tag : int
        For send and recv.
    shape : tuple of int or None
        Shape of the user's input.
    agreed : object
        What must be equal on every rank beside op, dtype, reduce op and root; printed when needed.
    uniform : bool
        Whether every rank gave the same shape, so that sizes decide alike on all of them.
    deterministic : bool
        Whether sums are taken in rank order.
    blocking : bool
        Whether the caller waits at once.
    error : ParallelismError or None
        What is wrong with the call on this rank; a transport raises it, on all ranks where it can.
    """

    op: Op
    input: Array | None = None
    output: Array | None = None
    reduce_op: ReduceOp | None = None
    root: int | None = None
    dim: int | None = None
    counts: tuple[int, ...] | None = None
    recv_counts: tuple[int, ...] | None = None
    peer: int = -1
    tag: int = 0
    shape: tuple[int, ...] | None = None
    agreed: object = ""
    uniform: bool = True
    deterministic: bool = False
    blocking: bool = True
    error: ParallelismError | None = None

    @property
    def dtype(self) -> np.dtype[Any] | None:
        """Element type of the buffers, None for a barrier."""
        array = self.input if self.input is not None else self.output
        return None if array is None else array.dtype

    @property
    def on_device(self) -> bool:
        """Whether the buffers lie in the memory of a device."""
        array = self.input if self.input is not None else self.output
        return array is not None and type(array) is not np.ndarray

    @property
    def n_bytes(self) -> int:
        """Bytes of the larger buffer of this rank."""
        return max(0 if a is None else a.nbytes for a in (self.input, self.output))

    @property
    def signature(self) -> str:
        """What must be the same on every rank, as text."""
        if self.error is not None:
            return f"{self.op} refused: {self.error}"
        parts = [str(self.op)]
        if self.reduce_op is not None:
            parts.append(str(self.reduce_op))
        if self.dtype is not None and self.op is not Op.SCATTER:
            parts.append(self.dtype.name)
        if self.agreed != "":
            parts.append(str(self.agreed))
        if self.root is not None:
            parts.append(f"root {self.root}")
        if self.deterministic:
            parts.append("deterministic")
        return " ".join(parts)

    def __str__(self) -> str:
        """The line that the watchdog prints."""
        text = self.signature
        if self.op in (Op.SEND, Op.RECV):
            text += f" {'to' if self.op is Op.SEND else 'from'} rank {self.peer} tag {self.tag}"
        return f"{text} ({self.n_bytes} bytes)" if self.n_bytes else text
