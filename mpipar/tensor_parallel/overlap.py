"""Products whose collective runs while the next piece is computed.

A chunk holds a run of rows of *every* rank's part of the sequence, so that each of its collectives
joins or scatters equal blocks. Arrays have the shape (..., sequence, width).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpipar.comm import Communicator, Request
from mpipar.nn.array import contiguous, empty_like
from mpipar.units.remainder import exact_size, spread_range

Array = NDArray[Any]
Product = Callable[[Array], Array]


def gather_product(
    comm: Communicator, x: Array, product: Product, width: int, n_chunks: int, keep: bool
) -> tuple[Array, Array | None]:
    """Join the sequence and multiply. Collective.

    Parameters
    ----------
    comm : Communicator
        The group of n ranks.
    x : ndarray
        This rank's part of the sequence.
    product : callable
        From rows of x to rows of the result.
    width : int
        Last size of the result.
    n_chunks : int
        Pieces of which the next is gathered while one is multiplied.
    keep : bool
        Keep the joined input.

    Returns
    -------
    tuple of ndarray
        The product of the whole sequence, and the joined input or None.
    """
    lead, (rows, n_in) = x.shape[:-2], x.shape[-2:]
    whole = (*lead, comm.size * rows)
    if n_chunks == 1:
        joined = comm.all_gather(x, dim=-2)
        return product(joined), joined if keep else None
    out = empty_like(x, (*lead, comm.size, rows, width))
    kept = empty_like(x, (*lead, comm.size, rows, n_in)) if keep else None

    def begin(part: slice) -> Request:
        return comm.begin_all_gather(x[..., None, part, :], dim=-3)

    def finish(part: slice, request: Request) -> None:
        joined = request.wait()
        out[..., part, :] = product(joined)
        if kept is not None:
            kept[..., part, :] = joined

    _pipeline(_chunks(rows, n_chunks), begin, finish)
    return out.reshape(*whole, width), None if kept is None else kept.reshape(*whole, n_in)


def product_scatter(comm: Communicator, x: Array, product: Product, n_chunks: int) -> Array:
    """Multiply the whole sequence, sum over ranks and keep this rank's part. Collective.

    Parameters
    ----------
    comm : Communicator
        The group of n ranks.
    x : ndarray
        Rows of the whole sequence, which must divide by n.
    product : callable
        From rows of x to rows of this rank's term.
    n_chunks : int
        Pieces of which one is reduced while the next is multiplied.

    Returns
    -------
    ndarray
        This rank's part of the sequence.
    """
    rows = exact_size(x.shape[-2], comm.size, "sequence", "tp")
    if n_chunks == 1:
        mine: Array = comm.reduce_scatter(product(x), dim=-2)
        return mine
    parts = x.reshape(*x.shape[:-2], comm.size, rows, x.shape[-1])
    pieces: list[Array] = []

    def begin(part: slice) -> Request:
        term = product(contiguous(parts[..., part, :]))
        return comm.begin_reduce_scatter(term, dim=-3)

    def finish(_: slice, request: Request) -> None:
        pieces.append(request.wait()[..., 0, :, :])

    _pipeline(_chunks(rows, n_chunks), begin, finish)
    return np.concatenate(pieces, axis=-2)


def product_reduce(comm: Communicator, x: Array, product: Product, n_chunks: int) -> Array:
    """Multiply and sum over ranks. Collective.

    Parameters
    ----------
    comm : Communicator
        The group of n ranks.
    x : ndarray
        Rows of the whole sequence.
    product : callable
        From rows of x to rows of this rank's term.
    n_chunks : int
        Pieces of which one is reduced while the next is multiplied.

    Returns
    -------
    ndarray
        The sum, on every rank.
    """
    if comm.size == 1:
        return product(x)
    if n_chunks == 1 or x.ndim < 2:
        term = product(x)
        comm.all_reduce(term, out=term)
        return term
    pieces: list[Array] = []

    def begin(part: slice) -> Request:
        term = product(contiguous(x[..., part, :]))
        return comm.begin_all_reduce(term, out=term)

    def finish(_: slice, request: Request) -> None:
        pieces.append(request.wait())

    _pipeline(_chunks(x.shape[-2], n_chunks), begin, finish)
    return np.concatenate(pieces, axis=-2)


def _chunks(rows: int, n_chunks: int) -> Iterator[slice]:
    for index in range(max(1, min(n_chunks, rows))):
        yield slice(*spread_range(rows, max(1, min(n_chunks, rows)), index))


def _pipeline(
    parts: Iterator[slice],
    begin: Callable[[slice], Request],
    finish: Callable[[slice, Request], None],
) -> None:
    """Begin each part before the one ahead of it is finished."""
    ahead: tuple[slice, Request] | None = None
    for part in parts:
        request = begin(part)
        if ahead is not None:
            finish(*ahead)
        ahead = part, request
    if ahead is not None:
        finish(*ahead)
