"""Every interleaving of the flag exchange: in a model of memory, and of the code itself."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest

from mpipar.comm import Communicator, ThreadWorld

Step = tuple[Any, ...]


def protocol(kinds: Sequence[str], fault: str = "") -> list[Step]:
    """What one rank does, access by access: w(ord), read (what must be seen), await, fence.

    A small call puts its data into a slot; a large one leaves it in its array, which is read by the
    peer and overwritten by its owner when the call has ended. A description that stands there
    already, from two calls before, is not written again.
    """
    steps: list[Step] = []
    written: dict[int, int] = {}
    n_steps = 0
    for s, kind in enumerate(kinds, 1):
        side = 0 if fault == "one slot" else s % 2
        data = f"slot{side}" if kind == "small" else "array"
        code = 1 if kind == "small" else 2
        write: list[Step] = [("w", data, s)]
        if written.get(side) != code and not (fault == "said once" and side in written):
            write.append(("w", f"said{side}", code))
            written[side] = code
        publish: list[Step] = [("w", "arrive", s)]
        if fault == "published first":
            publish, write = write, publish  # type: ignore[assignment]
        steps += [*write, ("fence",), *publish, ("await", "arrive", s)]
        steps += [("r", f"said{side}", code), ("r", data, s)]
        if kind == "large" and fault != "no exit":
            n_steps += 1
            steps += [("fence",), ("w", "step", n_steps), ("await", "step", n_steps)]
    return [s for s in steps if s != ("fence",)] if fault == "no fence" else steps


def wrong_or_stuck(kinds: Sequence[str], order: str, fault: str = "") -> str | None:
    """Look at every interleaving of two ranks; None if none goes wrong.

    Stores wait in a buffer before peers see them: in order on x86, in any order on a "weak"
    machine, where a fence empties the buffer.
    """
    program = protocol(kinds, fault)
    names = sorted({s[1] for s in program if s[0] in "wr"} | {"arrive", "step"})
    place = {name: i for i, name in enumerate(names)}
    start = ((0, 0), ((), ()), ((0,) * len(names),) * 2)
    seen, todo = {start}, [start]
    while todo:
        pcs, buffers, memory = todo.pop()
        after = []
        for me, peer in ((0, 1), (1, 0)):
            mine = buffers[me]
            n_able = min(len(mine), 1) if order == "x86" else len(mine)
            for i in range(n_able):  # a store becomes visible
                if any(mine[j][0] == mine[i][0] for j in range(i)):
                    continue  # stores to one word keep their order
                word, value = mine[i]
                line = (*memory[me][:word], value, *memory[me][word + 1 :])
                after.append((pcs, _with(buffers, me, mine[:i] + mine[i + 1 :]),
                              _with(memory, me, line)))  # fmt: skip
            if pcs[me] == len(program):
                continue
            step, further = program[pcs[me]], _with(pcs, me, pcs[me] + 1)
            if step[0] == "w":
                buffer = (*mine, (place[step[1]], step[2]))
                after.append((further, _with(buffers, me, buffer), memory))
            elif step[0] == "fence":
                if not mine:
                    after.append((further, buffers, memory))
            elif step[0] == "await":
                if memory[peer][place[step[1]]] >= step[2]:
                    after.append((further, buffers, memory))
            elif memory[peer][place[step[1]]] != step[2]:
                return f"{step} of rank {me} saw {memory[peer][place[step[1]]]}"
            else:
                after.append((further, buffers, memory))
        if not after and pcs != (len(program),) * 2:
            return f"stuck at {pcs}"
        fresh = [state for state in after if state not in seen]
        seen.update(fresh)
        todo += fresh
    return None


def _with(pair: tuple[Any, Any], index: int, value: Any) -> Any:
    return (value, pair[1]) if index == 0 else (pair[0], value)


@pytest.mark.parametrize("order", ["x86", "weak"])
@pytest.mark.parametrize("kinds", list(product(["small", "large"], repeat=3)))
def test_no_interleaving_of_three_calls_reads_wrong_data(kinds: Any, order: str) -> None:
    assert wrong_or_stuck(kinds, order) is None


@pytest.mark.parametrize(
    ("fault", "kinds", "order"),
    [
        ("one slot", ("small", "small", "small"), "x86"),
        ("published first", ("small", "small", "small"), "x86"),
        ("said once", ("small", "small", "large"), "x86"),
        ("no exit", ("large", "large", "large"), "x86"),
        ("no fence", ("small", "small", "small"), "weak"),
    ],
)
def test_the_model_catches_planted_faults(fault: str, kinds: Any, order: str) -> None:
    assert wrong_or_stuck(kinds, order, fault) is not None


class _Schedule:
    """Chooses who runs next by a list of choices; longer runs choose the first."""

    def __init__(self, choices: list[int]) -> None:
        self.choices, self.taken, self.widths = choices, [], []  # type: ignore[var-annotated]

    def choice(self, able: Sequence[int]) -> int:
        at = len(self.taken)
        pick = self.choices[at] if at < len(self.choices) else 0
        self.taken.append(pick)
        self.widths.append(len(able))
        return able[pick]


def every_schedule(body: Any) -> int:
    """Run `body` on two ranks in every order of turns; the number of orders."""
    choices: list[int] = []
    n_runs = 0
    while True:
        schedule = _Schedule(choices)
        world = ThreadWorld(2, node_size=2, seed=0)
        world._random = schedule  # type: ignore[assignment]
        world.run(body)
        n_runs += 1
        left = [i for i, w in enumerate(schedule.widths) if schedule.taken[i] + 1 < w]
        if not left:
            return n_runs
        choices = [*schedule.taken[: left[-1]], schedule.taken[left[-1]] + 1]


def test_every_order_of_turns_of_three_calls_of_the_code_itself() -> None:
    def body(comm: Communicator) -> None:
        small, large = np.full(3, comm.rank + 1.0), comm.empty(9000, np.float64)
        out = comm.empty(9000, np.float64)
        for turn in range(3):
            small[...] = comm.rank + turn
            large[...] = comm.rank * 2 + turn
            assert (comm.all_reduce(small) == 1 + 2 * turn).all()
            assert (comm.all_reduce(large, out=out) == 2 + 2 * turn).all()

    assert every_schedule(body) >= 64
