"""What the ranks must agree on before gradients travel: names, shapes, ties and what is frozen."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpipar.comm import Communicator, ReduceOp
from mpipar.comm.arrays import accumulation_dtype, as_given
from mpipar.comm.device.arrays import address, on_device
from mpipar.errors import (
    CollectiveMismatch,
    EmptyInput,
    ParallelismError,
    UnsupportedArray,
    rebuild,
)

Array = NDArray[Any]


@dataclass(frozen=True)
class Agreement:
    """The same on every rank, but for the memory of the views.

    Parameters
    ----------
    views : dict of str to ndarray
        NumPy views of the user's arrays, in rank 0's order.
    arrays : dict of str to str
        For each name the first name of the same memory.
    canonical : dict of str to str
        For each name the first name of the same logical parameter.
    frozen : frozenset of str
        Canonical names that get no gradient.
    """

    views: dict[str, Array]
    arrays: dict[str, str]
    canonical: dict[str, str]
    frozen: frozenset[str]


def agree(
    comm: Communicator,
    parameters: Mapping[str, Any],
    frozen: Iterable[str],
    tied: Iterable[Sequence[str]],
    bucket_bytes: int,
    allow_empty: bool = False,
) -> Agreement:
    """Check the arguments of `DataParallel` on every rank. Collective.

    Parameters
    ----------
    comm : Communicator
        The data-parallel group.
    parameters, frozen, tied, bucket_bytes, allow_empty
        As in `DataParallel`.

    Returns
    -------
    Agreement
        Equal on every rank.

    Raises
    ------
    ParallelismError
        On every rank, if one rank's arguments are wrong or differ from rank 0's.
    """

    def shapes() -> tuple[dict[str, Array], dict[str, str]]:
        if not isinstance(parameters, Mapping):
            raise UnsupportedArray(
                f"parameters are a {type(parameters).__name__}; a mapping of names to arrays would "
                "do, such as {'weight': array}"
            )
        views = {name: _writable(name, array) for name, array in parameters.items()}
        if not views and not allow_empty:
            raise EmptyInput("DataParallel", "no parameters")
        return views, {f"parameter {n!r}": f"{v.shape} {v.dtype.name}" for n, v in views.items()}

    views = _same(comm, shapes)
    order = comm.broadcast_json(list(views))
    views = {name: views[name] for name in order}

    def roles() -> tuple[Agreement, dict[str, str]]:
        arrays = _same_memory(views)
        canonical = _canonical_names(views, arrays, tied)
        still = frozenset(canonical[n] for n in _known(views, frozen, "frozen"))
        _refuse_overlaps({n: v for n, v in views.items() if canonical[n] not in still}, canonical)
        facts = {
            f"parameter {n!r}": ("frozen" if c in still else "trained")
            + (f" as a copy of {c!r}" if c != n else "")
            + (f" in the array of {arrays[n]!r}" if arrays[n] != n else "")
            for n, c in canonical.items()
        }
        return Agreement(views, arrays, canonical, still), {
            **facts,
            "bucket_bytes": str(bucket_bytes),
        }

    return _same(comm, roles)  # type: ignore[no-any-return]


def _same(comm: Communicator, make: Callable[[], tuple[Any, dict[str, str]]]) -> Any:
    """What this rank makes, after a check that all ranks made it with the same facts."""
    value: Any = None
    facts: dict[str, str] = {}
    error: ParallelismError | None = None
    try:
        value, facts = make()
    except ParallelismError as caught:
        error = rebuild(type(caught).__name__, f"on rank {comm.rank}: {caught}")
    digest = hashlib.blake2b(repr(sorted(facts.items())).encode(), digest_size=16).hexdigest()
    if len(set(comm.all_gather_json(error or digest))) == 1:
        return value
    first, *others = comm.all_gather_json(facts)
    raise CollectiveMismatch(
        next(
            f"{key} is {first.get(key, 'missing')} on rank 0 and {other.get(key, 'missing')} on "
            f"rank {rank}"
            for rank, other in enumerate(others, 1)
            for key in sorted({*first, *other})
            if first.get(key) != other.get(key)
        )
    )


def _writable(name: str, array: Any) -> Array:
    """A view of the user's array, through which it can be written: NumPy's, or of its device."""
    view = array
    if not isinstance(array, np.ndarray):
        detached = array.detach() if hasattr(array, "detach") else array
        try:
            if on_device(detached):
                return as_given(detached, name)  # type: ignore[no-any-return]
            view = np.from_dlpack(detached)
        except (AttributeError, TypeError, BufferError, RuntimeError) as error:
            raise UnsupportedArray(
                f"parameter {name!r} ({type(array).__name__}) has no host memory to share: {error}"
            ) from None
    if not view.flags.writeable:
        raise UnsupportedArray(
            f"parameter {name!r} is read-only, so rank 0's values cannot be copied into it; "
            "give a writable copy, for example numpy.array(parameter)"
        )
    if view.dtype.kind in "biu" or not view.dtype.isnative:
        raise UnsupportedArray(
            f"parameter {name!r} has dtype {view.dtype!r}: gradients need floating-point numbers "
            "in native byte order"
        )
    accumulation_dtype(view.dtype, ReduceOp.SUM)  # refuses what has no sum
    return view  # type: ignore[no-any-return]


def _known(views: Mapping[str, Array], names: Iterable[str], what: str) -> list[str]:
    found = [names] if isinstance(names, str) else list(names)
    if unknown := sorted(set(found) - set(views)):
        raise CollectiveMismatch(
            f"{what} names {', '.join(unknown)}, which is no parameter; one of {', '.join(views)}"
        )
    return found


def _same_memory(views: Mapping[str, Array]) -> dict[str, str]:
    """For each name the first name whose view is the very same."""
    seen: dict[tuple[Any, ...], str] = {}
    keys = {n: (address(v) if v.size else 0, v.shape, v.strides, v.dtype) for n, v in views.items()}
    return {n: seen.setdefault(keys[n], n) if v.size else n for n, v in views.items()}


def _canonical_names(
    views: Mapping[str, Array], arrays: Mapping[str, str], tied: Iterable[Sequence[str]]
) -> dict[str, str]:
    """For each name the first name of the same logical parameter."""
    order, canonical = list(views), dict(arrays)
    for group in tied:
        names = _known(views, group, "tied")
        kinds = {f"{views[n].shape} {views[n].dtype.name}" for n in names}
        if len(kinds) > 1:
            raise CollectiveMismatch(
                f"tied parameters {', '.join(names)} differ: {' and '.join(sorted(kinds))}"
            )
        heads = {canonical[n] for n in names}
        first = min(heads, key=order.index, default="")
        canonical.update({n: first for n, c in canonical.items() if c in heads})
    return canonical


def _refuse_overlaps(views: Mapping[str, Array], canonical: Mapping[str, str]) -> None:
    """Refuse parameters that share memory without being one view: both would be updated."""
    placed = sorted((*_bounds(v), n) for n, v in views.items() if v.size)
    for i, (_, stop, name) in enumerate(placed):
        for low, _, other in placed[i + 1 :]:
            if low >= stop:
                break
            if canonical[name] != canonical[other] and _share(views[name], views[other]):
                raise UnsupportedArray(
                    f"parameters {name!r} and {other!r} share memory but are not the same view, "
                    "so both would be updated; give one of them, or freeze one"
                )


def _share(a: Array, b: Array) -> bool:
    """Of arrays whose bounds meet; on a device that is enough."""
    return not isinstance(a, np.ndarray) or np.shares_memory(a, b)


def _bounds(view: Array) -> tuple[int, int]:
    """First byte of an array in memory, and the one behind its last."""
    reach = [(n - 1) * stride for n, stride in zip(view.shape, view.strides, strict=True)]
    start = address(view)
    stop = start + sum(max(0, r) for r in reach) + view.itemsize
    return start + sum(min(0, r) for r in reach), stop
