"""From two descriptions of one array to the steps that turn one into the other. Pure.

A move is derived from boxes: what a rank wants and does not hold is sent to it once, by the nearest
rank that holds it. So the bytes moved are the least possible. The pattern of these messages says
which collective fits, and over which axes it stays closed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpipar.errors import LayoutError
from mpipar.mesh import MeshLayout
from mpipar.sharding.sharding import ArraySpec, Boxes, Sharding, places

Ints = NDArray[np.int64]


class Kind(StrEnum):
    """How a step is carried out, from the cheapest to the dearest."""

    NONE = "none"
    FILL = "fill"
    SLICE = "slice"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"
    ALL_TO_ALL = "all_to_all"
    EXCHANGE = "exchange"
    ALL_REDUCE = "all_reduce"


class Messages(NamedTuple):
    """Who sends which box to whom; never to itself, and never an empty box.

    Attributes
    ----------
    source, dest : ndarray
        Ranks, shape (n_messages,); ordered by `dest`.
    boxes : ndarray
        Global index ranges, shape (n_messages, ndim, 2).
    """

    source: Ints
    dest: Ints
    boxes: Boxes

    @property
    def volumes(self) -> Ints:
        """Elements of each message."""
        return np.asarray(np.prod(self.boxes[..., 1] - self.boxes[..., 0], axis=-1, dtype=np.int64))


def messages_between(have: Boxes, want: Boxes, layout: MeshLayout | None = None) -> Messages:
    """Derive the messages that give every rank the box that it wants.

    Parameters
    ----------
    have : ndarray
        Box of every rank, shape (n, ndim, 2); boxes are equal (replicas) or do not overlap.
    want : ndarray
        Box that every rank is to have.
    layout : MeshLayout, optional
        The mesh: of several replicas the one that differs along the fewest axes sends, so that
        messages stay inside the groups of an axis; else the one of the nearest rank.

    Returns
    -------
    Messages
        The fewest elements: what a rank wants less what it has.
    """
    n, n_dims = have.shape[:2]
    ranks = np.arange(n)
    distance = np.abs(ranks[:, None] - ranks[None, :])
    for index in places(layout).values() if layout is not None else ():
        distance += n * (index[:, None] != index[None, :])
    if n_dims == 0:
        nobody = np.zeros(0, np.int64)
        return Messages(nobody, nobody, np.zeros((0, 0, 2), np.int64))
    flat, holder = np.unique(have.reshape(n, -1), axis=0, return_inverse=True)
    holder = holder.reshape(-1)
    tiles = flat.reshape(-1, n_dims, 2)
    low = np.maximum(want[:, None, :, 0], tiles[None, :, :, 0])
    high = np.minimum(want[:, None, :, 1], tiles[None, :, :, 1])
    sent = np.asarray((high > low).all(axis=-1))  # (rank that wants, tile)
    sent[ranks, holder] = False
    dest, tile = np.nonzero(sent)
    nearest = np.empty((n, len(tiles)), np.int64)
    for t in range(len(tiles)):
        holders = np.flatnonzero(holder == t)
        nearest[:, t] = holders[distance[:, holders].argmin(axis=1)]
    boxes = np.stack([low[dest, tile], high[dest, tile]], axis=-1)
    return Messages(nearest[dest, tile], dest, boxes)


@dataclass(frozen=True, eq=False)
class Step:
    """One step of a plan.

    Attributes
    ----------
    kind : Kind
        How.
    source, target : ArraySpec
        Before and after.
    axes : tuple of str
        Ranks that differ along these axes only take part together; every axis for the world.
    dim : int
        For a reduce-scatter: the dim that is cut.
    messages : Messages or None
        For moves.
    """

    kind: Kind
    source: ArraySpec
    target: ArraySpec
    axes: tuple[str, ...] = ()
    dim: int = 0
    messages: Messages | None = None

    @property
    def n_bytes(self) -> int:
        """Bytes that all ranks together send."""
        item = self.source.dtype.itemsize
        if self.messages is not None:
            return int(self.messages.volumes.sum()) * item
        if self.kind is Kind.REDUCE_SCATTER:
            return int((self.source.volumes - self.target.volumes).sum()) * item
        if self.kind is Kind.ALL_REDUCE:
            n = self.source.layout.degree(*self.axes)
            return 2 * (n - 1) * int(self.source.volumes.sum()) * item // n
        return 0

    def __str__(self) -> str:
        over = f" over {' '.join(self.axes)}" if self.axes else ""
        return f"{self.kind}{over}: {self.target.sharding}, {self.n_bytes} bytes"


@dataclass(frozen=True, eq=False)
class Plan:
    """The steps from one description to another.

    Attributes
    ----------
    source, target : ArraySpec
        Both descriptions.
    steps : tuple of Step
        In order; at least one.
    """

    source: ArraySpec
    target: ArraySpec
    steps: tuple[Step, ...]

    @property
    def n_bytes(self) -> int:
        """Bytes that all ranks together send."""
        return sum(step.n_bytes for step in self.steps)

    def __str__(self) -> str:
        return "\n".join([f"{self.source} -> {self.target}", *(f"  {s}" for s in self.steps)])


@lru_cache(maxsize=256)
def plan_redistribution(source: ArraySpec, target: ArraySpec) -> Plan:
    """Plan how an array gets from one sharding (and mesh) to another.

    Parameters
    ----------
    source, target : ArraySpec
        Same shape and dtype, meshes over the same ranks.

    Returns
    -------
    Plan
        The same on every rank; cached.

    Raises
    ------
    LayoutError
        If shape, dtype or number of ranks differ.
    """
    n, m = source.layout.world_size, target.layout.world_size
    if source.shape != target.shape or source.dtype != target.dtype or n != m:
        raise LayoutError(f"{source} ({n} ranks) cannot become {target} ({m} ranks)")
    steps = list(_steps(source, target))
    useful = [step for step in steps if step.kind is not Kind.NONE]
    return Plan(source, target, tuple(useful or steps[-1:]))


def _steps(source: ArraySpec, target: ArraySpec) -> Iterator[Step]:
    """Reduce what is no longer partial, move, then spread what becomes partial."""
    alike = source.layout == target.layout and source.sharding.op == target.sharding.op
    kept = tuple(a for a in source.partial if alike and a in target.partial)
    at = source
    for step in _reductions(source, target, kept):
        yield step
        at = step.target
    moved = target.with_sharding(Sharding(target.sharding.dims, kept, source.sharding.op))
    yield _move(at, moved)
    added = tuple(a for a in target.partial if a not in kept)
    if added:
        yield Step(Kind.FILL, moved, target, added)


def _reductions(source: ArraySpec, target: ArraySpec, kept: tuple[str, ...]) -> Iterator[Step]:
    at, left = source, [a for a in source.partial if a not in kept]

    def step(kind: Kind, axes: tuple[str, ...], dim: int | None) -> Step:
        nonlocal at
        dims = list(at.sharding.dims)
        if dim is not None:
            dims[dim] += axes
        still = tuple(a for a in at.partial if kind is Kind.SLICE or a not in axes)
        before, at = at, at.with_sharding(Sharding(tuple(dims), still, at.sharding.op))
        return Step(kind, before, at, axes if kind is not Kind.SLICE else (), dim or 0)

    while left and source.layout == target.layout:
        # The next axis of some dim: cut it off for free, or let the reduction cut it.
        nexts = dict(_next_axes(at.sharding, target.sharding))
        used = {*at.partial, *(a for axes in at.sharding.dims for a in axes)}
        free = [d for d, axis in nexts.items() if axis not in used]
        cut = [d for d, axis in nexts.items() if axis in left]
        if free:
            yield step(Kind.SLICE, (nexts[free[0]],), free[0])
        elif cut:
            left.remove(nexts[cut[0]])
            yield step(Kind.REDUCE_SCATTER, (nexts[cut[0]],), cut[0])
        else:
            break
    if left and at.shape and target.volumes.max() * at.layout.degree(*left) <= at.volumes.max():
        for axis in left:
            yield step(Kind.REDUCE_SCATTER, (axis,), int(np.argmax(at.shape)))
    elif left:
        yield step(Kind.ALL_REDUCE, tuple(left), None)


def _next_axes(here: Sharding, there: Sharding) -> Iterator[tuple[int, str]]:
    for dim, (mine, theirs) in enumerate(zip(here.dims, there.dims, strict=True)):
        if len(theirs) > len(mine) and theirs[: len(mine)] == mine:
            yield dim, theirs[len(mine)]


def _move(source: ArraySpec, target: ArraySpec) -> Step:
    have, want = (_with_terms(spec) for spec in (source, target))
    messages = messages_between(have, want, source.layout)
    if source.partial:
        messages = messages._replace(boxes=messages.boxes[:, 1:])
    if not messages.source.size:
        kind = Kind.NONE if np.array_equal(have, want) else Kind.SLICE
        return Step(kind, source, target, messages=messages)
    layout = source.layout
    if layout != target.layout:
        return Step(Kind.EXCHANGE, source, target, tuple(layout.degrees), messages=messages)
    crossed = tuple(
        axis
        for axis, index in places(layout).items()
        if (index[messages.source] != index[messages.dest]).any()
    )
    kind = Kind.ALL_TO_ALL if len(crossed) == 1 else Kind.EXCHANGE
    if _is_gather(source, target, crossed, messages):
        kind = Kind.ALL_GATHER
    return Step(kind, source, target, crossed, messages=messages)


def _with_terms(spec: ArraySpec) -> Boxes:
    """Boxes with one dim more where values are partial, so that terms do not mix."""
    if not spec.partial:
        return spec.boxes
    term = np.zeros(spec.layout.world_size, np.int64)
    for axis in spec.partial:
        term = term * spec.layout.degree(axis) + places(spec.layout)[axis]
    return np.concatenate([np.stack([term, term + 1], axis=-1)[:, None], spec.boxes], axis=1)


def _is_gather(
    source: ArraySpec, target: ArraySpec, axes: tuple[str, ...], messages: Messages
) -> bool:
    """Whether every rank of a group sends its whole box to all the others, and wants no more."""
    have = source.volumes
    group = np.zeros(have.size, np.int64)
    for axis in source.layout.order:
        if axis not in axes:
            group = group * source.layout.degree(axis) + places(source.layout)[axis]
    total = np.zeros(have.size, np.int64)
    np.add.at(total, group, have)
    whole = bool((messages.volumes == have[messages.source]).all())
    n_others = source.layout.degree(*axes) - 1
    return (
        whole
        and np.array_equal(total[group], target.volumes)
        and messages.source.size == int((have > 0).sum()) * n_others
    )
