"""A Llama (Touvron et al. 2023): RMS norm, rotary embedding, SwiGLU, grouped-query attention."""

from __future__ import annotations

from collections.abc import Callable

from mpipar import nn
from mpipar.comm import Communicator
from mpipar.models.config import LlamaConfig
from mpipar.models.layers import Attention
from mpipar.models.model import Model
from mpipar.models.parts import Gradients, Parameters, Residual, Saved
from mpipar.nn.array import Array, arange_like, namespace
from mpipar.tensor_parallel.parameter import ShardedParameter


class RotaryAttention(Attention):
    """Attention whose queries and keys turn by their positions."""

    config: LlamaConfig

    def _rotate(self, qkv: Array, rotate: Callable[..., Array]) -> None:
        c = self.config
        batch, n = qkv.shape[:2]
        heads = namespace(qkv).reshape(qkv, (batch, n, -1, c.head_width))
        turned = heads[:, :, : sum(self._n_heads), :]
        rotate(turned, *self._tables(qkv, n), out=turned)

    def _tables(self, like: Array, n: int) -> tuple[Array, Array]:
        """Cosines and sines of positions 0 to `n`, computed once for all layers and steps."""
        c = self.config
        if self.attend is not None:
            places = self.attend.positions[:, None]
            return nn.rotary_tables(like, places, c.head_width, c.rope_base)

        def make() -> tuple[Array, Array]:
            return nn.rotary_tables(like, arange_like(like, n), c.head_width, c.rope_base)

        key = ("rotary", n, type(like), str(like.dtype))
        tables: tuple[Array, Array] = self.workspace.keep(key, make)
        return tables


class SwiGLU(Residual):
    """Pre-norm gated network with its residual connection; gate and up are one weight."""

    norm = "ln2"
    closing = "down"
    grad_inner = "slopes"
    config: LlamaConfig

    def _shards(self) -> dict[str, ShardedParameter]:
        width, hidden = self.config.width, self.config.hidden
        return {
            **self._norm_shards("ln2"),
            **self._linear_shards("gate_up", 2 * hidden, width, 0, (hidden, hidden)),
            **self._linear_shards("down", width, hidden, 1),
        }

    def _inner(self, p: Parameters, h: Array, saved: Saved) -> Array:
        # The slopes take the place of gate and up, which nothing reads again.
        u = saved["slopes"] = self._linear("gate_up", p, h)
        return nn.swiglu(u, out=self._like(u, u.shape[-1] // 2), slopes=u)

    def _inner_backward(self, p: Parameters, grad: Array, saved: Saved) -> Array:
        # The gradients take the place of the slopes.
        u = nn.swiglu_backward(grad, saved["slopes"], out=saved["slopes"])
        self.workspace.give(grad)
        return self._linear_backward("gate_up", p, u)

    def _inner_weight(self, saved: Saved, gradients: Gradients) -> None:
        self._linear_weight("gate_up", saved["normed"], saved["slopes"], gradients)


class Llama(Model):
    """A Llama as plain functions of a parameter dict.

    Between forward and backward it holds per token and layer: four widths of the norms, queries,
    keys and values once (turned in place), the attended values, and three widths of the hidden
    layer.

    Parameters
    ----------
    config : LlamaConfig
        Its shape.
    tp : Communicator, optional
        As in `Model`.
    sequence_parallel : bool
        As in `Model`.
    """

    halves = (RotaryAttention, SwiGLU)
    config: LlamaConfig

    def __init__(
        self,
        config: LlamaConfig,
        tp: Communicator | None = None,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__(config, tp, sequence_parallel)
