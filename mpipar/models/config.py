"""The shapes of a GPT and of a Llama, each as one frozen value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mpipar.errors import CountOutOfRange, OutOfRange, RecipeError, UnevenSplit
from mpipar.units.remainder import divisors, exact_size


@dataclass(frozen=True)
class ModelConfig:
    """What all decoder-only transformers share.

    Attributes
    ----------
    kind : str
        Word for the class, so that a table of values says which one it is.
    n_layers, width, n_heads, sequence, vocabulary : int
        Layers, width of the residual stream, query heads, longest row of tokens, token values.
    n_kv_heads : int, optional
        Key and value heads, dividing `n_heads`; as many as query heads by default.
    dropout : float
        On the embedding and on both branches of a block, in training.
    eps : float
        Of the norms.
    tied : bool
        The head uses the token embedding.
    ignore_index : int
        Targets of this value do not count.
    label_smoothing : float
        Share of the target spread over the vocabulary.
    has_bias : bool
        Whether linear maps and norms add one; fixed by the class.
    uses_rms_norm : bool
        RMS norm instead of layer norm; fixed by the class.
    learns_positions : bool
        A table of positions is added to the embedding; fixed by the class.
    """

    kind: str = ""
    n_layers: int = 4
    width: int = 256
    n_heads: int = 4
    sequence: int = 128
    vocabulary: int = 256
    n_kv_heads: int | None = None
    dropout: float = 0.0
    eps: float = 1e-5
    tied: bool = False
    ignore_index: int = -100
    label_smoothing: float = 0.0

    has_bias: ClassVar[bool]
    uses_rms_norm: ClassVar[bool]
    learns_positions: ClassVar[bool]

    def __post_init__(self) -> None:
        """Refuse shapes that cannot exist."""
        if self.kind != type(self).kind:
            raise RecipeError(
                f"kind={self.kind!r} of a {type(self).__name__}; {type(self).kind!r} would do"
            )
        for name in ("n_layers", "width", "n_heads", "sequence", "vocabulary"):
            self._at_least_one(name)
        exact_size(self.width, self.n_heads, "width", "n_heads")
        if self.n_kv_heads is not None:
            exact_size(self.n_heads, self.n_kv_heads, "n_heads", "n_kv_heads")
        for name in ("dropout", "label_smoothing"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise OutOfRange(name, "[0, 1)", getattr(self, name))

    def _at_least_one(self, name: str) -> None:
        if getattr(self, name) < 1:
            raise CountOutOfRange(name, "1 or more", getattr(self, name))

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


@dataclass(frozen=True)
class GPTConfig(ModelConfig):
    """Shape of a GPT: layer norms, biases, learned positions, tanh GELU.

    Attributes
    ----------
    hidden_factor : int
        Width of the feed-forward layer over `width`.
    """

    kind: str = "gpt"
    hidden_factor: int = 4

    has_bias: ClassVar[bool] = True
    uses_rms_norm: ClassVar[bool] = False
    learns_positions: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Refuse shapes that cannot exist."""
        super().__post_init__()
        self._at_least_one("hidden_factor")

    @property
    def hidden(self) -> int:
        """Width of the feed-forward layer.

        Returns
        -------
        int
            At least 1.
        """
        return self.hidden_factor * self.width


@dataclass(frozen=True)
class LlamaConfig(ModelConfig):
    """Shape of a Llama: RMS norms, no biases, rotary positions, SwiGLU.

    Attributes
    ----------
    hidden : int
        Width of the feed-forward layer.
    rope_base : float
        Ratio of the longest to the shortest wavelength of the rotary embedding.
    """

    kind: str = "llama"
    hidden: int = 704
    rope_base: float = 10000.0

    has_bias: ClassVar[bool] = False
    uses_rms_norm: ClassVar[bool] = True
    learns_positions: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Refuse shapes that cannot exist."""
        super().__post_init__()
        self._at_least_one("hidden")
        if self.head_width % 2:
            would_do = [n for n in divisors(self.width) if self.width // n % 2 == 0]
            raise UnevenSplit(
                "rotary embedding",
                f"head_width={self.head_width} (width={self.width} over n_heads={self.n_heads}) "
                f"has no halves; n_heads={' or '.join(map(str, would_do)) or 'none'} would do",
            )
        if not self.rope_base > 0.0:
            raise OutOfRange("rope_base", "above 0", self.rope_base)
