"""The model of `mpipar.models.gpt` written in PyTorch alone, with the same parameter names.

It is the peer of `train_step.py` and the reference of the parity test.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from mpipar.models import GPTConfig


class TorchBlock(torch.nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, c: GPTConfig) -> None:
        super().__init__()
        d, self.c = c.width, c
        self.ln1, self.ln2 = torch.nn.LayerNorm(d), torch.nn.LayerNorm(d)
        self.qkv = torch.nn.Linear(d, d + 2 * c.kv_heads * c.head_width)
        self.proj = torch.nn.Linear(d, d)
        self.up, self.down = torch.nn.Linear(d, 4 * d), torch.nn.Linear(4 * d, d)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        c, (b, t, d) = self.c, x.shape
        sizes = [d, c.kv_heads * c.head_width, c.kv_heads * c.head_width]
        parts = self.qkv(self.ln1(x)).split(sizes, -1)
        q, k, v = (z.view(b, t, -1, c.head_width).transpose(1, 2) for z in parts)
        a = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.proj(a.transpose(1, 2).reshape(b, t, d))
        return x + self.down(functional.gelu(self.up(self.ln2(x)), approximate="tanh"))


class TorchGPT(torch.nn.Module):
    """The whole model; `forward` gives logits."""

    def __init__(self, c: GPTConfig) -> None:
        super().__init__()
        self.tok = torch.nn.Embedding(c.vocabulary, c.width)
        self.pos = torch.nn.Embedding(c.sequence, c.width)
        self.blocks = torch.nn.ModuleList(TorchBlock(c) for _ in range(c.n_layers))
        self.ln = torch.nn.LayerNorm(c.width)
        self.head = torch.nn.Linear(c.width, c.vocabulary, bias=False)
        if c.tied:
            self.head.weight = self.tok.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.tok(x) + self.pos(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln(x))
