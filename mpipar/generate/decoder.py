"""The forward pass of new tokens over a paged cache, on one stage of a pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpipar.comm import Communicator
from mpipar.distributed_cache import CacheStorage, cache_layouts
from mpipar.models.layers import Attention
from mpipar.models.model import Model
from mpipar.models.parts import Saved

Array = NDArray[Any]


class Span(NamedTuple):
    """New tokens of one request.

    Attributes
    ----------
    tokens : ndarray
        The new ones.
    start : int
        Position of the first.
    table : ndarray
        Blocks of the request from its first token on.
    """

    tokens: NDArray[np.int32]
    start: int
    table: NDArray[np.int32]


class _Paged:
    """Attention of the rows of several spans, each over its own blocks."""

    def __init__(self, storage: CacheStorage, layers: Mapping[str, int], spans: Sequence[Span]):
        self._storage, self._layers, self._spans = storage, layers, spans
        size = storage.layout.block_size
        runs = [np.arange(s.start, s.start + len(s.tokens)) for s in spans]
        self.positions = np.concatenate(runs)
        self._blocks = np.concatenate(
            [s.table[r // size] for s, r in zip(spans, runs, strict=True)]
        )
        self._offsets = self.positions % size

    def __call__(self, layer: str, q: Array, k: Array, v: Array, out: Array) -> None:
        """Store the new keys and values, then attend span by span."""
        number, row = self._layers[layer], 0
        self._storage.write(number, self._blocks, self._offsets, k[:, :, 0], v[:, :, 0])
        for span in self._spans:
            rows = slice(row, row := row + len(span.tokens))
            keys, values = self._storage.read(number, span.table, span.start + len(span.tokens))
            out[rows, :, 0] = _attend(q[rows, :, 0], keys, values, span.start)


def _attend(q: Array, keys: Array, values: Array, start: int) -> Array:
    """Causal attention of queries (n, heads, dim) at `start` over keys (kv heads, tokens, dim)."""
    n, heads, dim = q.shape
    grouped = q.reshape(n, keys.shape[0], -1, dim).transpose(1, 2, 0, 3)
    scores = grouped @ keys[:, None].swapaxes(-1, -2)
    scores *= 1.0 / np.sqrt(dim).astype(q.dtype)
    if n > 1:
        late = np.arange(keys.shape[1]) > start + np.arange(n)[:, None]
        scores[..., late] = -np.inf
    scores -= scores.max(-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(-1, keepdims=True)
    attended: Array = (scores @ values[:, None]).transpose(2, 0, 1, 3).reshape(n, heads, dim)
    return attended


class Decoder:
    """This rank's layers of a model, and their keys and values.

    Parameters
    ----------
    model : Model
        Built with its tensor-parallel communicator.
    parameters : mapping of str to ndarray
        Those of this stage at least.
    n_blocks, block_size : int
        Of the cache.
    pp : Communicator, optional
        The stages, in order; this rank computes all layers without it.

    Attributes
    ----------
    storage : CacheStorage
        The keys and values: as many bytes as the layout says.

    Raises
    ------
    UnevenSplit
        If the KV heads cannot be split over the tensor-parallel ranks.
    """

    def __init__(
        self,
        model: Model,
        parameters: Mapping[str, Array],
        n_blocks: int,
        block_size: int = 16,
        pp: Communicator | None = None,
    ) -> None:
        c, tp = model.config, model.tp
        self.model, self.parameters, self.pp = model, parameters, pp
        stage, n_stages = (0, 1) if pp is None else (pp.rank, pp.size)
        self.is_first, self.is_last = stage == 0, stage == n_stages - 1
        layouts = cache_layouts(
            c.n_layers, c.kv_heads, c.head_width, tp=tp.size, pp=n_stages, block_size=block_size
        )
        layout = layouts[stage * tp.size + tp.rank]
        self.storage = CacheStorage(layout, n_blocks)
        self._blocks = [model.blocks[i] for i in range(*layout.layers)]
        self._layers = {f"blocks.{i}.": i for i in range(*layout.layers)}

    def step(self, spans: Sequence[Span]) -> Array | None:
        """Compute new tokens of several requests. Collective over the stages and the tp group.

        Parameters
        ----------
        spans : sequence of Span
            The same on every rank.

        Returns
        -------
        ndarray or None
            Scores after the last token of each span, shape ``(spans, vocabulary)``; None but from
            the last stage.
        """
        paged = _Paged(self.storage, self._layers, spans)
        x = self._input(spans, paged.positions)
        for half in (half for block in self._blocks for half in block.halves):
            if isinstance(half, Attention):
                half.attend = paged
            try:
                x, saved = half.forward(self.parameters, x)
            finally:
                if isinstance(half, Attention):
                    half.attend = None
            half.release(saved)
        model = self.model
        if self.pp is not None and not self.is_last:
            self.pp.send(x, self.pp.rank + 1)
            model.workspace.give(x)
            return None
        ends = np.cumsum([len(span.tokens) for span in spans]) - 1
        last, kept = np.ascontiguousarray(x[ends]), Saved()
        model.workspace.give(x)
        logits = model.head.joined(model.head.logits(self.parameters, last, kept))
        scores = np.array(logits[:, 0])
        model.workspace.give(logits)
        model.head.release(kept)
        return scores

    def _input(self, spans: Sequence[Span], positions: Array) -> Array:
        p, c, model = self.parameters, self.model.config, self.model
        if self.pp is not None and not self.is_first:
            x: Array = np.empty((len(positions), 1, c.width), self.storage.data.dtype)
            self.pp.recv(x, self.pp.rank - 1)
            return x
        tokens = np.concatenate([span.tokens for span in spans])[:, None]
        if not c.learns_positions:
            x, saved = model.embedding.forward(p, tokens)
        else:  # each row is one token with a position of its own
            table = p["pos.weight"]
            x, saved = model.embedding.forward(
                {**p, "pos.weight": np.zeros_like(table[:1])}, tokens
            )
            x[:, 0] += table[positions]
        model.embedding.release(saved)
        return x
