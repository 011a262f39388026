"""What each rank holds, in bytes, by exact formulas over arrays of configurations.

Model state: Rajbhandari et al. 2020 (ZeRO, arXiv 1910.02054). Activations: Korthikanti et al. 2022
(arXiv 2205.05198), written out by what each operation keeps so that grouped-query attention, gated
feed-forward layers and experts follow from the same terms; a GPT gives the paper's
``s b h (10 + 24/t + 5 a s/h t)``. The first and the last stage differ: the first keeps the most
microbatches and the embedding, the last the head and its logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpipar.planner.configs import FULL, GPIPE, SELECTIVE, Configs
from mpipar.planner.spec import ModelSpec
from mpipar.units.remainder import spread_sizes

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Precision:
    """Bytes of a parameter in each role.

    Parameters
    ----------
    weight, grad, optimizer : int
        Bytes of the working weight, its gradient, and the optimizer's state.
    """

    weight: int
    grad: int
    optimizer: int

    @property
    def total(self) -> int:
        """Bytes of a parameter without any sharding."""
        return self.weight + self.grad + self.optimizer


MIXED = Precision(2, 4, 12)
"""16-bit weights, 32-bit gradients and Adam: 18 bytes, as in Megatron-LM."""
ZERO_PAPER = Precision(2, 2, 12)
"""16-bit weights and gradients, Adam (K = 12): 16 bytes, as in the ZeRO paper."""
SINGLE = Precision(4, 4, 8)
"""All in 32 bits with Adam."""


def state_bytes(n_parameters: Any, precision: Precision, zero: Any = 0, dp: Any = 1) -> Any:
    """Bytes of weights, gradients and optimizer state of a rank under ZeRO.

    Parameters
    ----------
    n_parameters : float or array
        Parameters of the rank before ZeRO.
    precision : Precision
        Bytes of each role.
    zero : int or array
        Stage: 1 shards the optimizer, 2 the gradients too, 3 the weights too.
    dp : int or array
        Ranks that share.

    Returns
    -------
    float or array
        ``n (w + g + o)`` with each sharded role over `dp`.
    """
    return sum(role_bytes(n_parameters, precision, np.asarray(zero), np.asarray(dp, np.float64)))


def role_bytes(n: Any, precision: Precision, zero: Any, dp: Any) -> tuple[Any, Any, Any]:
    """Bytes of weights, gradients and optimizer state, each sharded from its stage of ZeRO on."""
    return (
        n * (precision.weight / np.where(zero >= 3, dp, 1)),
        n * (precision.grad / np.where(zero >= 2, dp, 1)),
        n * (precision.optimizer / np.where(zero >= 1, dp, 1)),
    )


def layer_activation_bytes(
    spec: ModelSpec, micro: Any, tp: Any = 1, cp: Any = 1, sp: Any = False, recompute: Any = 0
) -> Any:
    """Bytes that one layer keeps for the backward pass of one microbatch, on one rank.

    Parameters
    ----------
    spec : ModelSpec
        The model.
    micro, tp, cp : int or array
        Rows of a microbatch, tensor and context parallel degrees.
    sp : bool or array
        Sequence parallelism: what tensor parallelism does not split lies split over the sequence.
    recompute : int or array
        `NONE`, `SELECTIVE` (attention scores are computed again) or `FULL` (only the input stays).

    Returns
    -------
    float or array
        At two bytes an element and one a mask element.
    """
    h, s, kv, f = spec.width, spec.sequence, spec.kv_width, spec.ffn
    k = spec.n_active
    tokens = np.asarray(micro, np.float64) * s / cp
    split_sp = np.where(sp, tp, 1)
    masks = 2 * h if spec.dropout else 0
    routed = 2 * h * (k - 1) + 2 * spec.n_experts if spec.n_experts > 1 else 0
    whole = 8 * h + masks + routed
    heads = 4 * h + 4 * kv
    hidden = (6 if spec.gated else 4) * f * k
    a = spec.n_heads
    every_score = 4 * a if spec.flash else (5 if spec.dropout else 2) * a * s
    scores = np.where(np.asarray(recompute) == SELECTIVE, 0, every_score)
    kept = whole / split_sp + (heads + hidden + scores) / tp
    return tokens * np.where(np.asarray(recompute) == FULL, 2 * h / split_sp, kept)


def in_flight(configs: Configs, stage: Any) -> Any:
    """Microbatches whose activations a stage holds at its peak, in whole stages.

    Parameters
    ----------
    configs : Configs
        Degrees, chunks and schedule.
    stage : int or array
        Stage, from 0.

    Returns
    -------
    float or array
        ``min(m, p - stage)`` for 1F1B (and ZB-H1); interleaved over v chunks
        ``(2 (p - stage - 1) + (v - 1) p + 1) / v``, which is ``p + (p - 1)/v`` on the first;
        all m for GPipe.
    """
    p, m, v = configs.pp, configs.n_micro, configs.chunks
    plain = p - stage
    woven = (2 * (p - stage - 1) + (v - 1) * p + 1) / v
    held = np.minimum(m, np.where(v > 1, woven, plain))
    return np.where(configs.schedule == GPIPE, m, held)


def stage_parameters(
    spec: ModelSpec, configs: Configs, n_layers: Any, first: bool, last: bool
) -> Any:
    """Parameters of one rank of a stage before ZeRO, split in (dense, expert) parts.

    Parameters
    ----------
    spec : ModelSpec
        The model.
    configs : Configs
        Degrees.
    n_layers : int or array
        Layers of the stage.
    first, last : bool
        The stage holds the embedding, or the head (a tied head is a second copy of it).

    Returns
    -------
    tuple of arrays
        Expert weights are split over `ep` too, so ZeRO shards them over dp cp / ep only.
    """
    t = configs.tp
    dense = (spec.attention_weights + spec.split_biases) / t + spec.whole_weights
    expert = spec.expert_weights * spec.n_experts / (t * configs.ep)
    rows = np.ceil(spec.vocabulary / t) * spec.width
    outside = np.zeros(len(configs))
    if first:
        outside = outside + rows + spec.position_weights
    if last:
        outside = outside + (0 if spec.tied and first else rows) + spec.final_norm
    inside = dense if spec.n_experts > 1 else dense + expert
    routed = expert if spec.n_experts > 1 else 0.0 * expert
    return n_layers * inside + outside, n_layers * routed


@dataclass(frozen=True)
class Memory:
    """Bytes of the fullest rank of a stage, by kind.

    Parameters
    ----------
    weights, grads, optimizer, activations, working : array
        State by role; activations kept between passes; and the largest buffers in use at once:
        one layer that is computed again, its gradient, logits, communication.
    """

    weights: Floats
    grads: Floats
    optimizer: Floats
    activations: Floats
    working: Floats

    @property
    def total(self) -> Floats:
        """Sum over all kinds."""
        return self.weights + self.grads + self.optimizer + self.activations + self.working


def stage_memory(
    spec: ModelSpec, configs: Configs, precision: Precision, stage: str = "first"
) -> Memory:
    """Memory of a rank in the first or the last stage.

    Parameters
    ----------
    spec : ModelSpec
        The model.
    configs : Configs
        Any number of configurations.
    precision : Precision
        Bytes of a parameter.
    stage : str
        ``first`` or ``last``; with one stage both hold everything.

    Returns
    -------
    Memory
        Arrays as long as `configs`.
    """
    p = configs.pp
    one = p == 1
    is_first = stage == "first"
    n_layers = np.ceil(spec.n_layers / p) if is_first else np.floor(spec.n_layers / p)
    dense, expert = stage_parameters(spec, configs, n_layers, is_first, not is_first)
    both = stage_parameters(spec, configs, n_layers, True, True)
    dense, expert = np.where(one, both[0], dense), np.where(one, both[1], expert)
    ranks = configs.dp * configs.cp
    weights, grads, optimizer = role_bytes(dense, precision, configs.zero, ranks)
    if spec.n_experts > 1:
        owners = np.maximum(1, ranks / configs.ep)
        routed = role_bytes(expert, precision, configs.zero, owners)
        weights, grads, optimizer = weights + routed[0], grads + routed[1], optimizer + routed[2]
    # The formulas count 16-bit activations; in 32 bits everything is twice as long.
    wide = precision.weight / 2
    layer = wide * layer_activation_bytes(
        spec, configs.micro, configs.tp, configs.cp, configs.sp, configs.recompute
    )
    at = 0 if is_first else p - 1
    kept = layer * n_layers * in_flight(configs, at)
    return Memory(
        weights, grads, optimizer, kept, _working(spec, configs, layer, wide, one | (not is_first))
    )


def _working(
    spec: ModelSpec, configs: Configs, layer: Floats, wide: float, has_head: Any
) -> Floats:
    """One layer's full activations while it is computed again, and the logits on the last stage."""
    whole = wide * layer_activation_bytes(
        spec, configs.micro, configs.tp, configs.cp, configs.sp, 0
    )
    tokens = configs.micro * spec.sequence / configs.cp
    gradient = 4 * wide * spec.width * tokens
    logits = tokens * (4 * spec.width + 6 * np.ceil(spec.vocabulary / configs.tp))
    gathered = np.where(configs.zero >= 3, 2 * spec.layer_weights / (configs.tp * configs.ep), 0.0)
    return np.asarray(whole - layer + gradient + gathered + np.where(has_head, logits, 0.0))


def stage_layers(spec: ModelSpec, pp: int) -> tuple[int, ...]:
    """Layers of each stage: the first stages take one more."""
    return spread_sizes(spec.n_layers, pp)
