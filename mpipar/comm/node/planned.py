"""How a node's verbs find what can be done again: by the arrays, their places, or their form."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from mpipar.comm.arrays import is_plain
from mpipar.comm.call import Array, Call, Op
from mpipar.comm.node.plans import (
    Form,
    Plan,
    address,
    immortal,
    is_direct,
    on_addresses,
    on_copies,
    shows,
)
from mpipar.comm.node.storage import NodeStorage

Key = tuple[Any, ...]
Arguments = dict[str, Any]
"""Of a verb beside `x`, in their order."""


class Planned(NodeStorage):
    """The part of a `NodeCommunicator` that makes calls again.

    A verb that comes again on the very same arrays finds its plan itself (`Plans.set_latest`).
    Otherwise `_run` looks for the form of the call: a small one goes through the form's arrays, a
    large one is known by where its arrays lie, which new arrays at the old places share.
    """

    def _run(self, op: Op, x: Any, /, **arguments: Any) -> Any:
        if op is Op.BARRIER:
            plan = self._plan(Call(op), None, None, None)
            self._plans.set_latest(op, None, None, (), plan)
            return self._replay(plan)
        if type(x) is not np.ndarray or "out" not in arguments or op is Op.SCATTER:
            return super()._run(op, x, **arguments)
        out, arguments["out"] = arguments["out"], None
        key = (op, id(x.dtype), x.shape, *map(id, arguments.values()))
        arguments["out"] = out
        form = self._plans.forms.get(key)
        if form is None:
            return self._learn(key, op, x, arguments)
        if form.shape is None:
            arguments["out"] = None  # it matters at the root only
        if form.plan is not None:
            return self._small(key, form, form.plan, op, x, arguments)
        if is_plain(x):
            return self._large(key, form, op, x, arguments)
        return super()._run(op, x, **arguments)

    def _learn(self, key: Key, op: Op, x: Array, arguments: Arguments) -> Any:
        """A call of a form that is not known; its second one is learnt from."""
        call, finish = self._built(op, x, dict(arguments))
        self.submit(call).wait()
        result = finish()
        if (
            self._plans.seen(key)
            and is_direct(call, x, result)
            and immortal(value for name, value in arguments.items() if name != "out")
        ):
            plan = None
            if self.programs.paths.choose(call) == "flags":
                own = on_copies(call)
                shown = None
                if result is not None and own.output is not None:
                    shown = own.output.reshape(result.shape)
                plan = self._plan(own, None, None, shown)
            self._plans.keep_form(key, Form(x, result, plan))
        return result

    def _small(
        self, key: Key, form: Form, through: Plan, op: Op, x: Array, arguments: Arguments
    ) -> Any:
        """A call that goes through slots, and through the form's arrays unless it is repeated."""
        out, plans = arguments["out"], self._plans
        if out is None:
            return form.through(through, x, None, self._replay)
        spot = (key, id(x), id(out))  # the plan keeps both alive
        plan = plans.known.get(spot)
        if plan is not None:
            return self._known(plan, op, x, arguments)
        repeated = plans.seen(spot, x) and is_plain(x)
        if form.takes(out) and not (repeated and plans.looks_up(op, x)):
            return form.through(through, x, out, self._replay)
        if not repeated:
            return super()._run(op, x, **arguments)
        return self._made(spot, op, x, arguments)

    def _large(self, key: Key, form: Form, op: Op, x: Array, arguments: Arguments) -> Any:
        """A call on arrays where they lie."""
        out = place = arguments["out"]
        fresh = out is None
        if fresh:
            out = place = arguments["out"] = form.new()
        elif not form.takes(out):
            _, place = self._results.get(id(out), (None, None))
            if not form.takes(place):
                return super()._run(op, x, **arguments)
        spot = (key, address(x), 0 if place is None else address(place))
        plan = self._plans.known.get(spot)
        if plan is None and not self._plans.seen(spot):
            return super()._run(op, x, **arguments)
        if plan is None:
            return self._made(spot, op, x, arguments)
        if not fresh:
            return self._known(plan, op, x, arguments)
        self._replay(plan)
        return out

    def _made(self, spot: Key, op: Op, x: Array, arguments: Arguments) -> Any:
        """The first call of a plan on these arrays, if they can be planned."""
        call, finish = self._built(op, x, dict(arguments))
        out = arguments["out"]
        if not is_direct(call, x, out):
            self.submit(call).wait()
            return finish()
        plan = self._plan(on_addresses(call), x, out, None)
        self._plans.keep(spot, plan)
        return self._known(plan, op, x, arguments)

    def _known(self, plan: Plan, op: Op, x: Array, arguments: Arguments) -> Any:
        """A planned call; the verb finds it by itself if these very arrays come again."""
        out = arguments["out"]
        if plan.x() is not x:
            plan.x = weakref.ref(x)
        elif out is not None and self._plans.looks_up(op, x):
            values = [id(v) if name == "out" else v for name, v in arguments.items()]
            self._plans.set_latest(op, x, out, values, plan)
        self._replay(plan)
        return out

    def _prepared(self, call: Call, finish: Callable[[], Any], out: Any) -> Callable[[], Any]:
        """The handle of `prepare`: the call is planned at once."""
        source, target = call.input, call.output
        x = target if source is None else source
        if target is None or target.size == 0 or not is_direct(call, x, target):
            return super()._prepared(call, finish, out)
        shown = finish() if out is None or shows(out, target) else None
        plan = self._plan(on_addresses(call), x, target, shown, hold=True)
        if shown is not None and shows(shown, target):
            return partial(self._replay, plan)  # nothing is left to do after a call

        def handle() -> Any:
            self._replay(plan)
            return finish()

        return handle

    def _plan(self, call: Call, x: Any, out: Any, shown: Any, hold: bool = False) -> Plan:
        programs = self.programs
        path = programs.paths.choose(call)
        said = (programs.code(call, path), *programs.places(call, path))
        return self._plans.add(Plan(call, path, said, x, out, shown, hold))
