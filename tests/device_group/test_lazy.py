"""Lazy arrays: one run, nothing in vain, and a trace that tells it all before."""

import gc

import numpy as np
import pytest

from mpipar.comm import ReduceOp
from mpipar.device_group import (
    CupyDevice,
    DeviceGroup,
    Graph,
    HostDevice,
    SealedDevice,
    concatenate,
    realize,
    trace,
)
from mpipar.errors import EmptyInput, LayoutError, UnsupportedArray
from mpipar.topology import LinkCost, collective_cost

RANDOM = np.random.default_rng(7)
X, W1, B1, W2 = (RANDOM.standard_normal(s) for s in ((6, 8), (8, 16), (16,), (16, 5)))


def mlp(group, x, n):
    """Column-parallel, then row-parallel: one all-reduce."""
    w1, b1, w2 = (np.array_split(w, n, axis=a) for w, a in ((W1, 1), (B1, 0), (W2, 0)))
    copies = group.broadcast(x)
    hidden = [
        (copy @ group.put(w1[i], i) + group.put(b1[i], i)).maximum(0.0)
        for i, copy in enumerate(copies)
    ]
    return group.all_reduce([h @ group.put(w2[i], i) for i, h in enumerate(hidden)])


def test_tensor_parallel_mlp_over_four_devices():
    devices = [HostDevice(f"cpu{i}") for i in range(4)]
    group = DeviceGroup(devices)
    outputs = mlp(group, group.put(X), 4)
    planned = trace(*outputs)
    done = realize(*outputs)
    reference = np.maximum(X @ W1 + B1, 0) @ W2
    for output in outputs:
        np.testing.assert_allclose(output.numpy(), reference, rtol=1e-12, atol=1e-13)
    assert planned == done
    n_bytes = 6 * 5 * 8
    ring = collective_cost("all_reduce", "ring", 4, n_bytes, LinkCost(0, 0)).sent
    sent = {
        d.name: sum(b for (a, _), b in planned.link_bytes.items() if a == d.name) for d in devices
    }
    copies = 3 * X.nbytes
    # slices of 30 elements over 4 devices are 8, 8, 7 and 7
    assert sent["cpu0"] == copies + (22 + 3 * 8) * 8
    assert sent["cpu3"] == (23 + 3 * 7) * 8
    assert sum(sent.values()) == int(planned.moved) == copies + 4 * int(ring)
    again = realize(*outputs)
    assert (again.n_kernels, again.n_copies) == (0, 0)


def test_trace_needs_no_data_and_says_what_a_run_needs():
    devices = [HostDevice(f"cpu{i}") for i in range(2)]
    graph = Graph()
    a = graph.placeholder((1000, 1000), np.float64, devices[0])
    b = (a * 2.0).exp().to(devices[1])
    found = trace(b)
    # a stays, a * 2 makes room once its exponential is there
    assert found.peak_bytes == {"cpu0": 24_000_000, "cpu1": 8_000_000}
    assert devices[0].in_use_bytes == 0
    with pytest.raises(UnsupportedArray, match="no data"):
        b.numpy()
    small = HostDevice("small", 100)
    x = Graph().constant(np.ones(8), small)
    y = (x * 2.0) * 3.0
    with pytest.raises(LayoutError, match=r"64 bytes more do not fit, 64 of 100"):
        y.numpy()
    assert small.in_use_bytes == 64
    assert trace(y).peak_bytes["small"] == 192


def test_peak_of_trace_is_that_of_the_arena_with_views_and_blocks():
    cpu = HostDevice("cpu")
    graph = Graph()
    x = graph.constant(np.arange(24.0).reshape(4, 6), cpu)
    y = (x + 1.0).reshape(2, 12).block(0, 1, 2).reshape(12)
    z = concatenate([y, (x * 2.0).block(1, 0, 3).reshape(12)])
    planned, done = trace(z), realize(z)
    assert planned == done
    want = np.concatenate([np.arange(13.0, 25), (np.arange(24.0).reshape(4, 6) * 2)[:, :3].ravel()])
    np.testing.assert_array_equal(z.numpy(), want)
    del x, y
    gc.collect()
    assert cpu.in_use_bytes == 24 * 8


def test_dead_values_are_never_computed():
    cpu = HostDevice("cpu", 80)
    graph = Graph()
    x = graph.constant(np.ones(5), cpu)
    dead = x * 3.0 + x.exp()
    y = x * 2.0
    assert realize(y).n_kernels == 1  # with the dead values the arena would be too small
    assert dead.buffer is None


def test_adjacent_reductions_are_one():
    cpu, graph = HostDevice("cpu"), Graph()
    values = RANDOM.standard_normal((3, 4, 5))
    x = graph.constant(values, cpu)
    for op, numpy in ((ReduceOp.SUM, np.sum), (ReduceOp.MAX, np.max), (ReduceOp.MEAN, np.mean)):
        y = x.reduce(op, 1, keepdims=True).reduce(op, (1, 2)).reduce(op)
        assert trace(y).n_kernels == 1
        np.testing.assert_allclose(y.numpy(), numpy(values), rtol=1e-13)
        z = x.reduce(op, 2).reduce(op, 0)
        assert trace(z).n_kernels == 1
        np.testing.assert_allclose(z.numpy(), numpy(values, axis=(0, 2)), rtol=1e-13)
    assert trace(x.sum(0).reduce(ReduceOp.MAX)).n_kernels == 2
    first = x.sum(0)
    assert trace(first.sum(0), first).n_kernels == 2  # it is wanted itself


def test_a_chain_of_sums_is_one_pass_in_the_same_order():
    cpu, graph = HostDevice("cpu"), Graph()
    values = RANDOM.standard_normal((5, 9))
    a, b, c, d, e = (graph.constant(v, cpu) for v in values)
    y = a + b + c + d + e
    assert trace(y).n_kernels == 1
    np.testing.assert_array_equal(
        y.numpy(), ((values[0] + values[1]) + values[2] + values[3]) + values[4]
    )
    shared = a + b
    assert trace(shared + c, shared * d).n_kernels == 3
    double = c + d
    assert (double + double).numpy().tolist() == (2 * (values[2] + values[3])).tolist()


def test_a_hop_between_vendors_is_two_copies_by_way_of_the_host():
    red, green, blue = (
        SealedDevice("r", "red"),
        SealedDevice("g", "green"),
        SealedDevice("b", "red"),
    )
    cpu, graph = HostDevice("cpu"), Graph()
    x = graph.constant(np.arange(4.0), red)
    away = (x * 2.0).to(green)
    found = trace(away)
    assert dict(found.link_bytes) == {("r", "host"): 32, ("host", "g"): 32}
    assert found.n_copies == 2
    before = [device.n_copies for device in (red, green)]
    assert realize(away) == found
    assert [d.n_copies - n for d, n in zip((red, green), before, strict=True)] == [1, 1]
    assert away.numpy().tolist() == [0, 2, 4, 6]
    near = x.to(blue)
    assert (realize(near).n_copies, dict(trace(x.to(blue)).link_bytes)) == (1, {("r", "b"): 32})
    home = (away + 1.0).to(cpu)
    assert realize(home).n_copies == 1
    assert home.numpy().tolist() == [1, 3, 5, 7]


def test_the_sealed_double_refuses_the_host_and_a_group_works_on_it():
    devices = [SealedDevice("r", "red"), SealedDevice("g", "green"), HostDevice("cpu")]
    group = DeviceGroup(devices)
    shards = [group.put(np.arange(6.0) + i, i) for i in range(3)]
    for touch in (np.asarray, list, float, len, lambda x: x + 1, lambda x: x[0], lambda x: x.sum):
        with pytest.raises((UnsupportedArray, TypeError)):
            touch(shards[0].buffer)
    with pytest.raises(UnsupportedArray, match="was touched by g"):
        devices[1].view(shards[0].buffer, lambda a: a)
    with pytest.raises(UnsupportedArray, match="not its own"):
        devices[0].view(np.ones(2), lambda a: a)
    for got in group.realize(group.all_reduce(shards)):
        assert got.tolist() == [3, 6, 9, 12, 15, 18]


@pytest.mark.parametrize(
    ("make", "error", "why"),
    [
        (lambda x, y: x + y, LayoutError, r"\.to\(device\)"),
        (lambda x, y: x @ x, LayoutError, r"\(2, 3\) and \(2, 3\)"),
        (lambda x, y: x * x.reshape(3, 2), LayoutError, "do not broadcast"),
        (lambda x, y: x.reshape(4), LayoutError, "6 elements"),
        (lambda x, y: x.reshape(-1, 4), LayoutError, "6 elements"),
        (lambda x, y: x.block(0, 1, 3), LayoutError, "leaves dim 0"),
        (lambda x, y: x.block(0, 1, 1).reduce(ReduceOp.MAX), EmptyInput, "max over dims"),
        (lambda x, y: x + np.ones(3), UnsupportedArray, "Graph.constant"),
        (lambda x, y: bool(x), UnsupportedArray, "truth"),
        (lambda x, y: concatenate([]), EmptyInput, "no arrays"),
        (lambda x, y: concatenate([x, x.reshape(6)]), LayoutError, "array 1 is"),
        (lambda x, y: realize(), EmptyInput, "no arrays"),
        (lambda x, y: HostDevice("z", -1), ValueError, "capacity"),
    ],
)
def test_mistakes_are_refused_while_the_graph_is_built(make, error, why):
    graph, devices = Graph(), [HostDevice("a"), HostDevice("b")]
    x, y = (graph.constant(np.ones((2, 3)), d) for d in devices)
    with pytest.raises(error, match=why):
        make(x, y)


def test_operators_equal_numpy():
    graph, cpu = Graph(), HostDevice("cpu")
    a, b = RANDOM.standard_normal((2, 3, 4)), RANDOM.standard_normal((4, 1))
    x, y = graph.constant(a, cpu), graph.constant(b, cpu)
    found = [1.0 - x, x - 1.0, 2.0 / x, -x, x.tanh(), x @ y, x.reshape(6, -1), x * x, 3 + x]
    want = [1.0 - a, a - 1.0, 2.0 / a, -a, np.tanh(a), a @ b, a.reshape(6, -1), a * a, 3 + a]
    realize(*found)
    for got, expected in zip(found, want, strict=True):
        np.testing.assert_array_equal(got.numpy(), expected, strict=True)


@pytest.mark.gpu
def test_cupy_devices():
    group = DeviceGroup([CupyDevice(0), HostDevice("cpu")])
    for got in group.realize(group.all_reduce([group.put(np.arange(5.0), i) for i in range(2)])):
        assert got.tolist() == [0, 2, 4, 6, 8]
