"""The acting half of a plan: one collective a step, on arrays of this rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpipar.comm import Communicator, ReduceOp
from mpipar.mesh import Mesh
from mpipar.sharding.plan import Kind, Messages, Plan, Step
from mpipar.sharding.sharding import Boxes, places

Array = NDArray[Any]
Part = tuple[slice, ...]
_IDENTITY = {ReduceOp.SUM: 0, ReduceOp.PRODUCT: 1}


def run_plan(plan: Plan, local: Array, mesh: Mesh) -> Array:
    """Carry a plan out. Collective over the mesh.

    Parameters
    ----------
    plan : Plan
        The same on every rank.
    local : ndarray
        This rank's array under ``plan.source``.
    mesh : Mesh
        The source mesh.

    Returns
    -------
    ndarray
        This rank's array under ``plan.target``; `local` itself where nothing is to be done.
    """
    for step in plan.steps:
        local = _run_step(step, local, mesh)
    return local


def _run_step(step: Step, x: Array, mesh: Mesh) -> Array:
    have, want, op = step.source.boxes, step.target.boxes, step.source.sharding.op
    if step.kind is Kind.NONE:
        return x
    if step.kind is Kind.FILL:
        return _fill(step, x, mesh.rank)
    if step.kind is Kind.SLICE:
        out = np.empty(_extent(want[mesh.rank]), x.dtype)
        if out.size:  # an empty box may lie anywhere
            out[...] = x[_inside(want[mesh.rank], have[mesh.rank])]
        return out
    comm = mesh.comm(*step.axes)
    if step.kind is Kind.ALL_REDUCE:
        return np.asarray(comm.all_reduce(x, op))
    members = np.asarray(mesh.layout.ranks(mesh.rank, *step.axes))
    if step.kind is Kind.REDUCE_SCATTER:
        cuts = want[members, step.dim]
        counts = (cuts[:, 1] - cuts[:, 0]).tolist()
        return np.asarray(comm.reduce_scatter(x, op, step.dim, counts))
    if step.kind is Kind.ALL_GATHER:
        return _gather(comm, x, want[mesh.rank], have[members])
    messages = step.messages
    if messages is None:
        raise RuntimeError(f"step {step} has no messages")
    return exchange(comm, x, have[mesh.rank], want[mesh.rank], messages, members)


def _fill(step: Step, x: Array, rank: int) -> Array:
    """The first rank keeps the values, the others hold what changes no result."""
    identity = _IDENTITY.get(step.target.sharding.op)
    index = places(step.target.layout)
    if identity is None or not any(index[axis][rank] for axis in step.axes):
        return x
    return np.full_like(x, identity, order="C")


def _gather(comm: Communicator, x: Array, want: Boxes, have: Boxes) -> Array:
    """All boxes of the group, each put in its place."""
    out = np.empty(_extent(want), x.dtype)
    parts = [_inside(box, want) for box in have]
    sizes = [math.prod(_extent(box)) for box in have]
    if _is_run(out, parts):
        comm.all_gather(x.reshape(-1), counts=sizes, out=out.reshape(-1))
        return out
    _unpack(comm.all_gather(x.reshape(-1), counts=sizes), out, parts)
    return out


def exchange(
    comm: Communicator,
    x: Array,
    have: Boxes,
    want: Boxes,
    messages: Messages,
    members: Sequence[int] | NDArray[np.int64],
) -> Array:
    """Carry messages out with one all-to-all, and copy what this rank holds already. Collective.

    Parameters
    ----------
    comm : Communicator
        Holds the ranks of every message to and from this one.
    x : ndarray
        Values of box `have`.
    have, want : ndarray
        Boxes of this rank before and after, shape (ndim, 2).
    messages : Messages
        As `messages_between` derives them.
    members : sequence of int
        Rank, in the numbering of `messages`, of each rank of `comm`.

    Returns
    -------
    ndarray
        Values of box `want`.

    Notes
    -----
    Packs (unpacks) only where a rank's blocks are not one run of its array already.
    """
    out = np.empty(_extent(want), x.dtype)
    ranks = np.asarray(members).tolist()
    me = ranks[comm.rank]
    sends = _by_peer(messages.dest, messages, messages.source == me)
    takes = _by_peer(messages.source, messages, messages.dest == me)
    kept = np.stack([np.maximum(have[:, 0], want[:, 0]), np.minimum(have[:, 1], want[:, 1])], -1)
    nothing = np.zeros_like(kept)
    sends[me] = takes[me] = kept if (kept[:, 1] > kept[:, 0]).all() else nothing
    parts = [_inside(sends[r], have) if r in sends else None for r in ranks]
    places_ = [_inside(takes[r], want) if r in takes else None for r in ranks]
    send_run, take_run = _is_run(x, parts), _is_run(out, places_)
    if not send_run and not take_run:  # then its own block need not pass through the buffers
        out[places_[comm.rank] or ()] = x[parts[comm.rank] or ()]
        parts[comm.rank] = places_[comm.rank] = None
    counts, recv_counts = _volumes(parts), _volumes(places_)
    packed = x.reshape(-1) if send_run else _pack(x, parts)
    target = out.reshape(-1) if take_run else None
    got = comm.all_to_all(packed, send_counts=counts, recv_counts=recv_counts, out=target)
    if not take_run:
        _unpack(got, out, places_)
    return out


def _by_peer(
    peers: NDArray[np.int64], messages: Messages, mine: NDArray[np.bool_]
) -> dict[int, Boxes]:
    return dict(zip(peers[mine].tolist(), messages.boxes[mine], strict=True))


def _extent(box: Boxes) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box.tolist())


def _inside(box: Boxes, outer: Boxes) -> Part:
    """A box as slices of the array that holds `outer`."""
    pairs = zip(box.tolist(), outer[:, 0].tolist(), strict=True)
    return tuple(slice(max(0, a - o), max(0, b - o)) for (a, b), o in pairs)


def _volume(part: Part | None) -> int:
    return 0 if part is None else math.prod(s.stop - s.start for s in part)


def _volumes(parts: Sequence[Part | None]) -> list[int]:
    return [_volume(part) for part in parts]


def _is_run(x: Array, parts: Sequence[Part | None]) -> bool:
    """Whether the parts, one after the other, are the elements of `x` in memory order."""
    if not x.flags.c_contiguous:
        return False
    offset = 0
    for part in parts:
        if part is None or not (size := _volume(part)):
            continue
        start, stride, whole = 0, 1, True
        for s, n in zip(reversed(part), reversed(x.shape), strict=True):
            if not whole and s.stop - s.start > 1:
                return False
            whole = whole and s.stop - s.start == n
            start += s.start * stride
            stride *= n
        if start != offset:
            return False
        offset += size
    return offset == x.size


def _pack(x: Array, parts: Sequence[Part | None]) -> Array:
    buffer = np.empty(sum(_volumes(parts)), x.dtype)
    offset = 0
    for part in parts:
        if part is not None and (size := _volume(part)):
            block = x[part]
            buffer[offset : offset + size].reshape(block.shape)[...] = block
            offset += size
    return buffer


def _unpack(buffer: Array, out: Array, parts: Sequence[Part | None]) -> None:
    offset = 0
    for part in parts:
        if part is not None and (size := _volume(part)):
            block = out[part]
            block[...] = buffer[offset : offset + size].reshape(block.shape)
            offset += size
