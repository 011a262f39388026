"""One rank's share of a set of messages: which parts of its array go where. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpipar.sharding.plan import Messages
from mpipar.sharding.sharding import Boxes

Array = NDArray[Any]
Part = tuple[slice, ...]


class Transfer:
    """What one rank of a group sends to and takes from each of them, itself included.

    Parameters
    ----------
    have, want : ndarray
        Box of every rank before and after.
    messages : Messages
        As `messages_between` derives them.
    members : sequence of int
        The ranks of the group, in its order.
    rank : int
        This one.

    Attributes
    ----------
    parts, spots : list of tuple of slice
        Of this rank's array before and after: what goes to, and comes from, each member.
    takes : list of tuple
        For each member that this rank takes something from, itself first: its place in the group,
        the size and shape of its array, the part there, and the spot here.
    counts, recv_counts : list of int
        Elements of `parts` and of `spots`.
    capacity : int
        Elements of the largest array before, over all ranks.
    nothing : tuple of slice
        An empty part.
    """

    def __init__(
        self, have: Boxes, want: Boxes, messages: Messages, members: Sequence[int], rank: int
    ) -> None:
        mine, after = have[rank], want[rank]
        sent, taken = messages.source == rank, messages.dest == rank
        sends = dict(zip(messages.dest[sent].tolist(), messages.boxes[sent], strict=True))
        takes = dict(zip(messages.source[taken].tolist(), messages.boxes[taken], strict=True))
        low = np.maximum(mine[:, 0], after[:, 0])
        kept = np.stack([low, np.maximum(low, np.minimum(mine[:, 1], after[:, 1]))], axis=-1)
        sends[rank] = takes[rank] = kept
        self.nothing = (slice(0, 0),) * len(mine)
        self.parts = [self._part(sends.get(r), mine) for r in members]
        self.spots = [self._part(takes.get(r), after) for r in members]
        self.counts = [volume(part) for part in self.parts]
        self.recv_counts = [volume(part) for part in self.spots]
        me, n = list(members).index(rank), len(members)
        self.takes = [
            (k, volume(inside(have[r], have[r])), extent(have[r]), there, self.spots[k])
            for k, r in ((k, members[k]) for k in ((me + step) % n for step in range(n)))
            if volume(there := self._part(takes.get(r), have[r]))
        ]
        self.capacity = int(np.prod(have[..., 1] - have[..., 0], axis=-1).max())

    def _part(self, box: Boxes | None, outer: Boxes) -> Part:
        if box is None or not (box[:, 1] > box[:, 0]).all():
            return self.nothing
        return inside(box, outer)


def extent(box: Boxes) -> tuple[int, ...]:
    """Shape of a box."""
    return tuple(stop - start for start, stop in box.tolist())


def inside(box: Boxes, outer: Boxes) -> Part:
    """A box as slices of the array that holds `outer`."""
    pairs = zip(box.tolist(), outer[:, 0].tolist(), strict=True)
    return tuple(slice(start - o, stop - o) for (start, stop), o in pairs)


def volume(part: Part) -> int:
    """Elements of a part."""
    return math.prod(s.stop - s.start for s in part)


def is_run(x: Array, parts: Sequence[Part]) -> bool:
    """Whether the parts, one after the other, are the elements of `x` in memory order."""
    if not x.flags.c_contiguous:
        return False
    offset = 0
    for part in parts:
        if not (size := volume(part)):
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


def pack(x: Array, buffer: Array, parts: Sequence[Part]) -> None:
    """Put parts of `x` into a flat buffer, one after the other."""
    offset = 0
    for part in parts:
        block = x[part]
        buffer[offset : offset + block.size].reshape(block.shape)[...] = block
        offset += block.size


def unpack(buffer: Array, out: Array, parts: Sequence[Part]) -> None:
    """Put blocks of a flat buffer into parts of `out`: the inverse of `pack`."""
    offset = 0
    for part in parts:
        block = out[part]
        block[...] = buffer[offset : offset + block.size].reshape(block.shape)
        offset += block.size
