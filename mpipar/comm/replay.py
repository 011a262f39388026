"""Planned calls, made again: say the same as before, and do the same if the peers do."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from os import sched_yield
from typing import TYPE_CHECKING, Any

from mpipar.comm.call import Array
from mpipar.comm.flags import ARRIVE, FIRST_WORD, INPUT, OUTPUT, STEP, WORDS
from mpipar.comm.meeting import Script
from mpipar.comm.plans import Plan

if TYPE_CHECKING:
    from mpipar.comm.node import NodeCommunicator

_YIELDS = 16
_STARTS = (FIRST_WORD, FIRST_WORD + WORDS)
_Act = Callable[[], None]


def again(comm: NodeCommunicator, plan: Plan, shown: Any) -> Any:
    """Make a planned call of any size.

    Parameters
    ----------
    comm : NodeCommunicator
        Whose.
    plan : Plan
        Of a call whose arrays are alive.
    shown : object
        What the caller gets.

    Returns
    -------
    object
        `shown`.
    """
    calls, flags = comm.calls, comm.flags
    comm.enter(plan.call)
    try:
        if calls.under_way:
            calls.drain()
        sequence = flags.sequence + 1
        if plan.raw is not None:
            flags.my_slots[sequence & 1][: plan.raw.nbytes] = plan.raw
        flags.arrive(plan.said)
        if not flags.reached(ARRIVE, sequence):
            calls.await_flag(plan.call, ARRIVE, sequence)
        _follow(comm, plan)
    finally:
        comm.door.leave()
    return shown


def _follow(comm: NodeCommunicator, plan: Plan) -> Script | None:
    """The rest of a planned call, after all have arrived; what was done, if it can be again."""
    calls, programs = comm.calls, comm.programs
    key = programs.heard(plan.path)
    script = plan.scripts.get(key)
    if script is None:
        calls.run(plan.call, programs.after_arrival(plan.call, plan.path, plan.scripts))
        return plan.scripts.get(key)
    for item in script:
        if item is not None:
            item[0](*item[1])
        else:
            calls.await_flag(plan.call, STEP, comm.flags.next_step())
    return script


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
        flags.arrive(plan.said)
        if not flags.reached(ARRIVE, sequence):
            calls.await_flag(call, ARRIVE, sequence)
        key = programs.heard(plan.path)
        if key not in plan.shown:
            found: list[list[Array] | None] = []
            calls.run(call, programs.collected_after_arrival(call, plan.said[0], found))
            plan.shown[key] = comm.as_shown(found[0], call)
        return plan.shown[key]
    finally:
        comm.drop_old_view()
        comm.door.leave()


def bound(comm: NodeCommunicator, plan: Plan, shown: Any) -> Callable[[], Any]:
    """A planned call with everything bound that does not change.

    Parameters
    ----------
    comm : NodeCommunicator
        Whose ranks run by themselves, on a processor that needs no fence.
    plan : Plan
        Of a call whose arrays are alive whenever it is made.
    shown : object
        What the caller gets.

    Returns
    -------
    callable
        Makes the call and returns `shown`.
    """
    calls, flags, said, raw = comm.calls, comm.flags, plan.said, plan.raw
    under_way, halted, written = calls.under_way, calls.halted, flags.written
    take, put_back = comm.door.tokens.pop, comm.door.tokens.append
    mine, peers, wait, code = flags.mine, flags.peers, _waiting(comm, plan), said[0]
    uses_slots = plan.path == "flags"
    placed = not uses_slots or said[2] >= 0  # else only this rank knows its arrays
    n_bytes = 0 if raw is None else raw.nbytes
    # by the parity of the call: where it is said, what is done, and at which places of the peers
    halves: list[tuple[Any, int, _Act | None, list[tuple[Any, int, int]]]] = [
        (slot[:n_bytes], start, None, [])
        for slot, start in zip(flags.my_slots, _STARTS, strict=True)
    ]

    def run() -> Any:
        if under_way or halted:
            return again(comm, plan, shown)
        try:
            take()
        except IndexError:  # says who is inside
            return again(comm, plan, shown)
        try:
            flags.sequence = sequence = flags.sequence + 1
            parity = sequence & 1
            slot, start, act, heard = halves[parity]
            if raw is not None:
                slot[:] = raw
            if written[parity] is not said:
                flags.write(parity, said)
            mine[ARRIVE] = sequence
            for line in peers:
                if line[ARRIVE] < sequence:
                    wait(line, ARRIVE, sequence)
                if line[start] != code:
                    act = None
            if placed:
                for line, source, target in heard:
                    if line[start + INPUT] != source or line[start + OUTPUT] != target:
                        act = None
            if act is not None:
                act()
                return shown
            script = _follow(comm, plan)
            if script is not None:
                places = [(e, e[start + INPUT], e[start + OUTPUT]) for e in peers]
                act = _act(comm, script, wait)
                for half in (parity,) if uses_slots else (0, 1):
                    halves[half] = (*halves[half][:2], act, places)
        finally:
            put_back(None)
        return shown

    return run


def _act(comm: NodeCommunicator, script: Script, wait: Callable[[Any, int, int], None]) -> _Act:
    """A script as one function."""
    flags = comm.flags
    mine, peers = flags.mine, flags.peers

    def step() -> None:
        flags.step = value = flags.step + 1
        mine[STEP] = value
        for line in peers:
            if line[STEP] < value:
                wait(line, STEP, value)

    items = [(step, ()) if item is None else item for item in script]
    if len(items) == 1:
        return partial(items[0][0], *items[0][1])

    def act() -> None:
        for function, arguments in items:
            function(*arguments)

    return act


def _waiting(comm: NodeCommunicator, plan: Plan) -> Callable[[Any, int, int], None]:
    """Wait for one peer: some looks, some yields, and then as every wait does."""
    calls, call, pending = comm.calls, plan.call, comm.host.pending
    spins, yields = range(comm.host.n_spins), range(_YIELDS)

    def wait(line: Any, word: int, value: int) -> None:
        for _ in spins:
            if line[word] >= value:
                return
        if not pending:
            for _ in yields:
                sched_yield()
                if line[word] >= value:
                    return
        calls.await_flag(call, word, value)

    return wait
