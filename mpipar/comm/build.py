"""From what the user wrote to a flat `Call`, and from its flat result back to arrays.

Each function checks the arguments of one verb and returns the call together with a function that
gives the user's result once the call has ended. Nothing here communicates.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpipar.comm.arrays import (
    as_array,
    as_given,
    flat,
    is_plain,
    location_dtype,
    overlap,
    pack,
    result_dtype,
)
from mpipar.comm.call import Call, CommInfo, Cut, Op, ReduceOp
from mpipar.comm.device.arrays import library, on_device, package_of
from mpipar.comm.targets import (
    apart,
    block_sizes,
    check_dim,
    check_out,
    check_rank,
    dtype_name,
    joined,
    named_dtype,
    target,
)
from mpipar.errors import CountOutOfRange, EmptyInput, LayoutError, UnsupportedArray

Built = tuple[Call, Callable[[], Any]]
_LOCATION = (ReduceOp.MIN_LOCATION, ReduceOp.MAX_LOCATION)


def _nothing() -> None:
    return None


def all_reduce(
    info: CommInfo,
    x: Any,
    op: ReduceOp = ReduceOp.SUM,
    out: Any = None,
    deterministic: bool = False,
    root: int | None = None,
) -> Built:
    """Call of `all_reduce`; with a root, of `reduce`."""
    if type(op) is not ReduceOp:
        op = ReduceOp(op)
    array = as_array(x, "x") if type(x) is np.ndarray else as_given(x, "x")
    kind = Op.ALL_REDUCE if root is None else Op.REDUCE
    if root is not None:
        root = check_rank("root", root, info.world_size)
    dtype = result_dtype(array.dtype, op)
    if op in _LOCATION:
        dtype = location_dtype(dtype)
        if out is not None:
            raise UnsupportedArray(f"{op} returns two arrays and takes no out")
    receives = root is None or info.rank == root
    buffer, restore = (
        target(out, array.shape, dtype, array) if receives else target(None, (0,), dtype, array)
    )
    call = Call(
        kind,
        apart(flat(array), buffer),
        buffer,
        op,
        root,
        shape=array.shape,
        agreed=array.shape,
        deterministic=deterministic,
    )

    def finish() -> Any:
        if not receives:
            return None
        if op in _LOCATION:
            both = buffer.reshape(array.shape)
            return both["value"], both["rank"]
        return restore(buffer)

    return call, finish


def reduce_scatter(
    info: CommInfo,
    x: Any,
    op: ReduceOp = ReduceOp.SUM,
    dim: int = 0,
    counts: Sequence[int] | None = None,
    out: Any = None,
    deterministic: bool = False,
) -> Built:
    """Call of `reduce_scatter`."""
    if type(op) is not ReduceOp:
        op = ReduceOp(op)
    array = as_array(x, "x") if type(x) is np.ndarray else as_given(x, "x")
    array = array if array.ndim else array.reshape(1)
    dim = check_dim(array, dim)
    if op in _LOCATION:
        raise UnsupportedArray(f"{op} is not scattered: use all_reduce and slice")
    dtype = result_dtype(array.dtype, op)
    sizes = block_sizes(counts, array.shape[dim], info.world_size, "counts")
    inner = array.size // array.shape[dim] if array.shape[dim] else 0
    shape = (*array.shape[:dim], sizes[info.rank], *array.shape[dim + 1 :])
    buffer, restore = target(out, shape, dtype, array)
    packed = pack(array, dim, sizes)
    call = Call(
        Op.REDUCE_SCATTER,
        packed.copy() if overlap(packed, buffer) else packed,
        buffer,
        op,
        dim=dim,
        counts=tuple(s * inner for s in sizes),
        shape=array.shape,
        agreed=Cut(array.shape, dim, sizes),
        deterministic=deterministic,
    )
    return call, lambda: restore(buffer)


def all_gather(
    info: CommInfo,
    x: Any,
    dim: int = 0,
    counts: Sequence[int] | None = None,
    out: Any = None,
    root: int | None = None,
) -> Built:
    """Call of `all_gather`; with a root, of `gather`."""
    array = as_array(x, "x") if type(x) is np.ndarray else as_given(x, "x")
    array = array if array.ndim else array.reshape(1)
    dim = check_dim(array, dim)
    n, given = info.world_size, array.shape
    mine = given[dim]
    if root is not None:
        root = check_rank("root", root, n)
    sizes = (mine,) * n if counts is None else tuple(operator.index(c) for c in counts)
    if counts is not None and (len(sizes) != n or min(sizes) < 0 or sizes[info.rank] != mine):
        raise LayoutError(
            f"counts={list(sizes)} must be {n} sizes with {mine} at rank {info.rank}, since x has "
            f"shape {given} and is joined along dim {dim}"
        )
    joined_size = mine * n if counts is None else sum(sizes)
    receives = root is None or info.rank == root
    if len(given) == 1:  # the common case, on the path of small messages
        others, inner, shape, in_place = (), 1, (joined_size,), receives
    else:
        before, after = given[:dim], given[dim + 1 :]
        others = before + after
        inner = math.prod(others)
        shape = (*before, joined_size, *after)
        in_place = receives and (dim == 0 or all(k == 1 for k in before))
    if not receives:
        shape, out = (0,), None
    elif not in_place:
        check_out(out, shape, array.dtype, array)
    buffer, restore = target(out if in_place else None, shape, array.dtype, array)
    source = flat(array)
    call = Call(
        Op.ALL_GATHER if root is None else Op.GATHER,
        source.copy() if out is not None and overlap(source, buffer) else source,
        buffer,
        None,
        root,
        dim,
        sizes if inner == 1 else tuple([s * inner for s in sizes]),
        shape=given,
        agreed=Cut(others, dim, sizes),
    )

    def finish() -> Any:
        if not receives:
            return None
        return restore(buffer) if in_place else joined(buffer, shape, dim, sizes, out)

    return call, finish


def all_to_all(
    info: CommInfo,
    x: Any,
    dim: int = 0,
    send_counts: Sequence[int] | None = None,
    recv_counts: Sequence[int] | None = None,
    out: Any = None,
) -> Built:
    """Call of `all_to_all`."""
    array = as_array(x, "x") if type(x) is np.ndarray else as_given(x, "x")
    array = array if array.ndim else array.reshape(1)
    dim = check_dim(array, dim)
    n = info.world_size
    sends = block_sizes(send_counts, array.shape[dim], n, "send_counts")
    if recv_counts is None:
        recvs = (sends[info.rank],) * n
    else:
        recvs = tuple(operator.index(c) for c in recv_counts)
        if len(recvs) != n or min(recvs) < 0:
            raise LayoutError(f"recv_counts={list(recvs)} must be {n} sizes of at least 0")
    others = (*array.shape[:dim], *array.shape[dim + 1 :])
    inner = math.prod(others)
    shape = (*array.shape[:dim], sum(recvs), *array.shape[dim + 1 :])
    check_out(out, shape, array.dtype, array)
    in_place = dim == 0 or all(k == 1 for k in shape[:dim])
    buffer, restore = target(out if in_place else None, shape, array.dtype, array)
    packed = pack(array, dim, sends)
    call = Call(
        Op.ALL_TO_ALL,
        packed.copy() if overlap(packed, buffer) else packed,
        buffer,
        dim=dim,
        counts=tuple(s * inner for s in sends),
        recv_counts=tuple(r * inner for r in recvs),
        shape=array.shape,
        agreed=Cut(others, dim, sends if send_counts is None else None),
        uniform=send_counts is None,
    )

    def finish() -> Any:
        return restore(buffer) if in_place else joined(buffer, shape, dim, recvs, out)

    return call, finish


def broadcast(info: CommInfo, x: Any, root: int = 0, out: Any = None) -> Built:
    """Call of `broadcast`."""
    array = as_array(x, "x") if type(x) is np.ndarray else as_given(x, "x")
    root = check_rank("root", root, info.world_size)
    buffer, restore = target(out, array.shape, array.dtype, array)
    source = None
    if info.rank == root:
        source = buffer if out is x and is_plain(array) else apart(flat(array), buffer)
    call = Call(Op.BROADCAST, source, buffer, None, root, shape=array.shape, agreed=array.shape)
    return call, lambda: restore(buffer)


def scatter(info: CommInfo, x: Any, root: int, out: Any, header: dict[str, Any]) -> Built:
    """Call of `scatter`: the header (from the root) says shape, dtype, dim and sizes."""
    sizes, dim, whole = header["sizes"], header["dim"], tuple(header["shape"])
    shape = (*whole[:dim], sizes[info.rank], *whole[dim + 1 :])
    inner = math.prod((*whole[:dim], *whole[dim + 1 :]))
    dtype = named_dtype(header["dtype"])
    source = None
    like = library(header["device"]).empty(0, dtype) if header["device"] else None
    buffer, restore = target(out, shape, dtype, like)
    if info.rank == root:
        array = as_array(x, "x") if type(x) is np.ndarray else as_given(x, "x")
        source = pack(array if array.ndim else array.reshape(1), dim, sizes)
        if overlap(source, buffer):
            source = source.copy()
    call = Call(
        Op.SCATTER,
        source,
        buffer,
        None,
        root,
        dim,
        tuple(s * inner for s in sizes),
        shape=whole,
        agreed=Cut(whole, dim),
    )
    return call, lambda: restore(buffer)


def scatter_header(
    info: CommInfo, x: Any, root: int, dim: int, counts: Sequence[int] | None
) -> dict[str, Any] | None:
    """What every rank must know before a scatter; None away from the root."""
    root = check_rank("root", root, info.world_size)
    if info.rank != root:
        return None
    if x is None:
        raise EmptyInput("scatter", f"rank {root} is the root and gave no array")
    array = as_array(x, "x") if type(x) is np.ndarray else as_given(x, "x")
    array = array if array.ndim else array.reshape(1)
    dim = check_dim(array, dim)
    sizes = block_sizes(counts, array.shape[dim], info.world_size, "counts")
    device = package_of(array) if on_device(array) else ""
    return {
        "shape": array.shape,
        "dtype": dtype_name(array.dtype),
        "dim": dim,
        "sizes": sizes,
        "device": device,
    }


def send(info: CommInfo, x: Any, dest: int, tag: int = 0) -> Built:
    """Call of `send`."""
    array = as_array(x, "x") if type(x) is np.ndarray else as_given(x, "x")
    dest = check_rank("dest", dest, info.world_size)
    call = Call(
        Op.SEND,
        flat(array),
        peer=dest,
        tag=_tag(tag),
        shape=array.shape,
        agreed=array.shape,
    )
    return call, _nothing


def recv(info: CommInfo, out: Any, source: int, tag: int = 0) -> Built:
    """Call of `recv`."""
    source = check_rank("source", source, info.world_size)
    if type(out) is not np.ndarray:
        if not on_device(out):
            raise UnsupportedArray(f"out must be a NumPy array, got {type(out).__name__}")
        out = as_given(out, "out")
    buffer, restore = target(out, out.shape, out.dtype, out)
    call = Call(
        Op.RECV,
        output=buffer,
        peer=source,
        tag=_tag(tag),
        shape=out.shape,
        agreed=out.shape,
    )
    return call, lambda: restore(buffer)


def _tag(tag: Any) -> int:
    index = operator.index(tag)
    if not 0 <= index < 2**15:
        raise CountOutOfRange("tag", f"0..{2**15 - 1}", index)
    return index


def barrier(info: CommInfo, x: None) -> Built:
    """Call of `barrier`."""
    del info, x
    return Call(Op.BARRIER), _nothing
