"""One fetch of a prefix from other ranks: its states, and the chunks in which it moves. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

from mpipar.distributed_cache.eviction import Blocks
from mpipar.distributed_cache.hashing import Chain
from mpipar.distributed_cache.layout import CacheLayout, Piece
from mpipar.distributed_cache.mail import HEAD_BYTES
from mpipar.errors import CacheError, LayoutError, RankMismatch


class State(StrEnum):
    """Where a transfer stands; the last three are ends, and each transfer meets one of them once.

    RESERVED: room is made and the sources are asked. MOVING: data is on its way. READY: all data
    is here, `TransferEngine.accept` is awaited.
    """

    RESERVED = "reserved"
    MOVING = "moving"
    READY = "ready"
    COMPLETE = "complete"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_end(self) -> bool:
        """Whether nothing comes after it."""
        return self in (State.COMPLETE, State.FAILED, State.CANCELLED)


@dataclass(eq=False)
class Transfer:
    """A fetch under way; made by `TransferEngine.fetch`.

    Attributes
    ----------
    number : int
        Names it on this rank.
    group : tuple of int
        Ranks that together hold the prefix.
    chain : Chain
        What is wanted.
    blocks : array of int32
        Reserved for it, later the ones that were filled.
    waits : bool
        Whether it stops at READY.
    state : State
        Where it stands.
    reason : str
        Why it failed.
    n_blocks : int
        Blocks that the sources hold: perhaps fewer than wanted.
    n_bytes : int
        Bytes of keys and values that came.
    """

    number: int
    group: tuple[int, ...]
    chain: Chain
    blocks: Blocks
    waits: bool
    state: State = State.RESERVED
    reason: str = ""
    n_blocks: int = 0
    n_bytes: int = 0
    pieces: tuple[Piece, ...] = ()
    answers: dict[int, int] = field(default_factory=dict)
    chunks: list[Piece] = field(default_factory=list)
    next_chunk: int = 0
    asked: dict[int, float] = field(default_factory=dict)  # chunk -> when
    touched: float = 0.0
    asked_at: float = 0.0

    @property
    def sources(self) -> list[int]:
        """Ranks that something is fetched from."""
        return sorted({self.group[piece.source] for piece in self.pieces})

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self.state.is_end

    def end(self, state: State, reason: str = "") -> None:
        """Come to an end, once.

        Parameters
        ----------
        state : State
            COMPLETE, FAILED or CANCELLED.
        reason : str
            Why it failed.
        """
        if self.is_over:
            raise CacheError(f"transfer {self.number} is {self.state} and cannot become {state}")
        self.state, self.reason = state, reason

    def missing(self) -> str:
        """What has not come, for messages.

        Returns
        -------
        str
            Ranks without an answer, or chunks without data.
        """
        if self.state is State.RESERVED:
            return f"no answer from ranks {sorted(set(self.sources) - set(self.answers))}"
        left = [self.chunks[i] for i in sorted(self.asked)] + self.chunks[self.next_chunk :]
        return "no data for " + "; ".join(
            f"layers {c.layers}, KV heads {c.heads}, tokens {c.tokens} of rank "
            f"{self.group[c.source]}"
            for c in left[:4]
        )


def cut(pieces: Sequence[Piece], n_tokens: int, layout: CacheLayout, room: int) -> list[Piece]:
    """Pieces as chunks that fit a frame, whole layers where a frame holds more than one.

    Parameters
    ----------
    pieces : sequence of Piece
        Of one target; their token range is not looked at.
    n_tokens : int
        Tokens that move.
    layout : CacheLayout
        Of the target.
    room : int
        Bytes of a frame.

    Returns
    -------
    list of Piece
        Layer by layer, so that the first layers are complete first.
    """
    chunks = []
    item = 2 * layout.head_dim * np.dtype(layout.dtype).itemsize
    for piece in pieces:
        unit = (piece.heads[1] - piece.heads[0]) * item  # one token of one layer
        tokens = max(1, min(n_tokens, room // unit))
        layers = max(1, room // (unit * tokens))
        for low in range(*piece.layers, layers):
            high = min(low + layers, piece.layers[1])
            for start in range(0, n_tokens, tokens):
                stop = min(start + tokens, n_tokens)
                size = (high - low) * (stop - start) * unit
                chunks.append(
                    piece._replace(layers=(low, high), tokens=(start, stop), n_bytes=size)
                )
    return sorted(chunks, key=lambda c: (c.layers, c.tokens, c.heads))


def agreed_layouts(said: list[Any]) -> list[CacheLayout]:
    """Every rank's layout, once all fit together; the same error on every rank if not.

    Parameters
    ----------
    said : list
        What every rank told: its layout as a mapping, and the sizes of its frames.

    Returns
    -------
    list of CacheLayout
        In rank order.

    Raises
    ------
    RankMismatch, LayoutError
        If they differ, or a frame holds no token.
    """
    layouts = [
        CacheLayout(**{**given, "layers": tuple(given["layers"]), "heads": tuple(given["heads"])})
        for given, _ in said
    ]
    kinds = [
        (layout.head_dim, layout.block_size, layout.dtype, *sizes)
        for layout, (_, sizes) in zip(layouts, said, strict=True)
    ]
    for rank, kind in enumerate(kinds):
        if kind != kinds[0]:
            raise RankMismatch(
                "cache layout",
                f"rank 0 has (head_dim, block_size, dtype, frames) {kinds[0]}, rank {rank} {kind}",
            )
    need = max(c.bytes_per_token // c.n_layers for c in layouts) + HEAD_BYTES
    if kinds[0][-1] < need:
        raise LayoutError(f"a frame of {kinds[0][-1]} bytes holds no token; {need} are needed")
    return layouts
