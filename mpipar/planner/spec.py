"""Models as the planner sees them: parameters and FLOPs by exact formulas.

Letters of the papers: s sequence, b microbatch, h width, a heads, L layers, V vocabulary, t tensor
parallel degree. FLOPs follow Narayanan et al. 2021 (arXiv 2104.04473): a multiply-add is two, and
attention is counted without its causal mask.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any

from mpipar.errors import CountOutOfRange, LayoutError
from mpipar.units import Flops
from mpipar.units.remainder import exact_size


@dataclass(frozen=True)
class ModelSpec:
    """Shape of a decoder-only transformer.

    Parameters
    ----------
    n_layers, width, n_heads, sequence, vocabulary : int
        Layers, width of the residual stream, query heads, tokens of a row, token values.
    n_kv_heads : int, optional
        Key and value heads (default: as many as query heads).
    hidden : int, optional
        Width of the feed-forward layer, of one expert where there are experts (default: 4 widths).
    family : str
        ``gpt`` (biases, layer norms, learned positions) or ``llama`` (none of them, gated FFN).
    tied : bool
        The head uses the token embedding.
    n_experts, n_active : int
        Experts of a layer and how many a token visits; 1 and 1 for a dense model.
    positions : bool, optional
        Positions are learned (default: in the ``gpt`` family).
    dropout : bool
        Dropout masks are kept for the backward pass.
    flash : bool
        Attention never stores its scores (Dao et al. 2022).
    name : str
        For people.
    """

    n_layers: int
    width: int
    n_heads: int
    sequence: int
    vocabulary: int
    n_kv_heads: int | None = None
    hidden: int | None = None
    family: str = "gpt"
    tied: bool = True
    n_experts: int = 1
    n_active: int = 1
    positions: bool | None = None
    dropout: bool = True
    flash: bool = False
    name: str = "model"

    def __post_init__(self) -> None:
        for name in ("n_layers", "width", "n_heads", "sequence", "vocabulary", "n_experts"):
            if getattr(self, name) < 1:
                raise CountOutOfRange(name, "1 or more", getattr(self, name))
        if not 1 <= self.n_active <= self.n_experts:
            raise CountOutOfRange("n_active", f"1..{self.n_experts}", self.n_active)
        if self.family not in ("gpt", "llama"):
            raise LayoutError(f"model family {self.family!r}: gpt or llama would do")
        exact_size(self.width, self.n_heads, "width", "n_heads")
        exact_size(self.n_heads, self.kv_heads, "n_heads", "n_kv_heads")

    @property
    def kv_heads(self) -> int:
        """Key and value heads."""
        return self.n_kv_heads or self.n_heads

    @property
    def kv_width(self) -> int:
        """Width of all keys of a token."""
        return self.kv_heads * (self.width // self.n_heads)

    @property
    def ffn(self) -> int:
        """Width of the feed-forward layer."""
        return self.hidden or 4 * self.width

    @property
    def gated(self) -> bool:
        """The feed-forward layer has a gate: three matrices instead of two."""
        return self.family == "llama"

    @property
    def n_matrices(self) -> int:
        """Matrices of a feed-forward layer."""
        return 2 + self.gated

    @property
    def attention_weights(self) -> int:
        """Weights of a layer's attention that tensor parallelism splits."""
        return 2 * self.width * (self.width + self.kv_width)

    @property
    def expert_weights(self) -> int:
        """Weights of one feed-forward layer or expert."""
        return self.n_matrices * self.width * self.ffn

    @property
    def split_biases(self) -> int:
        """Biases of a layer that tensor parallelism splits (those of its column halves)."""
        return 0 if self.gated else self.width + 2 * self.kv_width + self.ffn * self.n_experts

    @property
    def whole_weights(self) -> int:
        """Weights of a layer that every tensor rank holds: norms, row biases, the router."""
        router = self.width * self.n_experts if self.n_experts > 1 else 0
        return router + (2 * self.width if self.gated else (5 + self.n_experts) * self.width)

    @property
    def layer_weights(self) -> int:
        """All weights of a layer; ``12 h^2 + 13 h`` for a GPT."""
        experts = self.n_experts * self.expert_weights
        return self.attention_weights + experts + self.split_biases + self.whole_weights

    @property
    def final_norm(self) -> int:
        """Weights of the norm before the head."""
        return self.width if self.gated else 2 * self.width

    @property
    def position_weights(self) -> int:
        """Learned positions."""
        learned = not self.gated if self.positions is None else self.positions
        return self.sequence * self.width if learned else 0

    @property
    def n_parameters(self) -> int:
        """Every parameter once: ``12 L h^2 (1 + 13/12h + (V+s)/12Lh)`` for a GPT, + final norm."""
        embeddings = self.vocabulary * self.width * (1 if self.tied else 2)
        outside = embeddings + self.position_weights + self.final_norm
        return self.n_layers * self.layer_weights + outside

    @property
    def n_active_parameters(self) -> int:
        """Parameters that one token meets."""
        idle = self.n_experts - self.n_active
        return self.n_parameters - self.n_layers * idle * self.expert_weights

    def with_sequence(self, sequence: int) -> ModelSpec:
        """The same model at another sequence length.

        Parameters
        ----------
        sequence : int
            Tokens of a row.

        Returns
        -------
        ModelSpec
            All else as it is.
        """
        return replace(self, sequence=sequence)

    def layer_flops(self, n_tokens: float) -> float:
        """Forward FLOPs of one layer over `n_tokens` tokens of full rows.

        Parameters
        ----------
        n_tokens : float
            Tokens of a microbatch.

        Returns
        -------
        float
            FLOPs, an addition and a multiplication counted as two.
        """
        weights = self.attention_weights + self.n_active * self.expert_weights
        return n_tokens * (2 * weights + 4 * self.width * self.sequence)

    def step_flops(self, batch: int, recompute: str = "none") -> Flops:
        """FLOPs of one training step over a global batch, head included.

        Parameters
        ----------
        batch : int
            Rows of the global batch.
        recompute : str
            ``none``: the model's own FLOPs (for MFU), ``72 B s L h^2 (1 + s/6h + V/12Lh)`` for a
            GPT; ``full`` adds every layer's forward pass: ``96 B s L h^2 (1 + s/6h + V/16Lh)``;
            ``selective`` is the hardware count of arXiv 2205.05198, whose ``s/3h`` counts
            attention twice, forward and backward.

        Returns
        -------
        Flops
            Of forward and backward.
        """
        tokens = batch * self.sequence
        layers = self.n_layers * self.layer_flops(tokens)
        again = {
            "none": 0.0,
            "selective": self.n_layers * tokens * 12 * self.width * self.sequence,
            "full": layers,
        }[recompute]
        return Flops(3 * layers + 6 * tokens * self.width * self.vocabulary + again)

    def kv_bytes(self, n_tokens: int, element_bytes: int = 2) -> int:
        """Bytes of the key-value cache of `n_tokens` tokens over all layers and heads.

        Parameters
        ----------
        n_tokens : int
            Tokens that are kept.
        element_bytes : int
            Bytes of one number.

        Returns
        -------
        int
            Bytes.
        """
        return 2 * self.n_layers * self.kv_width * element_bytes * n_tokens


def spec_from_mapping(values: Mapping[str, Any]) -> ModelSpec:
    """A model from the `[model]` section of a recipe or plan file.

    Parameters
    ----------
    values : mapping
        Field names of `ModelSpec`; `hidden_factor` is understood.

    Returns
    -------
    ModelSpec
        Checked.

    Raises
    ------
    LayoutError
        If a key is unknown or one that is needed is missing.
    """
    given = dict(values)
    factor = given.pop("hidden_factor", None)
    if factor is not None and "width" in given:
        given.setdefault("hidden", factor * given["width"])
    known = [field.name for field in fields(ModelSpec)]
    unknown = [key for key in given if key not in known]
    missing = [key for key in known[:5] if key not in given]
    if unknown or missing:
        fault = f"{unknown[0]!r} is unknown" if unknown else f"{missing[0]!r} is missing"
        raise LayoutError(f"model: {fault}; keys are {', '.join(known)}")
    return ModelSpec(**given)


def gpt(
    name: str,
    n_layers: int,
    width: int,
    n_heads: int,
    sequence: int = 2048,
    vocabulary: int = 51200,
) -> ModelSpec:
    """A GPT with four widths in its feed-forward layer and a tied head."""
    return ModelSpec(n_layers, width, n_heads, sequence, vocabulary, name=name)


def llama(
    name: str, n_layers: int, width: int, n_heads: int, n_kv_heads: int, hidden: int, **other: Any
) -> ModelSpec:
    """A Llama 3: grouped-query attention, gated feed-forward layer, no dropout, flash attention."""
    values: dict[str, Any] = {"sequence": 8192, "vocabulary": 128256, "tied": False} | other
    return ModelSpec(
        n_layers=n_layers,
        width=width,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        hidden=hidden,
        family="llama",
        dropout=False,
        flash=True,
        name=name,
        **values,
    )


MODELS: Mapping[str, ModelSpec] = MappingProxyType(
    {
        model.name: model
        for model in (
            gpt("gpt-tiny", 4, 256, 4, 128, 256),
            gpt("gpt2-124m", 12, 768, 12, 1024, 50257),
            gpt("gpt-1.7b", 24, 2304, 24),
            gpt("gpt-7.5b", 36, 4096, 32),
            gpt("gpt-22b", 48, 6144, 64),
            gpt("gpt-39b", 48, 8192, 64),
            gpt("gpt3-175b", 96, 12288, 96),
            gpt("gpt-530b", 105, 20480, 128),
            gpt("gpt-1t", 128, 25600, 160),
            llama("llama3-8b", 32, 4096, 32, 8, 14336),
            llama("llama3-70b", 80, 8192, 64, 8, 28672),
            llama("llama3-405b", 126, 16384, 128, 8, 53248),
            llama(
                "mixtral-8x7b", 32, 4096, 32, 8, 14336, vocabulary=32000, n_experts=8, n_active=2
            ),
        )
    }
)
"""Models by name."""
