"""Loss and all gradients against an independent PyTorch model in float64."""

from __future__ import annotations

import numpy as np
import pytest

from mpipar.models import GPT, GPTConfig

torch = pytest.importorskip("torch")
functional = torch.nn.functional
pytestmark = pytest.mark.bench


class TwinBlock(torch.nn.Module):
    def __init__(self, c):
        super().__init__()
        d, self.c = c.width, c
        self.ln1, self.ln2 = torch.nn.LayerNorm(d), torch.nn.LayerNorm(d)
        self.qkv = torch.nn.Linear(d, d + 2 * c.kv_heads * c.head_width)
        self.proj = torch.nn.Linear(d, d)
        self.up, self.down = torch.nn.Linear(d, 4 * d), torch.nn.Linear(4 * d, d)

    def forward(self, x):
        c, (b, t, d) = self.c, x.shape
        sizes = [d, c.kv_heads * c.head_width, c.kv_heads * c.head_width]
        parts = self.qkv(self.ln1(x)).split(sizes, -1)
        q, k, v = (z.view(b, t, -1, c.head_width).transpose(1, 2) for z in parts)
        a = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.proj(a.transpose(1, 2).reshape(b, t, d))
        return x + self.down(functional.gelu(self.up(self.ln2(x)), approximate="tanh"))


class Twin(torch.nn.Module):
    def __init__(self, c):
        super().__init__()
        self.tok = torch.nn.Embedding(c.vocabulary, c.width)
        self.pos = torch.nn.Embedding(c.sequence, c.width)
        self.blocks = torch.nn.ModuleList(TwinBlock(c) for _ in range(c.n_layers))
        self.ln = torch.nn.LayerNorm(c.width)
        self.head = torch.nn.Linear(c.width, c.vocabulary, bias=False)
        if c.tied:
            self.head.weight = self.tok.weight

    def forward(self, x):
        x = self.tok(x) + self.pos(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln(x))


CONFIGS = [
    GPTConfig(n_layers=2, width=64, n_heads=4, sequence=130),
    GPTConfig(n_layers=2, width=48, n_heads=6, n_kv_heads=2, sequence=70, vocabulary=97),
    GPTConfig(n_layers=1, width=32, n_heads=2, n_kv_heads=1, sequence=40, tied=True),
    GPTConfig(n_layers=1, width=32, n_heads=2, sequence=40, label_smoothing=0.1, ignore_index=7),
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_loss_and_gradients(config, record_property):
    model, generator = GPT(config), np.random.default_rng(0)
    parameters = model.init(0, np.float64)
    twin = Twin(config).double()
    assert {n for n, _ in twin.named_parameters()} == set(parameters)
    for name, p in parameters.items():
        p += generator.normal(0, 0.1, p.shape)
        twin.get_parameter(name).data = torch.from_numpy(p.copy())
    n = config.sequence - 3
    tokens, targets = generator.integers(0, config.vocabulary, (2, 2, n))
    loss, context = model.forward(parameters, tokens, targets, 1 / 64)
    gradients = {name: np.full_like(p, np.nan) for name, p in parameters.items()}
    model.backward(parameters, context, gradients)
    expected = functional.cross_entropy(
        twin(torch.from_numpy(tokens)).reshape(-1, config.vocabulary),
        torch.from_numpy(targets).reshape(-1),
        reduction="sum",
        ignore_index=config.ignore_index,
        label_smoothing=config.label_smoothing,
    )
    (expected / 64).backward()
    assert loss == pytest.approx(expected.item() / 64, rel=1e-10)
    worst = 0.0
    for name, actual in gradients.items():
        reference = twin.get_parameter(name).grad.numpy()
        worst = max(worst, np.abs(actual - reference).max() / np.abs(reference).max())
    print(f"largest relative error of a gradient: {worst:.1e}")
    assert worst < 1e-10
