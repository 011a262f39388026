"""One program for a set of lazy arrays: run it, or trace it without data.

Only what the wanted arrays need is in the program. A reduction whose only reader is another one
of the same kind is fused with it: sums over dims into one sum, ``a + b + c`` into one pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mpipar.comm.arrays import accumulation_dtype
from mpipar.comm.call import ReduceOp
from mpipar.device_group.device import HostDevice, hops, move
from mpipar.device_group.lazy import LazyArray
from mpipar.errors import EmptyInput, UnsupportedArray
from mpipar.units import Bytes

_COMBINE = {
    ReduceOp.SUM: "add",
    ReduceOp.MEAN: "add",
    ReduceOp.PRODUCT: "multiply",
    ReduceOp.MIN: "minimum",
    ReduceOp.MAX: "maximum",
}
_REDUCE = {
    ReduceOp.SUM: "sum",
    ReduceOp.MEAN: "mean",
    ReduceOp.PRODUCT: "prod",
    ReduceOp.MIN: "min",
    ReduceOp.MAX: "max",
}


@dataclass
class Trace:
    """What a program does, or did.

    Parameters
    ----------
    n_kernels, n_copies : int
        Kernels, and copies over links; a hop by way of the host is two.
    link_bytes : mapping of (str, str) to int
        Bytes on each link, by the names of its ends.
    peak_bytes : mapping of str to int
        Most memory held at once on each device, by its name; temporaries inside one kernel and
        the memory of a `CupyDevice` in a run are not counted.
    """

    n_kernels: int = 0
    n_copies: int = 0
    link_bytes: Counter[tuple[str, str]] = field(default_factory=Counter)
    peak_bytes: dict[str, int] = field(default_factory=dict)

    @property
    def moved(self) -> Bytes:
        """Bytes on all links together."""
        return Bytes(self.link_bytes.total())

    def _copied(self, route: Sequence[tuple[str, str]], n_bytes: int) -> None:
        self.n_copies += len(route)
        for link in route:
            self.link_bytes[link] += n_bytes


@dataclass
class _Step:
    node: LazyArray
    inputs: tuple[LazyArray, ...]
    dims: tuple[int, ...] = ()
    left: tuple[int, ...] = ()
    dead: list[LazyArray] = field(default_factory=list)


def _order(wanted: Sequence[LazyArray]) -> list[LazyArray]:
    """Every array that is needed, inputs first; a walk without recursion."""
    order: list[LazyArray] = []
    seen: set[int] = set()
    stack = [(array, False) for array in reversed(wanted)]
    while stack:
        array, is_ready = stack.pop()
        if is_ready:
            order.append(array)
        elif id(array) not in seen:
            seen.add(id(array))
            stack.append((array, True))
            stack += [(a, False) for a in reversed(array.inputs)]
    return order


def _program(wanted: Sequence[LazyArray]) -> tuple[list[LazyArray], list[_Step]]:
    """Leaves, and steps in order, adjacent reductions fused."""
    if not wanted:
        raise EmptyInput("realize or trace", "got no arrays; at least 1 is needed")
    for array in wanted:
        if not isinstance(array, LazyArray):
            raise UnsupportedArray(f"lazy arrays are needed, got {type(array).__name__}")
    order = _order(wanted)
    readers = Counter(id(a) for array in order for a in array.inputs)
    readers.update(id(array) for array in wanted)
    steps: dict[int, _Step] = {}
    for array in order:
        if not array.inputs:
            continue
        options = array.options
        step = _Step(array, array.inputs, options.get("dims", ()), options.get("left", ()))
        inner = steps.get(id(array.inputs[0]))
        if inner is not None and readers[id(inner.node)] == 1 and _fuse(step, inner):
            del steps[id(inner.node)]
        steps[id(array)] = step
    program = list(steps.values())
    last = {id(a): (step, a) for step in program for a in (step.node, *step.inputs)}
    kept = {id(array) for array in wanted}
    for key, (step, array) in last.items():
        if key not in kept and array.inputs:
            step.dead.append(array)
    return [a for a in order if not a.inputs], program


def _fuse(outer: _Step, inner: _Step) -> bool:
    """Take the inner reduction into the outer one where both do the same."""
    op = outer.node.options.get("reduce_op")
    if outer.node.op != inner.node.op or op != inner.node.options.get("reduce_op"):
        return False
    if outer.node.op == "combine" and op is not ReduceOp.MEAN:
        outer.inputs = inner.inputs + outer.inputs[1:]
        return True
    if outer.node.op == "reduce":
        outer.dims = tuple(sorted({*inner.dims, *(inner.left[d] for d in outer.dims)}))
        outer.left = tuple(inner.left[d] for d in outer.left)
        outer.inputs = inner.inputs
        return True
    return False


def trace(*wanted: LazyArray) -> Trace:
    """What `realize` would do, without data and without doing it.

    Parameters
    ----------
    *wanted : LazyArray
        Arrays of any graph; placeholders are enough below them.

    Returns
    -------
    Trace
        Kernels, copies, bytes on each link, peak memory of each device.
    """
    leaves, program = _program(wanted)
    found = Trace()
    live: Counter[str] = Counter()
    peak: Counter[str] = Counter()
    owner = {id(leaf): leaf for leaf in leaves}
    views = Counter({id(leaf): 1 for leaf in leaves})  # a leaf is never given back
    for leaf in leaves:
        live[leaf.device.name] += leaf.nbytes
    peak.update(live)
    for step in program:
        node, name = step.node, step.node.device.name
        owner[id(node)] = owner[id(step.inputs[0])] if node.op == "view" else node
        views[id(owner[id(node)])] += 1
        if node.op == "copy":
            found._copied(hops(step.inputs[0].device, node.device), node.nbytes)
        elif node.op != "view":
            found.n_kernels += 1
        if node.op != "view":
            live[name] += node.nbytes
            peak[name] = max(peak[name], live[name])
        for dead in step.dead:
            memory = owner[id(dead)]
            views[id(memory)] -= 1
            if not views[id(memory)]:
                live[memory.device.name] -= memory.nbytes
    found.peak_bytes = dict(peak)
    return found


def realize(*wanted: LazyArray) -> Trace:
    """Compute arrays, all in one run; what is computed stays and is never computed again.

    Parameters
    ----------
    *wanted : LazyArray
        Arrays of any graph.

    Returns
    -------
    Trace
        What was done, as counted from the buffers that moved.

    Raises
    ------
    UnsupportedArray
        If a placeholder is below them.
    LayoutError
        If a device's capacity does not do; then nothing has changed.
    """
    leaves, program = _program(wanted)
    for leaf in leaves:
        if leaf.op == "placeholder":
            raise UnsupportedArray(f"{leaf!r} has no data: it can be traced only")
    devices = {a.device for a in (*leaves, *(step.node for step in program))}
    for device in devices:
        device.peak_bytes = device.in_use_bytes
    done = Trace()
    buffers = {id(leaf): leaf.buffer for leaf in leaves}
    for step in program:
        buffers[id(step.node)] = _act(step, [buffers[id(a)] for a in step.inputs], done)
        for dead in step.dead:
            del buffers[id(dead)]
    for array in wanted:
        array.buffer = buffers[id(array)]
    for array in wanted:
        array.op, array.inputs, array.options = "constant", (), {}
    done.peak_bytes = {device.name: device.peak_bytes for device in devices}
    return done


def _act(step: _Step, buffers: list[Any], done: Trace) -> Any:
    node, device = step.node, step.node.device
    if node.op == "view":
        start, stop, shape = node.options["start"], node.options["start"] + node.size, node.shape
        return device.view(buffers[0], lambda a: a.reshape(-1)[start:stop].reshape(shape))
    if node.op == "copy":
        source = step.inputs[0].device
        there, route = move(buffers[0], node.shape, node.dtype, source, device)
        done._copied(route, _n_bytes(there, device))
        return there
    out = device.empty(node.shape, node.dtype)
    device.call(_KERNELS[node.op](step), out, *buffers)
    done.n_kernels += 1
    return out


def _n_bytes(buffer: Any, device: HostDevice) -> int:
    """Bytes of a buffer as its owner sees them."""
    return int(device._array(buffer).nbytes)


Kernel = Callable[..., None]


def _elementwise(step: _Step) -> Kernel:
    options = step.node.options

    def kernel(xp: Any, out: Any, *arrays: Any) -> None:
        values: tuple[Any, ...] = arrays
        if "scalar" in options:
            values = (*arrays, options["scalar"])
        getattr(xp, options["name"])(*(values[::-1] if options.get("swapped") else values), out=out)

    return kernel


def _matmul(step: _Step) -> Kernel:
    return lambda xp, out, a, b: xp.matmul(a, b, out=out)


def _reduce(step: _Step) -> Kernel:
    op = step.node.options["reduce_op"]
    wide = accumulation_dtype(step.inputs[0].dtype, op)
    typed = {} if op in (ReduceOp.MIN, ReduceOp.MAX) else {"dtype": wide}

    def kernel(xp: Any, out: Any, x: Any) -> None:
        out[...] = getattr(xp, _REDUCE[op])(x, axis=step.dims, **typed).reshape(out.shape)

    return kernel


def _combine(step: _Step) -> Kernel:
    op = step.node.options["reduce_op"]
    wide = accumulation_dtype(step.inputs[0].dtype, op)

    def kernel(xp: Any, out: Any, *arrays: Any) -> None:
        total = out if out.dtype == wide else xp.empty(out.shape, wide)
        total[...] = arrays[0]
        for array in arrays[1:]:
            getattr(xp, _COMBINE[op])(total, array.astype(wide, copy=False), out=total)
        if op is ReduceOp.MEAN:
            xp.divide(total, len(arrays), out=total)
        if total is not out:
            out[...] = total

    return kernel


def _block(step: _Step) -> Kernel:
    dim, start = step.node.options["dim"], step.node.options["start"]
    where = (slice(None),) * dim + (slice(start, start + step.node.shape[dim]),)

    def kernel(xp: Any, out: Any, x: Any) -> None:
        out[...] = x[where]

    return kernel


def _concatenate(step: _Step) -> Kernel:
    dim = step.node.options["dim"]

    def kernel(xp: Any, out: Any, *arrays: Any) -> None:
        start = 0
        for array in arrays:
            stop = start + array.shape[dim]
            out[(slice(None),) * dim + (slice(start, stop),)] = array
            start = stop

    return kernel


_KERNELS: dict[str, Callable[[_Step], Kernel]] = {
    "elementwise": _elementwise,
    "matmul": _matmul,
    "reduce": _reduce,
    "combine": _combine,
    "block": _block,
    "concatenate": _concatenate,
}
