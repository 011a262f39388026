"""A chain of small layers as pipeline stages, and its plain NumPy reference."""

import gc
import weakref
from contextlib import contextmanager

import numpy as np

from mpipar.errors import ScheduleError
from mpipar.pipeline_parallel import SCHEDULE_NAMES, build_schedule, split_backward

WIDTH = 3


def rows_of(n_microbatches):
    """Rows of each microbatch: three, and one in the last."""
    return [3] * (n_microbatches - 1) + [1]


def weights(n_stages, seed=0):
    """One square matrix a stage."""
    rng = np.random.default_rng(seed)
    return [rng.normal(0, 0.7, (WIDTH, WIDTH)) for _ in range(n_stages)]


def inputs(n_microbatches, seed=1):
    """Input and weight of the loss for each microbatch."""
    rng = np.random.default_rng(seed)
    return [tuple(rng.normal(size=(2, n, WIDTH))) for n in rows_of(n_microbatches)]


def reference(matrices, data):
    """Loss ``sum(c * y)`` of ``y = tanh(... tanh(x W0) ... Wn)`` and its gradients."""
    loss, gradients = 0.0, [np.zeros_like(w) for w in matrices]
    for x, c in data:
        kept = [x]
        for w in matrices:
            kept.append(np.tanh(kept[-1] @ w))
        loss += float((c * kept[-1]).sum())
        grad = c
        for s in reversed(range(len(matrices))):
            grad = grad * (1 - kept[s + 1] ** 2)
            gradients[s] += kept[s].T @ grad
            grad = grad @ matrices[s].T
    return loss, gradients


class Kept:
    """What a stage keeps of one microbatch; its death is seen."""

    def __init__(self, x, y):
        self.x, self.y, self.grad = x, y, None


class ChainStage:
    """One layer; `living` holds a weak reference to what is kept, on all stages of a rank."""

    def __init__(self, number, n_stages, matrix, data, living=None):
        self.first, self.last = number == 0, number == n_stages - 1
        self.matrix, self.data, self.rows = matrix, data, [len(x) for x, _ in data]
        self.kept, self.seen = {}, []
        self.living = weakref.WeakSet() if living is None else living
        self.peak = [0] if living is None else living.peak
        self.loss, self.gradient = 0.0, np.zeros_like(matrix)

    def input_spec(self, m):
        return None if self.first else ((self.rows[m], WIDTH), "float64")

    def output_spec(self, m):
        return None if self.last else ((self.rows[m], WIDTH), "float64")

    def forward(self, m, x):
        self.seen.append(m)
        x = self.data[m][0] if self.first else x
        y = np.tanh(x @ self.matrix)
        self.kept[m] = Kept(x, y)
        self.living.add(self.kept[m])
        self.peak[0] = max(self.peak[0], len(self.living))
        if self.last:
            self.loss += float((self.data[m][1] * y).sum())
            return None
        return y.copy()

    def backward_input(self, m, grad):
        kept = self.kept[m]
        kept.grad = (self.data[m][1] if self.last else grad) * (1 - kept.y**2)
        return None if self.first else kept.grad @ self.matrix.T

    def backward_weight(self, m):
        kept = self.kept.pop(m)
        self.gradient += kept.x.T @ kept.grad

    def backward(self, m, grad):
        grad = self.backward_input(m, grad)
        self.backward_weight(m)
        return grad


class Living(weakref.WeakSet):
    """What the stages of one rank keep, and the most of it at once."""

    def __init__(self):
        super().__init__()
        self.peak = [0]


def chain(schedule, rank, seed=0):
    """The stages of a rank."""
    n, living = schedule.n_stages, Living()
    data, matrices = inputs(schedule.n_microbatches), weights(n, seed)
    return {s: ChainStage(s, n, matrices[s], data, living) for s in schedule.stages_of(rank)}


def is_real(comm):
    """Whether the ranks are processes of an MPI."""
    return hasattr(getattr(comm, "inner", comm), "engine")


def microbatches(comm, is_synchronous=False):
    """How many microbatches are tried: fewer on real ranks, which are slower and tested again."""
    if not is_real(comm):
        return (1, 2, 3, 5, 8)
    return (2, 8) if is_synchronous else (5,)


def defined_schedules(n_ranks, sizes, names=SCHEDULE_NAMES):
    """Every schedule that is defined at these sizes, whole and with split backwards."""
    for name in names:
        for m in sizes:
            try:
                schedule = build_schedule(name, n_ranks, m)
            except ScheduleError:
                continue
            yield schedule
            if split_backward(schedule) != schedule:
                yield split_backward(schedule)


@contextmanager
def synchronous(comm, yes=True):
    """Let every send of this rank end only when it is received, on threads and on MPI."""
    inner = getattr(comm, "inner", comm)
    if hasattr(inner, "engine"):
        holder, name, value = inner.engine, "_isend", inner.engine.comm.Issend
    else:
        holder, name, value = inner._state.world, "synchronous_sends", True
    before = getattr(holder, name)
    if yes:
        setattr(holder, name, value)
    try:
        yield
        comm.barrier()
    finally:
        setattr(holder, name, before)
        gc.collect(0)
