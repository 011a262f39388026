"""The arrays of a paged cache: blocks of keys and values as one array of declared order.

The order is [block, layer, keys or values, KV head, token, dim]; the array may be NumPy's or a
device's. Which block belongs to whom is not known here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpipar.comm.device.arrays import to_host
from mpipar.distributed_cache.layout import CacheLayout, Piece, Range
from mpipar.errors import CacheError, CountOutOfRange

Array = Any
Blocks = Sequence[int] | NDArray[np.int32]


class CacheStorage:
    """The blocks of one rank.

    Parameters
    ----------
    layout : CacheLayout
        What a block holds; layers and heads below are global numbers.
    n_blocks : int
        Blocks to allocate: ``layout.n_bytes(n_blocks)`` bytes.
    xp : module, optional
        The array library; NumPy by default.

    Attributes
    ----------
    data : array
        [block, layer, keys or values, KV head, token, dim].
    """

    def __init__(self, layout: CacheLayout, n_blocks: int, xp: Any = np) -> None:
        if n_blocks < 1:
            raise CountOutOfRange("number of cache blocks", "1 or more", n_blocks)
        self.layout, self.n_blocks, self._xp = layout, n_blocks, xp
        self.data: Array = xp.zeros((n_blocks, *layout.block_shape), dtype=np.dtype(layout.dtype))

    @property
    def n_bytes(self) -> int:
        """Bytes that are allocated."""
        return int(self.data.nbytes)

    def write(self, layer: int, blocks: Any, offsets: Any, keys: Array, values: Array) -> None:
        """Store the keys and values of new tokens, of one or many sequences.

        Parameters
        ----------
        layer : int
            Global layer.
        blocks, offsets : sequence of int
            Block and place inside it of every token, shape [token].
        keys, values : array
            [token, KV head, dim], the heads of this rank.
        """
        at = self._layer(layer)
        self.data[blocks, at, 0, :, offsets] = keys
        self.data[blocks, at, 1, :, offsets] = values

    def read(
        self, layer: int, blocks: Blocks, n_tokens: int, out: Array | None = None
    ) -> tuple[Array, Array]:
        """The keys and values of one sequence, each copied once (not at all from one block).

        Parameters
        ----------
        layer : int
            Global layer.
        blocks : sequence of int
            The sequence's blocks in order.
        n_tokens : int
            Its tokens.
        out : array, optional
            [2, KV head, len(blocks) * block_size, dim], to be filled instead of a new one.

        Returns
        -------
        tuple of array
            Keys and values, [KV head, token, dim].
        """
        at, size = self._layer(layer), self.layout.block_size
        self._room(blocks, n_tokens)
        if len(blocks) == 1 and out is None:
            view = self.data[blocks[0], at, :, :, :n_tokens]
            return view[0], view[1]
        if out is None:
            shape = (2, self.layout.n_heads, len(blocks) * size, self.layout.head_dim)
            out = self._xp.empty(shape, dtype=self.data.dtype)
        pages = out.reshape(2, self.layout.n_heads, len(blocks), size, -1)
        for place, first, count in _runs(blocks):
            run = self.data[first : first + count, at]
            pages[:, :, place : place + count] = run.transpose(1, 2, 0, 3, 4)
        return out[0, :, :n_tokens], out[1, :, :n_tokens]

    def copy(self, sources: Blocks, targets: Blocks) -> None:
        """Copy whole blocks, as copy-on-write needs.

        Parameters
        ----------
        sources, targets : sequence of int
            Equal counts; no block is both.
        """
        if len(sources) != len(targets) or set(sources) & set(targets):
            raise CacheError(f"blocks {list(sources)} cannot be copied onto {list(targets)}")
        self.data[list(targets)] = self.data[list(sources)]

    def get_box(self, blocks: Blocks, piece: Piece) -> Array:
        """A box of one sequence, packed.

        Parameters
        ----------
        blocks : sequence of int
            The sequence's blocks from its first token on.
        piece : Piece
            Layers, heads and tokens, global.

        Returns
        -------
        array
            [layer, keys or values, KV head, token, dim], C-contiguous.
        """
        layers, heads = self._box(piece)
        start, stop = piece.tokens
        counts = (layers.stop - layers.start, 2, heads.stop - heads.start)
        box = self._xp.empty((*counts, stop - start, self.layout.head_dim), dtype=self.data.dtype)
        for block, inside, place in self._spans(blocks, piece.tokens):
            box[:, :, :, place] = self.data[block, layers, :, heads, inside]
        return box

    def put_box(self, blocks: Blocks, piece: Piece, box: Array) -> None:
        """Store a box that `get_box` made, here or elsewhere.

        Parameters
        ----------
        blocks, piece
            As in `get_box`.
        box : array
            What it returned.
        """
        layers, heads = self._box(piece)
        for block, inside, place in self._spans(blocks, piece.tokens):
            self.data[block, layers, :, heads, inside] = box[:, :, :, place]

    def get_bytes(self, blocks: Blocks, piece: Piece) -> Array:
        """A box as bytes in host memory, wherever the blocks lie.

        Parameters
        ----------
        blocks, piece
            As in `get_box`.

        Returns
        -------
        array of uint8
            The bytes of the box.
        """
        return to_host(self.get_box(blocks, piece)).reshape(-1).view(np.uint8)

    def put_bytes(self, blocks: Blocks, piece: Piece, data: Array) -> None:
        """Store the bytes of a box.

        Parameters
        ----------
        blocks, piece
            As in `get_box`.
        data : array of uint8
            What `get_bytes` returned.
        """
        heads, tokens = (stop - start for start, stop in (piece.heads, piece.tokens))
        shape = (-1, 2, heads, tokens, self.layout.head_dim)
        box = data.view(np.dtype(self.layout.dtype)).reshape(shape)
        self.put_box(blocks, piece, self._xp.asarray(box))

    # -- global numbers to local ones -----------------------------------------------------------

    def _layer(self, layer: int) -> int:
        start, stop = self.layout.layers
        if not start <= layer < stop:
            raise CountOutOfRange("layer of this rank's cache", f"{start}..{stop}", layer)
        return layer - start

    def _room(self, blocks: Blocks, n_tokens: int) -> None:
        room = len(blocks) * self.layout.block_size
        if not 0 <= n_tokens <= room:
            raise CacheError(f"{n_tokens} tokens do not lie in {len(blocks)} blocks ({room})")

    def _box(self, piece: Piece) -> tuple[slice, slice]:
        found = []
        for role, (start, stop), whole in (
            ("layers", piece.layers, self.layout.layers),
            ("KV heads", piece.heads, self.layout.heads),
        ):
            if not whole[0] <= start < stop <= whole[1]:
                raise CacheError(f"{role} {start}..{stop} of a transfer, held are {whole}")
            found.append(slice(start - whole[0], stop - whole[0]))
        return found[0], found[1]

    def _spans(self, blocks: Blocks, tokens: Range) -> Iterator[tuple[int, slice, slice]]:
        """Block, tokens inside it and tokens inside the box."""
        self._room(blocks, tokens[1])
        size, (start, stop) = self.layout.block_size, tokens
        for index in range(start // size, -(-stop // size)):
            low, high = max(start, index * size), min(stop, (index + 1) * size)
            inside = slice(low - index * size, high - index * size)
            yield blocks[index], inside, slice(low - start, high - start)


def _runs(blocks: Blocks) -> Iterator[tuple[int, int, int]]:
    """Place, first block and length of every run of consecutive blocks."""
    if not len(blocks):
        return
    ids = np.asarray(blocks)
    cuts = [0, *(np.flatnonzero(np.diff(ids) != 1) + 1).tolist(), len(ids)]
    for start, stop in pairwise(cuts):
        yield start, int(ids[start]), stop - start
