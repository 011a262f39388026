"""The shape of a GPT, as one frozen value."""

from __future__ import annotations

from dataclasses import dataclass

from mpipar.errors import CountOutOfRange, OutOfRange
from mpipar.units.remainder import exact_size


@dataclass(frozen=True)
class GPTConfig:
    """Shape of a GPT.

    Attributes
    ----------
    n_layers, width, n_heads, sequence, vocabulary : int
        Layers, width of the residual stream, query heads, longest row of tokens, token values.
    n_kv_heads : int, optional
        Key and value heads, dividing `n_heads`; as many as query heads by default.
    hidden_factor : int
        Width of the feed-forward layer over `width`.
    dropout : float
        On the embedding and on both branches of a block, in training.
    eps : float
        Of the layer norms.
    tied : bool
        The head uses the token embedding.
    ignore_index : int
        Targets of this value do not count.
    label_smoothing : float
        Share of the target spread over the vocabulary.
    """

    n_layers: int = 4
    width: int = 256
    n_heads: int = 4
    sequence: int = 128
    vocabulary: int = 256
    n_kv_heads: int | None = None
    hidden_factor: int = 4
    dropout: float = 0.0
    eps: float = 1e-5
    tied: bool = False
    ignore_index: int = -100
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        """Refuse shapes that cannot exist."""
        for name in ("n_layers", "width", "n_heads", "sequence", "vocabulary", "hidden_factor"):
            if getattr(self, name) < 1:
                raise CountOutOfRange(name, "1 or more", getattr(self, name))
        exact_size(self.width, self.n_heads, "width", "n_heads")
        if self.n_kv_heads is not None:
            exact_size(self.n_heads, self.n_kv_heads, "n_heads", "n_kv_heads")
        for name in ("dropout", "label_smoothing"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise OutOfRange(name, "[0, 1)", getattr(self, name))

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads.

        Returns
        -------
        int
            At least 1.
        """
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads

    @property
    def head_width(self) -> int:
        """Width of one head.

        Returns
        -------
        int
            At least 1.
        """
        return self.width // self.n_heads

    @property
    def hidden(self) -> int:
        """Width of the feed-forward layer.

        Returns
        -------
        int
            At least 1.
        """
        return self.hidden_factor * self.width
