"""Calls made again: what could be decided once is kept.

A `Form` is what calls with inputs of one shape and type have in common. Small ones pass through
arrays of the form's own, so that any array will do. A plan of a large call holds no array: it works
on addresses, and is for whatever arrays of that form lie there when it is made again.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpipar.comm.arrays import is_plain
from mpipar.comm.call import Array, Call, Op, ReduceOp
from mpipar.comm.node.meeting import Script

_MAX_PLANS, _MAX_FORMS = 4096, 512
Latest = dict[int, tuple[Any, ...]]
"""By identity of the input: the other arguments of a verb's last call on it, and its plan."""
Half = tuple[tuple[Any, ...] | None, tuple[int, ...]]
"""What is done in a call of one parity (None where ranks must have come as far), if the peers'
arrays lie at these places."""


class Plan:
    """One call on arrays at fixed places; large ones are not kept alive by it.

    Parameters
    ----------
    call : Call
        On views of the arrays that do not own them.
    path : str
        Its algorithm.
    said : tuple of int
        What this rank says of it: signature, and where input and output lie.
    x, out : ndarray or None
        As the user wrote them; small ones are kept alive.
    shown : object
        What a repeated call returns, where that is kept.
    hold : bool
        Whether the arrays are kept alive; small ones always are.
    """

    __slots__ = (
        *("__weakref__", "call", "code", "dtype", "even", "held", "odd", "path", "raw", "said"),
        *("scripts", "shown", "views", "words", "x"),
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


class Form:
    """What calls of one verb on inputs of one shape and type have in common.

    Parameters
    ----------
    x : ndarray
        One of the inputs.
    result : ndarray or None
        What came of it, None away from a root.
    plan : Plan or None
        On arrays of its own, for small messages.
    """

    __slots__ = ("held", "of", "plan", "shape", "shelf")

    def __init__(self, x: Array, result: Array | None, plan: Plan | None) -> None:
        self.held, self.plan = x.dtype, plan  # its identity stays its own
        self.shape = None if result is None else result.shape
        self.of = None if result is None else result.dtype
        source = None if plan is None else plan.call.input
        self.shelf = None if source is None else source.reshape(x.shape)

    def new(self) -> Array | None:
        """An array for the result."""
        return None if self.shape is None else np.empty(self.shape, self.of)

    def takes(self, out: Any) -> bool:
        """Whether the result can be written there as it is."""
        return (
            type(out) is np.ndarray
            and out.dtype is self.of
            and out.shape == self.shape
            and out.flags.carray
        )

    def through(
        self, plan: Plan, x: Array, out: Array | None, replay: Callable[[Plan], Any]
    ) -> Any:
        """Make a small call by way of the form's own arrays; `x` may have any layout."""
        if self.shelf is not None:
            np.copyto(self.shelf, x)
        result = replay(plan)
        if out is None:
            return None if result is None else result.copy()
        out[...] = result
        return out


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
    """The forms and plans of a group.

    Parameters
    ----------
    latest : dict
        By verb and identity of the input: what was last called so, where small arrays are kept.
    """

    def __init__(self, latest: dict[Op, Latest]) -> None:
        self.forms: dict[tuple[Any, ...], Form] = {}
        self.known: dict[tuple[Any, ...], Plan] = {}
        self._seen: dict[tuple[Any, ...], Callable[[], Any]] = {}
        self._latest = latest
        self._made: weakref.WeakSet[Plan] = weakref.WeakSet()

    def clear(self) -> None:
        """Forget everything."""
        self.forms.clear()
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

    def set_latest(self, op: Op, x: Any, out: Any, values: Sequence[Any], plan: Plan) -> None:
        """Let the verb find a plan at once if it comes again on these very arrays.

        Parameters
        ----------
        op : Op
            The verb, of those that `looks_up` names for `x`.
        x, out : ndarray or None
            As the user wrote them.
        values : sequence
            The verb's arguments in their order, with the identity of `out` in its place.
        plan : Plan
            What it shall do.
        """
        latest, known_by = self._latest[op], id(x)
        if len(latest) >= _MAX_PLANS:
            latest.clear()
        refs = None
        if plan.held is None and x is not None:
            refs = _ref(x, latest, known_by), _ref(out, latest, known_by)
        latest[known_by] = (*values, plan.dtype, plan, refs)

    def looks_up(self, op: Op, x: Any) -> bool:
        """Whether a verb looks for a plan of `x` by itself.

        It does not look at the shape: so only where that changes nothing, or for one dimension.
        """
        return op in self._latest and (x.ndim == 1 or op in (Op.ALL_REDUCE, Op.BROADCAST))

    def seen(self, spot: tuple[Any, ...], x: Any = None) -> bool:
        """Whether this has come before; with an array, whether with this very one."""
        before = self._seen.get(spot)
        if before is not None and (x is None or before() is x):
            return True
        if len(self._seen) >= _MAX_PLANS:
            self._seen.clear()
        self._seen[spot] = _nobody if x is None else weakref.ref(x)
        return False

    def keep(self, spot: tuple[Any, ...], plan: Plan) -> None:
        """Remember a plan."""
        if len(self.known) >= _MAX_PLANS:
            self.known.pop(next(iter(self.known)))
        self.known[spot] = plan

    def keep_form(self, key: tuple[Any, ...], form: Form) -> None:
        """Remember a form."""
        if len(self.forms) >= _MAX_FORMS:
            self.forms.pop(next(iter(self.forms)))
        self.forms[key] = form


def is_direct(call: Call, x: Any, result: Any) -> bool:
    """Whether a call works on the user's arrays themselves, so that it can be planned.

    Parameters
    ----------
    call : Call
        As built.
    x : ndarray
        Its input.
    result : ndarray or None
        What the user gets; None away from a root.

    Returns
    -------
    bool
        False where the call works on copies, or its result is more than its output.
    """
    if call.error is not None or call.op in (Op.SEND, Op.RECV, Op.SCATTER) or not call.uniform:
        return False
    if type(x) is not np.ndarray or not is_plain(x) or x.nbytes == 0:
        return False
    if call.input is not None and address(call.input) != address(x):
        return False
    if result is None:
        return call.output is None or call.output.size == 0
    return call.output is not None and shows(result, call.output)


def on_addresses(call: Call) -> Call:
    """The same call on views of the memory that keep nothing alive.

    Parameters
    ----------
    call : Call
        On NumPy arrays.

    Returns
    -------
    Call
        Its arrays are the caller's to keep.
    """
    source, target = call.input, call.output
    if target is not None and target.size:
        target = unowned(target)
    if source is not None:
        source = target if source is call.output else unowned(source)
    return call._replace(input=source, output=target)


def on_copies(call: Call) -> Call:
    """The same call on new arrays."""
    source, target = call.input, call.output
    return call._replace(
        input=None if source is None else np.empty_like(source),
        output=None if target is None else np.empty_like(target),
    )


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
    memory = (ctypes.c_char * array.nbytes).from_address(address(array))
    return np.ndarray((array.size,), array.dtype, memory)  # type: ignore[arg-type]


def shows(result: Any, target: Array) -> bool:
    """Whether the result is the output seen in another shape."""
    return (
        type(result) is np.ndarray
        and result.size == target.size > 0
        and address(result) == address(target)
    )


def address(array: Array) -> int:
    """Where the first element lies in this process."""
    found: int = array.__array_interface__["data"][0]
    return found


def _nobody() -> None:
    return None
