"""Planned calls, made again: say the same as before, and do the same if the peers do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os import sched_yield
from typing import TYPE_CHECKING, Any

from mpipar.comm.call import Array
from mpipar.comm.node.flags import ARRIVE, FIRST_WORD, INPUT, OUTPUT, STEP, WORDS
from mpipar.comm.node.meeting import Script
from mpipar.comm.node.plans import Half, Plan

if TYPE_CHECKING:
    from mpipar.comm.node.communicator import NodeCommunicator

_YIELDS = 16
_MAX_VIEWS = 32
_STARTS = (FIRST_WORD, FIRST_WORD + WORDS)


def again(comm: NodeCommunicator, plan: Plan) -> Any:
    """Make a planned call of any size.

    Parameters
    ----------
    comm : NodeCommunicator
        Whose.
    plan : Plan
        Of a call whose arrays are alive.

    Returns
    -------
    object
        What the plan shows.
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
    return plan.shown


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
        if key not in plan.views:
            found: list[list[Array] | None] = []
            calls.run(call, programs.collected_after_arrival(call, plan.said[0], found))
            if len(plan.views) >= _MAX_VIEWS:  # peers whose arrays lie elsewhere every time
                plan.views.clear()
            plan.views[key] = comm.as_shown(found[0], call)
        return plan.views[key]
    finally:
        comm.drop_old_view()
        comm.door.leave()


def replayer(comm: NodeCommunicator) -> Callable[[Plan], Any]:
    """`again` for a group whose ranks run by themselves on a processor that needs no fence.

    Everything that does not change is bound, and a plan is few objects: a call on arrays that
    were not used for long reads what it must know from memory, not from the cache.

    Parameters
    ----------
    comm : NodeCommunicator
        Whose.

    Returns
    -------
    callable
        Makes a planned call and returns what the plan shows.
    """
    calls, flags, wait = comm.calls, comm.flags, _waiting(comm)
    under_way, halted, written = calls.under_way, calls.halted, flags.written
    take, put_back = comm.door.tokens.pop, comm.door.tokens.append
    mine, peers, slots, words = flags.mine, flags.peers, flags.my_slots, flags.my_words
    silent = comm.programs.scratch.silent

    def run(plan: Plan) -> Any:
        if under_way or halted:
            return again(comm, plan)
        try:
            take()
        except IndexError:  # says who is inside
            return again(comm, plan)
        try:
            flags.sequence = sequence = flags.sequence + 1
            parity, raw, code = sequence & 1, plan.raw, plan.code
            if raw is not None:
                slots[parity][: raw.nbytes] = raw
            if written[parity] is not plan:
                written[parity] = plan
                words[parity][:] = plan.words
            mine[ARRIVE] = sequence
            start = _STARTS[parity]
            items, heard = plan.odd if parity else plan.even
            for line in peers:
                if line[ARRIVE] < sequence:
                    wait(plan, line, ARRIVE, sequence)
                if line[start] != code:
                    items = None
            if heard and heard != _places(peers, start):
                items = None
            if items is None:
                _learn(comm, plan, parity)
                return plan.shown
            for arguments in items:
                if arguments is not None:
                    silent(*arguments)
                    continue
                flags.step = value = flags.step + 1
                mine[STEP] = value
                for line in peers:
                    if line[STEP] < value:
                        wait(plan, line, STEP, value)
            return plan.shown
        finally:
            put_back(None)

    return run


def _places(lines: Sequence[Any], start: int) -> tuple[int, ...]:
    """Where the arrays of the peers lie, as they say."""
    if len(lines) == 1:
        return lines[0][start + INPUT], lines[0][start + OUTPUT]
    return tuple(line[start + word] for line in lines for word in (INPUT, OUTPUT))


def _learn(comm: NodeCommunicator, plan: Plan, parity: int) -> None:
    """The rest of a call that is new with these peers, kept for the next time."""
    flags = comm.flags
    script = _follow(comm, plan)
    if script is None:
        return
    silent = comm.programs.scratch.silent
    items = tuple(
        item and (item[1] if item[0] is silent else (item[0], *item[1])) for item in script
    )
    uses_slots = plan.path == "flags"
    if uses_slots and plan.said[OUTPUT] < 0:  # only each rank itself knows its arrays
        half: Half = (items, ())
    else:
        half = (items, _places(flags.peers, _STARTS[parity]))
    if parity or not uses_slots:
        plan.odd = half
    if not parity or not uses_slots:
        plan.even = half


def _waiting(comm: NodeCommunicator) -> Callable[[Plan, Any, int, int], None]:
    """Wait for one peer: some looks, some yields, and then as every wait does."""
    calls, pending = comm.calls, comm.host.pending
    spins, yields = range(comm.host.n_spins), range(_YIELDS)

    def wait(plan: Plan, line: Any, word: int, value: int) -> None:
        for _ in spins:
            if line[word] >= value:
                return
        if not pending:
            for _ in yields:
                sched_yield()
                if line[word] >= value:
                    return
        calls.await_flag(plan.call, word, value)

    return wait
