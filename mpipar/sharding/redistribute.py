"""The acting half of a plan: one collective a step, on arrays of this rank."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from mpipar.comm import Communicator, ReduceOp
from mpipar.mesh import Mesh
from mpipar.sharding.node_memory import NodeCommunicator, local_empty, pull
from mpipar.sharding.plan import Kind, Plan, Step
from mpipar.sharding.sharding import places
from mpipar.sharding.transfer import Array, Transfer, inside, is_run, pack, unpack

_IDENTITY = {ReduceOp.SUM: 0, ReduceOp.PRODUCT: 1}


def run_plan(plan: Plan, local: Array, mesh: Mesh, out: Array | None = None) -> Array:
    """Carry a plan out. Collective over the mesh.

    Parameters
    ----------
    plan : Plan
        The same on every rank.
    local : ndarray
        This rank's array under ``plan.source``.
    mesh : Mesh
        The source mesh.
    out : ndarray, optional
        Where the result goes: C-contiguous, apart from `local`.

    Returns
    -------
    ndarray
        This rank's array under ``plan.target``; `local` itself where nothing is to be done and no
        `out` is given.
    """
    for step in plan.steps[:-1]:
        local = _run_step(step, local, mesh, None)
    return _run_step(plan.steps[-1], local, mesh, out)


def _run_step(step: Step, x: Array, mesh: Mesh, out: Array | None) -> Array:
    op, rank = step.source.sharding.op, mesh.rank
    if step.kind in (Kind.NONE, Kind.FILL):
        x = x if step.kind is Kind.NONE else _fill(step, x, rank)
        if out is None:
            return x
        out[...] = x
        return out
    if step.kind is Kind.ALL_REDUCE:
        return np.asarray(mesh.comm(*step.axes).all_reduce(x, op, out))
    if step.kind is Kind.REDUCE_SCATTER:
        cuts = step.target.boxes[np.asarray(mesh.layout.ranks(rank, *step.axes)), step.dim]
        counts = (cuts[:, 1] - cuts[:, 0]).tolist()
        comm = mesh.comm(*step.axes)
        return np.asarray(comm.reduce_scatter(x, op, step.dim, counts, out))
    if out is None:
        out = local_empty(mesh.world, step.target, rank)
    if step.kind is Kind.SLICE:
        if out.size:  # an empty box may lie anywhere
            out[...] = x[inside(step.target.boxes[rank], step.source.boxes[rank])]
        return out
    comm, transfer = mesh.comm(*step.axes), _transfer(step, rank)
    if isinstance(comm, NodeCommunicator):
        pull(comm, x, transfer, out)
    elif step.kind is Kind.ALL_GATHER:
        _gather(comm, x, transfer, out)
    else:
        exchange(comm, x, transfer, out)
    return out


@lru_cache(maxsize=256)
def _transfer(step: Step, rank: int) -> Transfer:
    if step.messages is None:
        raise RuntimeError(f"step {step} has no messages")
    members = step.source.layout.ranks(rank, *step.axes)
    return Transfer(step.source.boxes, step.target.boxes, step.messages, members, rank)


def _fill(step: Step, x: Array, rank: int) -> Array:
    """The first rank keeps the values, the others hold what changes no result."""
    identity = _IDENTITY.get(step.target.sharding.op)
    index = places(step.target.layout)
    if identity is None or not any(index[axis][rank] for axis in step.axes):
        return x
    return np.full_like(x, identity, order="C")


def _gather(comm: Communicator, x: Array, transfer: Transfer, out: Array) -> None:
    """All boxes of the group, each put in its place."""
    spots, sizes = transfer.spots, transfer.recv_counts
    if is_run(out, spots):
        comm.all_gather(x.reshape(-1), counts=sizes, out=out.reshape(-1))
        return
    unpack(comm.all_gather(x.reshape(-1), counts=sizes), out, spots)


def exchange(comm: Communicator, x: Array, transfer: Transfer, out: Array) -> None:
    """Carry messages out with one all-to-all, and copy what this rank holds already. Collective.

    Packs (unpacks) only where a rank's blocks are not one run of its array already.

    Parameters
    ----------
    comm : Communicator
        Holds the ranks of every message to and from this one.
    x : ndarray
        What this rank has.
    transfer : Transfer
        Who sends what to whom.
    out : ndarray
        Where the result goes: C-contiguous, apart from `x`.
    """
    parts, spots, me = list(transfer.parts), list(transfer.spots), comm.rank
    send_run, take_run = is_run(x, parts), is_run(out, spots)
    counts, recv_counts = list(transfer.counts), list(transfer.recv_counts)
    if not send_run and not take_run:  # then its own block need not pass through the buffers
        out[spots[me]] = x[parts[me]]
        counts[me] = recv_counts[me] = 0
        parts[me] = spots[me] = transfer.nothing
    packed = x.reshape(-1) if send_run else np.empty(sum(counts), x.dtype)
    target = out.reshape(-1) if take_run else np.empty(sum(recv_counts), x.dtype)
    if not send_run:
        pack(x, packed, parts)
    comm.all_to_all(packed, send_counts=counts, recv_counts=recv_counts, out=target)
    if not take_run:
        unpack(target, out, spots)
