"""Planned calls, made again: say the same as before, and do the same if the peers do."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mpipar.comm.call import Array
from mpipar.comm.flags import ARRIVE, FIRST_WORD, STEP, WORDS
from mpipar.comm.plans import Plan

if TYPE_CHECKING:
    from mpipar.comm.node import NodeCommunicator


def again(comm: NodeCommunicator, plan: Plan) -> None:
    """Make a planned call of any size.

    Parameters
    ----------
    comm : NodeCommunicator
        Whose.
    plan : Plan
        Of a call whose arrays are alive.
    """
    calls, flags = comm.calls, comm.flags
    comm.enter(plan.call)
    try:
        if calls.under_way:
            calls.drain()
        sequence = flags.sequence + 1
        if plan.raw is not None:
            flags.my_slots[sequence & 1][: plan.raw.nbytes] = plan.raw
        flags.arrive((plan.code, plan.input_place, plan.output_place))
        if not flags.reached(ARRIVE, sequence):
            calls.await_flag(plan.call, ARRIVE, sequence)
        _follow(comm, plan)
    finally:
        comm.busy.release()


def _follow(comm: NodeCommunicator, plan: Plan) -> None:
    """The rest of a planned call, after all have arrived."""
    calls, programs = comm.calls, comm.programs
    script = plan.scripts.get(programs.heard())
    if script is None:
        calls.run(plan.call, programs.after_arrival(plan.call, plan.path, plan.scripts))
        return
    for item in script:
        if item is not None:
            item[0](*item[1])
        else:
            calls.await_flag(plan.call, STEP, comm.flags.next_step())


def views_again(comm: NodeCommunicator, plan: Plan) -> tuple[Array, ...] | None:
    """Show the arrays of all ranks again.

    Parameters
    ----------
    comm : NodeCommunicator
        Whose.
    plan : Plan
        Of an array in node memory.

    Returns
    -------
    tuple of ndarray or None
        The very same as before where all arrays are; None where a rank's is out of reach.
    """
    calls, flags, programs, call = comm.calls, comm.flags, comm.programs, plan.call
    comm.enter(call)
    try:
        if calls.under_way:
            calls.drain()
        sequence = flags.sequence + 1
        flags.arrive((plan.code, plan.input_place, -1))
        if not flags.reached(ARRIVE, sequence):
            calls.await_flag(call, ARRIVE, sequence)
        key = programs.heard()
        if key not in plan.shown:
            found: list[list[Array] | None] = []
            calls.run(call, programs.collected_after_arrival(call, plan.code, found))
            plan.shown[key] = comm.as_shown(found[0], call)
        return plan.shown[key]
    finally:
        comm.drop_old_view()
        comm.busy.release()


def small(comm: NodeCommunicator, plan: Plan) -> Callable[[], None]:
    """A planned call through slots, with everything bound that does not change.

    Parameters
    ----------
    comm : NodeCommunicator
        Whose.
    plan : Plan
        Of the path "flags", on a processor that needs no fence.

    Returns
    -------
    callable
        Makes the call.
    """
    calls, flags, call, raw = comm.calls, comm.flags, plan.call, plan.raw
    under_way, halted = calls.under_way, calls.halted
    acquire, release = comm.busy.acquire, comm.busy.release
    mine, peers, code, place = flags.mine, flags.peers, plan.code, plan.output_place
    slots = [slot[: 0 if raw is None else raw.nbytes] for slot in flags.my_slots]
    n_spins = range(comm.host.n_spins)
    scripts: list[Any] = [None, None]

    def run() -> None:
        if under_way or halted or not acquire(False):
            again(comm, plan)
            return
        try:
            flags.sequence = sequence = flags.sequence + 1
            parity = sequence & 1
            if raw is not None:
                slots[parity][:] = raw
            start = FIRST_WORD + WORDS * parity
            mine[start] = code
            mine[start + 1] = -1
            mine[start + 2] = place
            mine[0] = sequence
            script = scripts[parity]
            for line in peers:
                if line[0] < sequence:
                    for _ in n_spins:
                        if line[0] >= sequence:
                            break
                    else:
                        calls.await_flag(call, 0, sequence)
                if line[start] != code or line[start + 2] != place:
                    script = None
            if script is not None:
                for function, arguments in script:
                    function(*arguments)
                return
            _follow(comm, plan)
            if all(line[start] == code and line[start + 2] == place for line in peers):
                scripts[parity] = plan.scripts[comm.programs.heard()]
        finally:
            release()

    return run
