"""Calls made again and again on the same arrays: what could be decided once is kept.

A plan holds no large array of the user: it knows them by weak reference and works on their
addresses, so it keeps no memory alive (and NumPy refuses to resize an array that is so known).
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpipar.comm.call import Array, Call, Op, ReduceOp
from mpipar.comm.flags import SLOT_BYTES
from mpipar.comm.meeting import Script

_MAX_PLANS = 4096
Latest = dict[int, tuple[Any, ...]]
"""By identity of the input: the other arguments of a verb's last call on it, and its plan."""
Half = tuple[tuple[Any, ...] | None, tuple[int, ...]]
"""What is done in a call of one parity (None where ranks must have come as far), if the peers'
arrays lie at these places."""


class Plan:
    """One call on the arrays that its key names; large ones are not kept alive by it.

    Parameters
    ----------
    call : Call
        On views of the arrays that do not own them.
    path : str
        Its algorithm.
    said : tuple of int
        What this rank says of it: signature, and where input and output lie.
    x, out : ndarray or None
        Whose identity is checked.
    shown : object
        What a repeated call returns, where that is kept.
    hold : bool
        Whether the arrays are kept alive; small ones always are.
    """

    __slots__ = (
        *("__weakref__", "call", "code", "dtype", "even", "held", "odd", "out", "path", "raw"),
        *("said", "scripts", "shape", "shown", "views", "words", "x"),
    )

    def __init__(
        self,
        call: Call,
        path: str,
        said: tuple[int, int, int],
        x: Array | None,
        out: Array | None,
        shown: Any = None,
        hold: bool = False,
    ) -> None:
        small = path == "flags"
        self.call, self.path, self.said, self.code = call, path, said, said[0]
        self.words = np.array(said, np.int64).tobytes()
        self.x: Callable[[], Any] = _nobody if x is None else weakref.ref(x)
        self.out: Callable[[], Any] = _nobody if out is None else weakref.ref(out)
        self.shape = None if x is None else x.shape
        self.dtype = None if x is None else x.dtype
        self.held = (x, out) if small or hold else None  # then their ids stay theirs
        self.shown = shown
        self.raw: memoryview | None = None
        if small and call.input is not None:
            self.raw = memoryview(call.input.view(np.uint8))  # type: ignore[arg-type]
        self.views: dict[Any, tuple[Array, ...] | None] = {}
        self.scripts: dict[Any, Script] = {}
        self.forget()

    def forget(self) -> None:
        """Do nothing as before: the lines of the group are others."""
        self.scripts.clear()
        self.even: Half = (None, ())
        self.odd: Half = (None, ())

    def fits(self, x: Any, out: Any) -> bool:
        """Whether these are still the same arrays, of the same shape and type."""
        if self.held is None and (self.x() is not x or self.out() is not out):
            return False
        return x is None or (x.dtype is self.dtype and x.shape == self.shape)


class _Ref(weakref.ref[Any]):
    """Of an array; when it dies, what was known under its identity is forgotten."""

    __slots__ = ("key", "latest")
    latest: Latest
    key: int


def _ref(array: Array, latest: Latest, key: int) -> _Ref:
    ref = _Ref(array, _forget)
    ref.latest, ref.key = latest, key
    return ref


def _forget(ref: Any) -> None:
    ref.latest.pop(ref.key, None)


class Plans:
    """The plans of a group, found by the identity of what the caller wrote.

    Parameters
    ----------
    latest : dict
        By verb and identity of the input: what was last called so, where small arrays are kept.
    """

    def __init__(self, latest: dict[Op, Latest]) -> None:
        self.known: dict[tuple[Any, ...], Plan] = {}
        self._seen: dict[tuple[Any, ...], Callable[[], Any]] = {}
        self._latest = latest
        self._made: weakref.WeakSet[Plan] = weakref.WeakSet()

    def clear(self) -> None:
        """Forget everything."""
        self.known.clear()
        self._seen.clear()
        for latest in self._latest.values():
            latest.clear()
        for plan in self._made:  # prepared handles live on
            plan.forget()

    def add(self, plan: Plan) -> Plan:
        """Know of a plan as long as somebody holds it."""
        self._made.add(plan)
        return plan

    def set_latest(self, op: Op, x: Any, arguments: Sequence[Any], plan: Plan) -> None:
        """Let the verb find a plan at once if it comes again just so.

        The verb does not look at the shape of `x`: so only where that changes nothing, or where
        `x` has one dimension, which the verb does look at.
        """
        latest = self._latest.get(op)
        out = plan.out()
        if latest is None or (x is not None and out is None):
            return
        if x is not None and x.ndim != 1 and op not in (Op.ALL_REDUCE, Op.BROADCAST):
            return
        if len(latest) >= _MAX_PLANS:
            latest.clear()
        if plan.held is None:
            plan.x, plan.out = _ref(x, latest, id(x)), _ref(out, latest, id(x))
        latest[id(x)] = (*(id(a) if a is out else a for a in arguments), plan.dtype, plan)

    def repeated(self, key: tuple[Any, ...], x: Any) -> bool:
        """Whether this array has come with this key before; then a plan is worth while."""
        if x is None:
            return True
        if not isinstance(x, np.ndarray):
            return False
        seen = self._seen.get(key)
        if seen is not None and seen() is x:
            return True
        if len(self._seen) >= _MAX_PLANS:
            self._seen.clear()
        self._seen[key] = weakref.ref(x)
        return False

    def keep(self, key: tuple[Any, ...], plan: Plan) -> None:
        """Remember a plan."""
        if len(self.known) >= _MAX_PLANS:
            self.known.pop(next(iter(self.known)))
        self.known[key] = plan


def planned_arrays(
    call: Call, finish: Callable[[], Any], x: Any, out: Any
) -> tuple[Call, Array | None] | None:
    """The call on arrays that it does not own, and the array to copy results from.

    Parameters
    ----------
    call : Call
        As built.
    finish : callable
        What gives the user's result.
    x, out : ndarray or None
        As the user wrote them.

    Returns
    -------
    tuple or None
        None where the call works on copies, or its result is more than its output.
    """
    if call.error is not None or call.op in (Op.SEND, Op.RECV, Op.SCATTER) or not call.uniform:
        return None
    if call.op is Op.BARRIER:
        return call, None
    if type(x) is not np.ndarray or not x.flags.c_contiguous or x.nbytes == 0:
        return None
    source, target, result = call.input, call.output, None
    if source is not None and _address(source) != _address(x):
        return None
    if out is not None:
        if target is None or target.nbytes == 0 or _address(target) != _address(out):
            return None
        target = unowned(target)
    elif (target is not None and target.nbytes > SLOT_BYTES) or (
        target is not None and (result := finish()) is not None and not shows(result, target)
    ):
        return None
    if source is not None:
        source = target if source is call.output else unowned(source)
    return call._replace(input=source, output=target), result


def immortal(values: Any) -> bool:
    """Whether these values may be known by their identity: it is never another's."""
    return all(
        value is None
        or value is True
        or value is False
        or type(value) is ReduceOp
        or (type(value) is int and -5 <= value <= 256)
        for value in values
    )


def unowned(array: Array) -> Array:
    """The same memory, which the caller keeps alive.

    Parameters
    ----------
    array : ndarray
        Contiguous, not empty.

    Returns
    -------
    ndarray
        Flat; holds nothing.
    """
    memory = (ctypes.c_char * array.nbytes).from_address(_address(array))
    return np.ndarray((array.size,), array.dtype, memory)  # type: ignore[arg-type]


def shows(result: Any, target: Array) -> bool:
    """Whether the result is the output seen in another shape."""
    return (
        type(result) is np.ndarray
        and result.size == target.size > 0
        and _address(result) == _address(target)
    )


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _nobody() -> None:
    return None
