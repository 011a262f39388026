"""A transformer built from the layers alone: ten training steps at any degree are one training."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from mpipar import nn
from mpipar.comm import IdentityCommunicator
from mpipar.tensor_parallel import (
    ColumnParallel,
    RowParallel,
    SequenceParallelNorm,
    VocabParallelCrossEntropy,
    VocabParallelEmbedding,
    dropout_slope_shard,
    sum_replicated,
)

B, S, H, HEADS, V = 2, 12, 24, 12, 29  # 29 values are padded at every degree above 1


class Network:
    """Embedding, one pre-norm layer with attention and GELU, norm, tied head and loss."""

    def __init__(self, comm, sequence_parallel: bool, n_chunks: int = 1) -> None:
        way = {"sequence_parallel": sequence_parallel}
        maps = {**way, "n_chunks": n_chunks, "bias": True}
        self.comm, self.sp = comm, sequence_parallel
        self.embedding = VocabParallelEmbedding(comm, V, H, prefix="tok.", **way)
        self.norms = [SequenceParallelNorm(comm, H, prefix=f"ln{i}.", rms=i == 2) for i in range(3)]
        self.qkv = ColumnParallel.qkv(comm, H, HEADS, prefix="qkv.", **maps)
        self.proj = RowParallel(comm, H, H, prefix="proj.", **maps)
        self.up = ColumnParallel(comm, H, 4 * H, prefix="up.", keep_gathered=False, **maps)
        self.down = RowParallel(comm, 4 * H, H, prefix="down.", **maps)
        self.head = ColumnParallel(comm, H, V, prefix="tok.", padded=True, **way)
        self.loss = VocabParallelCrossEntropy(comm, V, label_smoothing=0.1, z_loss=1e-3)
        self.layers = [self.embedding, *self.norms, self.qkv, self.proj, self.up, self.down]

    def shard(self, whole):
        return {name: a for layer in self.layers for name, a in layer.shard(whole).items()}

    def unshard(self, local):
        return {name: a for layer in self.layers for name, a in layer.unshard(local).items()}

    def heads(self, x):
        return x.reshape(B, S, -1, H // HEADS).transpose(0, 2, 1, 3)

    def dropped(self, x, seed):
        """A mask of the whole stream, of which this rank has its tokens."""
        first = self.comm.rank * x.shape[1] if self.sp else 0
        part = (slice(None), slice(first, first + x.shape[1]), slice(None))
        generator = np.random.Generator(np.random.Philox(seed))
        return dropout_slope_shard(x, 0.2, generator, (B, S, H), part)

    def step(self, p, tokens, targets, seed):
        """Loss and gradients; what each line keeps is taken up in reverse below."""
        x, s_tok = self.embedding.forward(p, tokens)
        h, s_0 = self.norms[0].forward(p, x)
        qkv, s_qkv = self.qkv.forward(p, h)
        q, k, v = np.split(self.heads(qkv), 3, 1)
        a = np.empty(q.shape)
        _, lse = nn.causal_attention(q, k, v, out=a)
        y, s_proj = self.proj.forward(
            p, np.ascontiguousarray(a.transpose(0, 2, 1, 3)).reshape(B, S, -1)
        )
        mask = self.dropped(x, seed)
        x = x + y * mask
        h, s_1 = self.norms[1].forward(p, x)
        u, s_up = self.up.forward(p, h)
        slope = np.empty_like(u)
        y, s_down = self.down.forward(p, nn.gelu(u, slope=slope))
        x = x + y
        h, s_2 = self.norms[2].forward(p, x)
        logits, s_head = self.head.forward(p, h)
        loss, s_loss = self.loss.forward(logits, targets)

        g: dict[str, np.ndarray] = {}
        d = self.head.backward_input(p, s_head, self.loss.backward(s_loss, out=logits))
        dx = self.norms[2].backward_input(p, s_2, d)
        d = self.down.backward_input(p, s_down, dx) * slope
        dx = dx + self.norms[1].backward_input(p, s_1, self.up.backward_input(p, s_up, d))
        d = self.heads(self.proj.backward_input(p, s_proj, dx * mask))
        grads = [np.empty(q.shape) for _ in range(3)]
        nn.causal_attention_backward(
            np.ascontiguousarray(d),
            q,
            k,
            v,
            a,
            lse,
            grad_q=grads[0],
            grad_k=grads[1],
            grad_v=grads[2],
        )
        d = np.concatenate(grads, 1).transpose(0, 2, 1, 3).reshape(B, S, -1)
        dx = dx + self.norms[0].backward_input(p, s_0, self.qkv.backward_input(p, s_qkv, d))
        self.embedding.backward_input(s_tok, dx)
        for layer, saved in [
            (self.head, s_head), (self.norms[2], s_2), (self.down, s_down), (self.up, s_up),
            (self.norms[1], s_1), (self.proj, s_proj), (self.qkv, s_qkv), (self.norms[0], s_0),
        ]:  # fmt: skip
            layer.backward_weight(saved, g)
        tied = {"tok.weight": np.zeros_like(p["tok.weight"])}
        self.embedding.backward_weight(s_tok, tied)
        g["tok.weight"] += tied["tok.weight"]
        if self.sp:
            sum_replicated(self.comm, g, [n for norm in self.norms for n in norm.parameters])
        return loss, g


def parameters():
    one = Network(IdentityCommunicator(), False)
    rng = np.random.default_rng(0)
    return {n: 0.3 * rng.normal(size=s) for layer in one.layers for n, s in layer.shapes().items()}


def batches(n):
    tokens = np.random.default_rng(1).integers(0, V, (1, B, S + 1)).repeat(n, 0)
    targets = tokens[..., 1:].copy()
    targets[:, 0, :3] = -100
    return list(zip(tokens[..., :-1], targets, strict=True))


def train(network, n_steps=10):
    p = network.shard(parameters())
    curve = []
    for i, (tokens, targets) in enumerate(batches(n_steps)):
        loss, g = network.step(p, tokens, targets, seed=i)
        curve.append(loss)
        for name in p:
            p[name] -= 0.003 * g[name]
    return curve, network.unshard(g), network.unshard(p)


@functools.cache
def trained_on_one_rank():
    return train(Network(IdentityCommunicator(), False))


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize(
    ("sequence_parallel", "n_chunks"), [(False, 1), (True, 1), (False, 3), (True, 3)]
)
def test_ten_steps_at_any_degree_are_one_training(comm, sequence_parallel, n_chunks):
    curve, gradients, end = train(Network(comm, sequence_parallel, n_chunks))
    expected = trained_on_one_rank()
    np.testing.assert_allclose(curve, expected[0], rtol=1e-12)
    assert curve[-1] < curve[0]
    for found, wanted in ((gradients, expected[1]), (end, expected[2])):
        for name, value in wanted.items():
            error = np.linalg.norm(found[name] - value) / np.linalg.norm(value)
            assert error < 1e-12, name


def test_one_rank_gradients_equal_finite_differences():
    network, p = Network(IdentityCommunicator(), False), parameters()
    tokens, targets = batches(1)[0]
    _, g = network.step(p, tokens, targets, 0)
    rng = np.random.default_rng(2)
    for name, value in p.items():
        direction = rng.normal(size=value.shape)
        losses = [
            network.step({**p, name: value + sign * 1e-5 * direction}, tokens, targets, 0)[0]
            for sign in (1, -1)
        ]
        change = (losses[0] - losses[1]) / 2e-5
        assert np.vdot(g[name], direction) == pytest.approx(change, rel=1e-6, abs=1e-6), name
