"""Which keys and values a rank holds, and what must move between two ways of holding them.

The global object is the cache of one sequence: layers x (keys, values) x KV heads x tokens x dim.
A pipeline stage owns layers, a tensor-parallel rank heads, a data-parallel replica requests. All
of this is pure: no array, no communicator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from mpipar.errors import CountOutOfRange, LayoutError, UnevenSplit
from mpipar.units.remainder import divisors, spread_range

Range = tuple[int, int]


@dataclass(frozen=True)
class CacheLayout:
    """The part of the cache that one rank holds.

    Attributes
    ----------
    layers, heads : tuple of int
        Half-open ranges of global layers and global KV heads.
    head_dim : int
        Elements of one head.
    block_size : int
        Tokens of one block.
    dtype : str
        Name of the element type.
    """

    layers: Range
    heads: Range
    head_dim: int
    block_size: int = 16
    dtype: str = "float32"

    def __post_init__(self) -> None:
        for role, (start, stop) in (("layers", self.layers), ("heads", self.heads)):
            if not 0 <= start < stop:
                raise LayoutError(f"{role} {start}..{stop} of a cache layout is an empty range")
        for role, count in (("head_dim", self.head_dim), ("block_size", self.block_size)):
            if count < 1:
                raise CountOutOfRange(role, "1 or more", count)

    @property
    def n_layers(self) -> int:
        """Layers held."""
        return self.layers[1] - self.layers[0]

    @property
    def n_heads(self) -> int:
        """KV heads held."""
        return self.heads[1] - self.heads[0]

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        """Shape of one block: (layer, keys and values, KV head, token, dim)."""
        return (self.n_layers, 2, self.n_heads, self.block_size, self.head_dim)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of the keys and values of one token on this rank."""
        item = np.dtype(self.dtype).itemsize
        return 2 * self.n_layers * self.n_heads * self.head_dim * item

    def n_bytes(self, n_blocks: int) -> int:
        """Bytes that this rank allocates.

        Parameters
        ----------
        n_blocks : int
            Blocks of its pool.

        Returns
        -------
        int
            ``n_blocks * block_size * bytes_per_token``.
        """
        return n_blocks * self.block_size * self.bytes_per_token


def head_range(n_heads: int, tp: int, index: int, replicate: bool = False) -> Range:
    """KV heads of one tensor-parallel rank.

    Parameters
    ----------
    n_heads : int
        KV heads of the model.
    tp, index : int
        Tensor-parallel degree and rank.
    replicate : bool
        Let ``tp / n_heads`` neighbours hold the same head where there are more ranks than heads.

    Returns
    -------
    tuple of int
        Half-open range.

    Raises
    ------
    UnevenSplit
        If the heads do not divide; the message names the degrees that would do.
    """
    if not 0 <= index < tp:
        raise CountOutOfRange("tp rank", f"0..{tp}", index)
    if n_heads > 0 and n_heads % tp == 0:
        size = n_heads // tp
        return index * size, (index + 1) * size
    if n_heads > 0 and replicate and tp % n_heads == 0:
        head = index * n_heads // tp
        return head, head + 1
    near = [d for d in divisors(max(n_heads, 1)) if d < tp][-1:]
    near += [d for d in divisors(max(n_heads, 1)) if d > tp][:1]
    more = max(2, -(-tp // max(n_heads, 1))) * n_heads
    raise UnevenSplit(
        "kv_heads / tp",
        f"kv_heads={n_heads} cannot be split exactly over tp={tp}; "
        f"tp={' or '.join(map(str, near))} would do ({more} with replicated KV heads)",
    )


def cache_layouts(
    n_layers: int,
    n_heads: int,
    head_dim: int,
    *,
    tp: int = 1,
    pp: int = 1,
    block_size: int = 16,
    dtype: str = "float32",
    replicate: bool = False,
) -> list[CacheLayout]:
    """The layouts of all ranks of one replica, stage by stage.

    Parameters
    ----------
    n_layers, n_heads, head_dim : int
        Of the model; layers are spread over `pp`, KV heads split exactly over `tp`.
    tp, pp : int
        Degrees; data-parallel replicas hold other requests in the same layouts.
    block_size, dtype
        As in `CacheLayout`.
    replicate : bool
        As in `head_range`.

    Returns
    -------
    list of CacheLayout
        That of stage p and tensor-parallel rank t at ``p * tp + t``.

    Raises
    ------
    LayoutError
        If a stage would hold no layer.
    """
    if pp > n_layers:
        raise LayoutError(f"{n_layers} cache layers cannot be spread over pp={pp}; pp={n_layers}")
    return [
        CacheLayout(
            spread_range(n_layers, pp, stage),
            head_range(n_heads, tp, rank, replicate),
            head_dim,
            block_size,
            dtype,
        )
        for stage in range(pp)
        for rank in range(tp)
    ]


class Piece(NamedTuple):
    """A box of the cache that one source gives to one target.

    Attributes
    ----------
    source, target : int
        Indices into the two lists of layouts.
    layers, heads, tokens : tuple of int
        Half-open global ranges.
    n_bytes : int
        Bytes of the box.
    """

    source: int
    target: int
    layers: Range
    heads: Range
    tokens: Range
    n_bytes: int


def plan_transfer(
    sources: Sequence[CacheLayout], targets: Sequence[CacheLayout], tokens: Range
) -> tuple[Piece, ...]:
    """What must move so that every target holds its part: layers x heads x tokens intersected.

    A box that several sources hold comes from one of them, another for each next target.

    Parameters
    ----------
    sources, targets : sequence of CacheLayout
        The two ways of holding the same model; block sizes may differ.
    tokens : tuple of int
        Half-open range of the tokens that move.

    Returns
    -------
    tuple of Piece
        Ordered by target; each element that a target holds comes in exactly one piece.

    Raises
    ------
    LayoutError
        If the element types differ or no source holds what a target needs.
    """
    if not 0 <= tokens[0] <= tokens[1]:
        raise LayoutError(f"tokens {tokens[0]}..{tokens[1]} are no range")
    kinds = {(c.head_dim, c.dtype) for c in (*sources, *targets)}
    if len(kinds) > 1:
        raise LayoutError(f"caches of different elements (head_dim, dtype): {sorted(kinds)}")
    pieces: list[Piece] = []
    for number, target in enumerate(targets):
        for layers in _cells(target.layers, [s.layers for s in sources]):
            for heads in _cells(target.heads, [s.heads for s in sources]):
                holding = [
                    i for i, s in enumerate(sources)
                    if _inside(layers, s.layers) and _inside(heads, s.heads)
                ]  # fmt: skip
                if not holding:
                    raise LayoutError(
                        f"no source holds layers {layers[0]}..{layers[1]}, "
                        f"KV heads {heads[0]}..{heads[1]} that target {number} needs"
                    )
                area = (layers[1] - layers[0]) * (heads[1] - heads[0])
                per_token = 2 * area * target.head_dim * np.dtype(target.dtype).itemsize
                source = holding[number % len(holding)]
                size = (tokens[1] - tokens[0]) * per_token
                pieces.append(Piece(source, number, layers, heads, tokens, size))
    return tuple(pieces)


def _inside(inner: Range, outer: Range) -> bool:
    return outer[0] <= inner[0] and inner[1] <= outer[1]


def _cells(whole: Range, others: Sequence[Range]) -> list[Range]:
    """The range, cut wherever another one begins or ends."""
    inside = {cut for other in others for cut in other if whole[0] < cut < whole[1]}
    cuts = sorted({*whole, *inside})
    return list(pairwise(cuts))
