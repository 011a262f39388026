"""The model of `mpipar.models.llama` written in PyTorch alone, with the same parameter names.

Rotation is by complex numbers, and every key head is repeated for its group of queries: other
formulas than the library's, for the parity test.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from mpipar.models import LlamaConfig


def turn(x: torch.Tensor, base: float) -> torch.Tensor:
    """Rotary embedding of (batch, heads, n, width); feature i pairs with i + width / 2."""
    low, high = x.chunk(2, -1)
    half = low.shape[-1]
    frequency = base ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(x.shape[2], dtype=torch.float64)[:, None] * frequency
    turned = torch.complex(low, high) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag], -1)


class TorchLlamaBlock(torch.nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, c: LlamaConfig) -> None:
        super().__init__()
        d, self.c = c.width, c
        self.ln1, self.ln2 = (torch.nn.RMSNorm(d, eps=c.eps) for _ in range(2))
        self.qkv = torch.nn.Linear(d, d + 2 * c.kv_heads * c.head_width, bias=False)
        self.proj = torch.nn.Linear(d, d, bias=False)
        self.gate_up = torch.nn.Linear(d, 2 * c.hidden, bias=False)
        self.down = torch.nn.Linear(c.hidden, d, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        c, (b, t, d) = self.c, x.shape
        sizes = [d, c.kv_heads * c.head_width, c.kv_heads * c.head_width]
        parts = self.qkv(self.ln1(x)).split(sizes, -1)
        q, k, v = (z.view(b, t, -1, c.head_width).transpose(1, 2) for z in parts)
        q, k = turn(q, c.rope_base), turn(k, c.rope_base)
        k, v = (z.repeat_interleave(c.n_heads // c.kv_heads, 1) for z in (k, v))
        scores = q @ k.transpose(2, 3) / c.head_width**0.5
        future = torch.ones(t, t, dtype=torch.bool).triu(1)
        a = scores.masked_fill(future, -torch.inf).softmax(-1) @ v
        x = x + self.proj(a.transpose(1, 2).reshape(b, t, d))
        gate, up = self.gate_up(self.ln2(x)).chunk(2, -1)
        return x + self.down(functional.silu(gate) * up)


class TorchLlama(torch.nn.Module):
    """The whole model; `forward` gives logits."""

    def __init__(self, c: LlamaConfig) -> None:
        super().__init__()
        self.tok = torch.nn.Embedding(c.vocabulary, c.width)
        self.blocks = torch.nn.ModuleList(TorchLlamaBlock(c) for _ in range(c.n_layers))
        self.ln = torch.nn.RMSNorm(c.width, eps=c.eps)
        self.head = torch.nn.Linear(c.width, c.vocabulary, bias=False)
        if c.tied:
            self.head.weight = self.tok.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.tok(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln(x))
