"""Cases of collective calls, and what NumPy says each rank must get.

Every rank can make every rank's input from the seed of the case, so expected values never come
from the code under test.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from mpipar.comm import Communicator, Op, ReduceOp
from mpipar.comm.mpi.engine import Engine
from mpipar.comm.node.paths import Paths

Array = np.ndarray[Any, Any]

INTEGERS = [np.dtype(t) for t in ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8")]
SMALL_FLOATS = [np.dtype(t) for t in (np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e5m2)]
FLOATS = [*SMALL_FLOATS, *(np.dtype(t) for t in ("f4", "f8", "g"))]
COMPLEX = [np.dtype("c8"), np.dtype("c16")]
NUMBERS = [*INTEGERS, *FLOATS, *COMPLEX]
PAIR = np.dtype([("key", "i8"), ("weight", "f4")])
MOVED = [np.dtype(t) for t in ("?", "M8[ns]", "m8[s]", "S5", "U3")] + [PAIR]

IN_LAYOUTS = ("C", "F", "strided", "negative", "transposed", "read-only", "unaligned", "swapped")
OUT_LAYOUTS = (None, "C", "F", "strided", "negative", "transposed", "unaligned")
SHAPES = [(), (0,), (1,), (5,), (2, 3), (3, 0, 2), (4, 3, 2), (1, 5), (7, 1, 2), (1500,), (40, 41)]
MODES = (
    "as it is",
    "checked",
    "unchecked",
    "64-byte messages",
    "synchronous sends",
    "stage",
    "copy",
)
VERBS = (
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "all_to_all",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "send",
)


def in_mode(comm: Communicator, mode: str) -> Communicator:
    """A group of the same ranks that works in one of MODES; they differ on real ranks only."""
    group = comm.split(0, purpose=f"test {mode}")
    assert group is not None
    if hasattr(group, "inner") and mode not in ("as it is", "stage", "copy"):
        group = group.inner  # the MPI itself, not the memory of the node
    if mode in ("stage", "copy") and hasattr(group, "paths"):
        group.paths = Paths(forced=mode)
    if hasattr(group, "engine"):
        group.checked = mode == "checked"
        small = 64 if mode == "64-byte messages" else 2**30
        group.engine = Engine(group.mpi, small, mode == "synchronous sends")
    return group


def laid_out(values: Array, layout: str) -> Array:
    """The same values in another memory layout."""
    if layout == "F":
        return np.array(values, order="F")
    if layout == "strided":
        big = np.zeros([2 * s + 1 for s in values.shape], values.dtype)
        view = big[(..., *(slice(1, None, 2) for _ in values.shape))]
    elif layout == "negative":
        view = np.zeros(values.shape, values.dtype)[(..., *[slice(None, None, -1)] * values.ndim)]
    elif layout == "transposed":
        order = (*range(1, values.ndim), 0) if values.ndim else ()
        view = np.zeros([values.shape[d] for d in order], values.dtype).transpose(np.argsort(order))
    elif layout == "unaligned":
        raw = np.zeros(values.nbytes + 1, np.uint8)[1:]
        view = raw.view(values.dtype).reshape(values.shape)
    elif layout == "swapped":
        return (
            values.astype(values.dtype.newbyteorder(">")) if values.dtype.kind in "iufc" else values
        )
    else:
        view = np.zeros(values.shape, values.dtype)
    view[...] = values
    view.flags.writeable = layout != "read-only"
    return view


def values_of(seed: int, rank: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """One rank's input: small whole numbers, so that sums and products are exact in any order."""
    rng = np.random.default_rng([seed, rank])
    whole = rng.integers(1, 3, shape) * rng.choice([-1, 1], shape)
    if dtype == PAIR:
        made = np.zeros(shape, PAIR)
        made["key"], made["weight"] = whole, whole / 2
        return made
    if dtype.kind in "SU":
        return rng.integers(0, 999, shape).astype(dtype)
    if dtype.kind in "Mm":
        return rng.integers(0, 2**40, shape).view(dtype)
    if dtype.kind == "b":
        return np.asarray(whole > 0)
    if dtype.kind == "c":
        return np.asarray(whole + 1j * rng.integers(1, 3, shape)).astype(dtype)
    return np.asarray(np.abs(whole) if dtype.kind == "u" else whole).astype(dtype)


def same(got: Any, wanted: Array) -> bool:
    """Equal in type, shape and every element; NaN equals NaN."""
    if type(got) is not np.ndarray or got.dtype != wanted.dtype or got.shape != wanted.shape:
        return False
    if np.asarray(got == wanted).all():
        return True
    return wanted.dtype.kind in "fcV" and got.tobytes() == wanted.tobytes()


def reduced(inputs: list[Array], op: ReduceOp) -> Array:
    """NumPy's reduction over ranks, small floats through float32, means of integers in float64."""
    dtype = inputs[0].dtype
    if op is ReduceOp.MIN or op is ReduceOp.MAX:
        pick = np.minimum if op is ReduceOp.MIN else np.maximum
        total = inputs[0]
        for x in inputs[1:]:
            total = pick(total, x)
        return np.asarray(total)
    wide = np.dtype("f4") if dtype in SMALL_FLOATS else dtype
    if op is ReduceOp.MEAN and dtype.kind in "iu":
        wide = dtype = np.dtype("f8")
    stack = np.stack([x.astype(wide) for x in inputs])
    if op is ReduceOp.PRODUCT:
        return np.asarray(np.prod(stack, axis=0, dtype=wide)).astype(dtype)
    total = np.asarray(np.sum(stack, axis=0, dtype=wide))
    if op is ReduceOp.MEAN:
        total = np.asarray(total / wide.type(len(inputs)))
    return total.astype(dtype)


def spread(total: int, n: int) -> list[int]:
    """The first ranks take one more."""
    return [total // n + (r < total % n) for r in range(n)]


@dataclass(frozen=True)
class Case:
    """One call on all ranks. Layouts are one a rank; `counts` has a row a rank for all_to_all."""

    verb: str
    n: int
    seed: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    in_layouts: tuple[str, ...]
    out_layouts: tuple[str | None, ...]
    op: ReduceOp = ReduceOp.SUM
    root: int = 0
    dim: int = 0
    counts: Any = None
    deterministic: bool = False
    form: str = "plain"

    @property
    def axis(self) -> int:
        """`dim` from the front."""
        return self.dim % max(1, len(self.shape))

    def input(self, rank: int) -> Array:
        """Values of one rank's input."""
        shape = list(self.shape)
        if self.counts is not None and self.verb in ("all_gather", "gather"):
            shape[self.axis] = self.counts[rank]
        if self.counts is not None and self.verb == "all_to_all":
            shape[self.axis] = sum(self.counts[rank])
        return values_of(self.seed, rank, tuple(shape), self.dtype)

    def expected(self, rank: int) -> Array | None:
        """What one rank must get."""
        n = range(self.n)
        verb, inputs = self.verb, [np.atleast_1d(self.input(r)) for r in n]
        if verb in ("all_reduce", "reduce"):
            whole = reduced([self.input(r) for r in n], self.op)
            return whole if verb == "all_reduce" or rank == self.root else None
        if verb == "broadcast":
            return self.input(self.root)
        if verb == "send":
            return self.input((rank - 1) % self.n)
        if verb in ("all_gather", "gather"):
            whole = np.concatenate(inputs, self.axis)
            return whole if verb == "all_gather" or rank == self.root else None
        if verb == "all_to_all":
            parts = [_cut(x, self._sends(r, x), self.axis)[rank] for r, x in enumerate(inputs)]
            return np.concatenate(parts, self.axis)
        whole = reduced(inputs, self.op) if verb == "reduce_scatter" else inputs[self.root]
        sizes = self.counts or spread(whole.shape[self.axis], self.n)
        return _cut(whole, sizes, self.axis)[rank]

    def _sends(self, rank: int, x: Array) -> list[int]:
        return self.counts[rank] if self.counts else spread(x.shape[self.axis], self.n)


def _cut(whole: Array, sizes: list[int], axis: int) -> list[Array]:
    return [np.array(b) for b in np.split(whole, np.cumsum(sizes)[:-1], axis)]


def arguments_of(case: Case, rank: int) -> dict[str, Any]:
    """What the verb of a case takes beside the array."""
    verb, words = case.verb, {}
    if verb in ("all_reduce", "reduce", "reduce_scatter"):
        words |= {"op": case.op, "deterministic": case.deterministic}
    if verb in ("reduce", "gather", "scatter", "broadcast"):
        words["root"] = case.root
    if verb in ("reduce_scatter", "all_gather", "gather", "scatter", "all_to_all"):
        words["dim"] = case.dim
    if case.counts is not None and verb == "all_to_all":
        words["send_counts"] = case.counts[rank]
        if case.form != "plain" or case.seed % 2:
            words["recv_counts"] = [row[rank] for row in case.counts]
    elif case.counts is not None:
        words["counts"] = case.counts
    return words


def run_case(comm: Communicator, case: Case) -> None:
    """Make the call on this rank and compare with NumPy."""
    rank = comm.rank
    wanted, x = case.expected(rank), laid_out(case.input(rank), case.in_layouts[rank])
    kept = x.copy()
    layout, words = case.out_layouts[rank], arguments_of(case, rank)
    out = None
    if wanted is not None and layout is not None:
        out = laid_out(np.zeros(wanted.shape, wanted.dtype), layout)
    if case.verb == "send":
        got = _ring(comm, case, x, out, wanted)
    else:
        if out is not None:
            words["out"] = out
        if case.verb == "scatter" and rank != case.root:
            x = None
        got = _call(comm, case, x, words)
    if wanted is None:
        assert got is None, case
        return
    assert same(got, wanted), f"rank {rank}: got {got!r}, expected {wanted!r} of {case}"
    assert out is None or got is out, case
    assert x is None or same(np.asarray(x), np.asarray(kept)), f"the input was changed: {case}"


def _call(comm: Communicator, case: Case, x: Array | None, words: dict[str, Any]) -> Any:
    if case.form == "begin" and hasattr(comm, f"begin_{case.verb}"):
        return getattr(comm, f"begin_{case.verb}")(x, **words).wait()
    if case.form == "prepare" and case.verb != "scatter":
        can = x is not None and x.flags.c_contiguous and x.dtype.isnative
        call = comm.prepare(Op(case.verb), x, **words) if can else None
        for _ in range(2):
            got = call() if call is not None else getattr(comm, case.verb)(x, **words)
        return got
    return getattr(comm, case.verb)(x, **words)


def _ring(comm: Communicator, case: Case, x: Array, out: Any, wanted: Any) -> Any:
    """To the next rank, from the one before."""
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    into = np.zeros(wanted.shape, wanted.dtype) if out is None else out
    tag = case.seed % 100
    sent = comm.begin_send(x, after, tag)
    if case.form == "begin":
        got = comm.begin_recv(into, before, tag).wait()
    else:
        got = comm.recv(into, before, tag)
    sent.wait()
    return got


def random_case(rng: random.Random, n: int, verb: str | None = None) -> Case:
    """A case that no list would have."""
    verb = verb or rng.choice(VERBS)
    shape = rng.choice(SHAPES)
    is_reduction = "reduce" in verb
    dtype = rng.choice(NUMBERS if is_reduction else NUMBERS + MOVED)
    ops = [ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.PRODUCT]
    ops += [] if dtype.kind == "c" else [ReduceOp.MIN, ReduceOp.MAX]
    n_dims = max(1, len(shape))
    dim = rng.randrange(-n_dims, n_dims)
    extent = shape[dim] if shape else 1
    counts: Any = None
    if rng.random() < 0.5 and verb in ("reduce_scatter", "scatter"):
        counts = partition(rng, extent, n)
    elif rng.random() < 0.5 and verb in ("all_gather", "gather") and shape:
        counts = [rng.randrange(4) for _ in range(n)]
    elif verb == "all_to_all" and shape and rng.random() < 0.5:
        counts = [[rng.randrange(3) for _ in range(n)] for _ in range(n)]
    return Case(
        verb,
        n,
        rng.randrange(2**20),
        shape,
        dtype,
        tuple(rng.choice(IN_LAYOUTS) for _ in range(n)),
        tuple(rng.choice(OUT_LAYOUTS) for _ in range(n)),
        rng.choice(ops),
        rng.randrange(n),
        dim,
        counts,
        rng.random() < 0.3,
        rng.choice(["plain", "begin", "prepare"]),
    )


def partition(rng: random.Random, total: int, n: int) -> list[int]:
    """Sizes of n blocks, some of them empty, that sum to `total`."""
    stops = sorted(rng.randrange(total + 1) for _ in range(n - 1))
    return [b - a for a, b in zip([0, *stops], [*stops, total], strict=True)]


def uniform_case(verb: str, n: int, shape: tuple[int, ...], dtype: Any, layout: int = 0) -> Case:
    """A plain case; `layout` chooses another pair of layouts on each rank."""
    ins = tuple(IN_LAYOUTS[(layout + r) % len(IN_LAYOUTS)] for r in range(n))
    outs = tuple(OUT_LAYOUTS[(layout // 2 + 2 * r) % len(OUT_LAYOUTS)] for r in range(n))
    return Case(verb, n, 7, shape, np.dtype(dtype), ins, outs)
