"""Parallel layers against the whole layer in NumPy: values, gradients, bytes, memory."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from mpipar import nn
from mpipar.comm import Call, CommInfo, Communicator, ThreadWorld
from mpipar.comm.request import ENDED
from mpipar.errors import (
    CountOutOfRange,
    EmptyInput,
    LayoutError,
    OutOfRange,
    UnevenSplit,
    UnsupportedArray,
)
from mpipar.tensor_parallel import (
    ColumnParallel,
    Linear,
    RowParallel,
    SequenceParallelNorm,
    VocabParallelCrossEntropy,
    VocabParallelEmbedding,
    sum_replicated,
)
from tests.spy import Spy

CLOSE = {"rtol": 1e-12, "atol": 1e-12}
B, S, H, F = 2, 12, 24, 36  # divisible by 1, 2, 3 and 4


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape)


def own(x, comm, dim):
    return np.split(x, comm.size, dim)[comm.rank]


def run(layer, whole, x, grad):
    """Forward and backward of a layer; its output, input gradient and whole gradients."""
    p = layer.shard(whole)
    y, saved = layer.forward(p, x)
    to = layer.backward_input(p, saved, grad)
    gradients: dict[str, np.ndarray] = {}
    layer.backward_weight(saved, gradients)
    assert not saved
    assert {n: g.shape for n, g in gradients.items()} == layer.shapes()
    return y, to, layer.unshard(gradients)


def reference(x, weight, bias, grad):
    """The whole linear map, written out."""
    y = np.einsum("bsi,oi->bso", x, weight) + bias
    to = np.einsum("bso,oi->bsi", grad, weight)
    return y, to, {"weight": np.einsum("bso,bsi->oi", grad, x), "bias": grad.sum((0, 1))}


def compare(found, expected):
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, **CLOSE)


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("n_chunks", [1, 2, 5])
@pytest.mark.parametrize("keep_gathered", [False, True])
def test_column_parallel(comm, sequence_parallel, n_chunks, keep_gathered):
    whole = {"weight": normal(1, F, H), "bias": normal(2, F)}
    x, grad = normal(3, B, S, H), normal(4, B, S, F)
    y, to, gradients = reference(x, whole["weight"], whole["bias"], grad)
    layer = ColumnParallel(comm, H, F, bias=True, sequence_parallel=sequence_parallel,
                           n_chunks=n_chunks, keep_gathered=keep_gathered)  # fmt: skip
    given = own(x, comm, 1) if sequence_parallel else x
    found = run(layer, whole, given, own(grad, comm, 2))
    np.testing.assert_allclose(found[0], own(y, comm, 2), **CLOSE)
    np.testing.assert_allclose(found[1], own(to, comm, 1) if sequence_parallel else to, **CLOSE)
    compare(found[2], gradients)


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("n_chunks", [1, 2, 5])
def test_row_parallel(comm, sequence_parallel, n_chunks):
    whole = {"weight": normal(1, H, F), "bias": normal(2, H)}
    x, grad = normal(3, B, S, F), normal(4, B, S, H)
    y, to, gradients = reference(x, whole["weight"], whole["bias"], grad)
    layer = RowParallel(comm, F, H, bias=True, sequence_parallel=sequence_parallel,
                        n_chunks=n_chunks)  # fmt: skip
    given = own(grad, comm, 1) if sequence_parallel else grad
    found = run(layer, whole, own(x, comm, 2), given)
    np.testing.assert_allclose(found[0], own(y, comm, 1) if sequence_parallel else y, **CLOSE)
    np.testing.assert_allclose(found[1], own(to, comm, 2), **CLOSE)
    compare(found[2], gradients)


@pytest.mark.ranks(1, 2, 3, 4)
def test_gathered_output_and_split_input(comm):
    whole = {"weight": normal(1, F, H), "bias": normal(2, F)}
    x, grad = normal(3, B, S, H), normal(4, B, S, F)
    expected = reference(x, whole["weight"], whole["bias"], grad)
    for layer in (
        Linear(H, F, bias=True),
        ColumnParallel(comm, H, F, bias=True, gather_output=True),
        RowParallel(comm, H, F, bias=True, split_input=True),
    ):
        found = run(layer, whole, x, grad)
        np.testing.assert_allclose(found[0], expected[0], **CLOSE)
        np.testing.assert_allclose(found[1], expected[1], **CLOSE)
        compare(found[2], expected[2])


def test_the_next_piece_is_computed_while_one_is_under_way():
    def body(comm):
        order = []

        class Told(Spy):
            def submit(self, call):
                request = super().submit(call)
                order.append(f"begin {call.op}" if not call.blocking else str(call.op))
                wait = request.wait

                class Waited:
                    def wait(self):
                        order.append("wait")
                        request.finish = self.finish
                        return wait()

                return Waited() if not call.blocking else request

        layer = RowParallel(Told(comm), 4, 4, sequence_parallel=True, n_chunks=3)
        layer.forward(layer.shard({"weight": np.eye(4)}), np.ones((6, 2)))
        return order

    begin = "begin reduce_scatter"
    assert ThreadWorld(2).run(body)[0] == [begin, begin, "wait", begin, "wait", "wait"]


@pytest.mark.ranks(1, 2, 3)
def test_fused_qkv_gives_each_rank_whole_heads(comm):
    n_q, n_kv, width = 12, 6, 4
    layer = ColumnParallel.qkv(comm, H, n_q, n_kv, width, bias=True, prefix="qkv.")
    n_out = (n_q + 2 * n_kv) * width
    whole = {"qkv.weight": normal(1, n_out, H), "qkv.bias": normal(2, n_out)}
    x = normal(3, B, S, H)
    y, _ = layer.forward(layer.shard(whole), x)
    full = (x @ whole["qkv.weight"].T + whole["qkv.bias"]).reshape(B, S, -1, width)
    q, k, v = np.split(full, [n_q, n_q + n_kv], 2)
    expected = np.concatenate([own(part, comm, 2) for part in (q, k, v)], 2)
    np.testing.assert_allclose(y, expected.reshape(B, S, -1), **CLOSE)


def test_refusals():
    def body(comm):
        with pytest.raises(UnevenSplit, match=r"tp=1 or 3 would do"):
            ColumnParallel.qkv(comm, 576, 9, 3)
        with pytest.raises(UnevenSplit, match=r"tp=1 or 5 would do"):
            RowParallel(comm, 25, 4)
        with pytest.raises(LayoutError, match="several segments"):
            ColumnParallel(comm, 4, 8, segments=(4, 4), gather_output=True)
        with pytest.raises(CountOutOfRange, match="chunks"):
            RowParallel(comm, 4, 4, n_chunks=0)
        layer = RowParallel(comm, 4, 4, sequence_parallel=True)
        with pytest.raises(UnevenSplit, match="sequence=5"):
            layer.forward(layer.shard({"weight": np.eye(4)}), np.zeros((5, 2)))
        with pytest.raises(EmptyInput, match="ln"):
            sum_replicated(comm, {}, ["ln"])
        return True

    assert ThreadWorld(2).run(body) == [True, True]


# -- vocabulary ---------------------------------------------------------------------------------


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("vocabulary", [10, 3, 2])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_embedding(comm, vocabulary, sequence_parallel):
    table, grad = normal(1, vocabulary, H), normal(2, B, S, H)
    tokens = np.random.default_rng(3).integers(0, vocabulary, (B, S))
    layer = VocabParallelEmbedding(comm, vocabulary, H, sequence_parallel=sequence_parallel)
    p = layer.shard({"weight": table})
    assert p["weight"].shape == (-(-vocabulary // comm.size), H)
    y, saved = layer.forward(p, tokens)
    part = (lambda a: own(a, comm, 1)) if sequence_parallel else (lambda a: a)
    np.testing.assert_array_equal(y, part(table[tokens]))
    layer.backward_input(saved, np.ascontiguousarray(part(grad)))
    gradients: dict[str, np.ndarray] = {}
    layer.backward_weight(saved, gradients)
    expected = np.zeros_like(table)
    np.add.at(expected, tokens, grad)
    np.testing.assert_allclose(layer.unshard(gradients)["weight"], expected, **CLOSE)
    with pytest.raises(OutOfRange):
        layer.forward(p, np.full((B, S), vocabulary))


def written_loss(z, targets, ignore, e, z_loss):
    """Loss and gradient from the formulas, one row at a time."""
    loss, grad = 0.0, np.zeros_like(z)
    for index in np.ndindex(targets.shape):
        t, row = targets[index], z[index]
        if t == ignore:
            continue
        top = row.max()
        lse = np.log(np.exp(row - top).sum()) + top
        q = np.full(row.size, e / row.size)
        q[t] += 1 - e
        loss += float(lse - q @ row + z_loss * lse**2)
        grad[index] = np.exp(row - lse) * (1 + 2 * z_loss * lse) - q
    return loss, grad


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("vocabulary", [12, 10, 2])
@pytest.mark.parametrize(("e", "z_loss"), [(0.0, 0.0), (0.2, 0.0), (0.1, 0.01)])
def test_cross_entropy(comm, vocabulary, e, z_loss):
    z = 5 * normal(1, B, S, vocabulary) + 300  # only a shifted exponential survives this
    rng = np.random.default_rng(2)
    targets = rng.integers(0, vocabulary, (B, S))
    targets[0, :4] = 0  # a rank that owns no target of these rows
    targets[rng.random((B, S)) < 0.3] = -100
    head = VocabParallelCrossEntropy(comm, vocabulary, label_smoothing=e, z_loss=z_loss)
    padded = -(-vocabulary // comm.size) * comm.size
    wide = np.full((B, S, padded), 1e9)  # padding may hold anything
    wide[..., :vocabulary] = z
    logits = own(wide, comm, 2).copy()
    loss, saved = head.forward(logits, targets)
    expected, grad = written_loss(z, targets, -100, e, z_loss)
    assert loss == pytest.approx(expected, rel=1e-12)
    found = head.backward(saved, 0.5, out=logits)
    assert found is logits
    whole = comm.all_gather(found, dim=-1)
    np.testing.assert_allclose(whole[..., :vocabulary], 0.5 * grad, **CLOSE)
    assert not whole[..., vocabulary:].any()
    if not z_loss:
        assert loss == pytest.approx(nn.cross_entropy(z, targets, -100, e)[0], rel=1e-12)
    with pytest.raises(OutOfRange):
        head.forward(logits, np.full((B, S), vocabulary))


def test_gathered_logits_are_refused_and_logits_never_travel():
    def body(world):
        spy = Spy(world)
        head = VocabParallelCrossEntropy(spy, 64, label_smoothing=0.1)
        targets = np.zeros((2, 8), int)
        with pytest.raises(UnsupportedArray, match=r"logits of shape \(2, 8, 16\)"):
            head.forward(np.zeros((2, 8, 64)), targets)
        _, saved = head.forward(np.zeros((2, 8, 16)), targets)
        head.backward(saved)
        return spy.n_bytes

    # 4 numbers for each of 16 rows, in all-reduces of 2 (n-1)/n
    assert ThreadWorld(4).run(body) == [2 * 3 * 4 * 16 * 8 // 4] * 4


# -- sequence parallelism -----------------------------------------------------------------------


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("rms", [False, True])
def test_norm_gradients_are_summed_over_the_tokens_of_all_ranks(comm, rms):
    x, grad = normal(1, B, S, H), normal(2, B, S, H)
    whole = {"ln.weight": normal(3, H), "ln.bias": normal(4, H)}
    layer = SequenceParallelNorm(comm, H, rms=rms, prefix="ln.")
    p = layer.shard(whole)
    y, saved = layer.forward(p, own(x, comm, 1).copy())
    to = layer.backward_input(p, saved, own(grad, comm, 1).copy())
    gradients: dict[str, np.ndarray] = {}
    layer.backward_weight(saved, gradients)
    mean = 0.0 if rms else x.mean(-1, keepdims=True)
    xhat = (x - mean) / np.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-5)
    bias = 0.0 if rms else whole["ln.bias"]
    np.testing.assert_allclose(y, own(xhat * whole["ln.weight"] + bias, comm, 1), **CLOSE)
    names = ["ln.weight"] if rms else ["ln.weight", "ln.bias"]
    before = {name: g.copy() for name, g in gradients.items()}
    sum_replicated(comm, gradients, names)
    np.testing.assert_allclose(gradients["ln.weight"], (grad * xhat).sum((0, 1)), **CLOSE)
    if not rms:
        np.testing.assert_allclose(gradients["ln.bias"], grad.sum((0, 1)), **CLOSE)
    if comm.size > 1:  # without the sum they are not equal
        assert not np.allclose(before["ln.weight"], gradients["ln.weight"])
    step = 1e-6 * normal(5, B, S, H)
    moved, _ = layer.forward(p, own(x + step, comm, 1).copy())
    change = np.vdot(moved - y, own(grad, comm, 1))
    assert change == pytest.approx(np.vdot(to, own(step, comm, 1)), rel=1e-4)


def transformer_layer(comm, sequence_parallel, keep_gathered):
    """The four maps of a layer, in order; between the pairs stands what needs no peer."""
    way = {"sequence_parallel": sequence_parallel}
    column = {**way, "keep_gathered": keep_gathered}
    return [
        ColumnParallel.qkv(comm, H, 12, prefix="qkv.", **column),
        RowParallel(comm, H, H, prefix="proj.", **way),
        ColumnParallel(comm, H, 4 * H, prefix="up.", **column),
        RowParallel(comm, 4 * H, H, prefix="down.", **way),
    ]


@pytest.mark.parametrize("t", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("sequence_parallel", "keep", "factor"),
    [(False, True, 8), (True, True, 8), (True, False, 10)],
    ids=["tensor", "sequence", "sequence, gathered again"],
)
def test_bytes_of_a_layer_equal_the_formula(t, sequence_parallel, keep, factor):
    def body(world):
        spy = Spy(world)
        x = normal(1, B, S // t if sequence_parallel else S, H)
        trail = []
        for layer in transformer_layer(spy, sequence_parallel, keep):
            p = {name: normal(2, *shape) for name, shape in layer.shapes().items()}
            x, saved = layer.forward(p, x)
            if layer.prefix == "qkv.":
                x = np.ascontiguousarray(x[..., : H // t])  # attention: one of q, k, v is as wide
            trail.append((layer, p, saved))
        for layer, p, saved in reversed(trail):
            if layer.prefix == "qkv.":
                x = np.concatenate([x] * 3, -1)
            x = layer.backward_input(p, saved, x)
            layer.backward_weight(saved, {})
        return spy.n_bytes

    n_elements = factor * B * S * H * (t - 1) / t
    assert ThreadWorld(t).run(body) == [8 * n_elements] * t


# -- memory -------------------------------------------------------------------------------------


class Alone(Communicator):
    """One rank of n whose peers are not there: results of the right sizes, zeros."""

    def __init__(self, rank: int, n: int) -> None:
        super().__init__(CommInfo(rank, n))

    def submit(self, call: Call):
        if call.error is not None:
            raise call.error
        if call.output is not None and call.output is not call.input:
            call.output[...] = 0
        return ENDED


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_no_rank_holds_more_than_its_share(n, sequence_parallel):
    width, vocabulary, sequence = 512, 4096, 8
    comm, way = Alone(1, n), {"sequence_parallel": sequence_parallel}
    layers = [
        ColumnParallel.qkv(comm, width, 8, 4, prefix="qkv.", **way),
        RowParallel(comm, width, width, prefix="proj.", **way),
        ColumnParallel(comm, width, 8 * width, prefix="up.", segments=(4 * width,) * 2, **way),
        RowParallel(comm, 4 * width, width, prefix="down.", **way),
    ]
    embedding = VocabParallelEmbedding(comm, vocabulary, width, **way)
    for layer in [*layers, embedding]:
        whole = {name: int(np.prod(s.shape)) for name, s in layer.parameters.items()}
        p = {name: np.zeros(shape) for name, shape in layer.shapes().items()}
        assert {name: n * a.size for name, a in p.items()} == whole
        gradients = {name: np.zeros_like(a) for name, a in p.items()}
        tokens = np.zeros((1, sequence), int)
        rows = sequence // n if sequence_parallel else sequence
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        if layer is embedding:
            y, saved = layer.forward(p, tokens)
            layer.backward_input(saved, y)
        else:
            column = isinstance(layer, ColumnParallel)
            n_in = width if column else p[layer.prefix + "weight"].shape[1]
            y, saved = layer.forward(p, np.zeros((1, rows if column else sequence, n_in)))
            layer.backward_input(p, saved, y)
        layer.backward_weight(saved, gradients)
        peak = tracemalloc.get_traced_memory()[1] - before
        tracemalloc.stop()
        largest = 8 * max(whole.values())
        assert peak < largest / (2 * n), layer.prefix  # activations only


def test_memory_counting_sees_a_whole_weight():
    comm = Alone(1, 4)
    layer = RowParallel(comm, 512, 512)
    tracemalloc.start()
    layer.shard({"weight": np.zeros((512, 512))})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak > 8 * 512 * 512


def test_the_example_of_the_docs_runs():
    script = Path(__file__).parents[2] / "docs" / "examples" / "tensor_product.py"
    source = script.read_text()

    def body(comm):
        namespace = {"__name__": "example", "comm_of_this_rank": comm}
        told = source.replace("mpipar.init()", "comm_of_this_rank")
        exec(compile(told, str(script), "exec"), namespace)
        return namespace["shard"]["weight"].shape

    assert ThreadWorld(4).run(body) == [(16, 48)] * 4
    child = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False,
        env={"PYTHONPATH": str(script.parents[2]), "MPIPAR_SINGLETON": "1", "PATH": ""},
    )  # fmt: skip
    assert child.returncode == 0, child.stderr
    assert child.stdout == "rank 0 of 1: holds (64, 48) of (64, 48)\n"
