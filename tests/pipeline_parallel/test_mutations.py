"""The validator against two oracles of another kind, on schedules broken by one mutation.

A graph of the cells that is searched for cycles, and an interpreter whose sends and receives
block. ``python -m tests.pipeline_parallel.test_mutations 2000`` prints the counts.
"""

import sys
from collections import Counter
from typing import Any

import networkx as nx
import numpy as np
import pytest

from mpipar.errors import ScheduleError
from mpipar.pipeline_parallel import (
    SCHEDULE_NAMES,
    Action,
    Kind,
    OverlappedPair,
    Schedule,
    build_schedule,
    defer_receives,
    find_fault,
    lower,
    merge_backward,
    parse_csv,
    validate,
)

Cell = Action | OverlappedPair
COMMUNICATION = (Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B)


def parts(cell: Cell) -> tuple[Action, ...]:
    return tuple(cell) if isinstance(cell, OverlappedPair) else (cell,)


class Machine:
    """What both oracles know about a schedule, from its cells alone."""

    def __init__(self, schedule: Schedule) -> None:
        self.rows = [list(schedule.actions(rank)) for rank in range(schedule.n_ranks)]
        self.owner = schedule.stage_to_rank.tolist()
        self.n_stages, self.n_microbatches = schedule.n_stages, schedule.n_microbatches
        self.lowered = any(
            a.kind in COMMUNICATION for row in self.rows for cell in row for a in parts(cell)
        )

    def all_done(self, ran: Counter[Any]) -> bool:
        """Each F, input gradient and weight gradient exactly once, nothing twice."""
        wanted = {
            (what, stage, number)
            for what in "FIW"
            for stage in range(self.n_stages)
            for number in range(self.n_microbatches)
        }
        return {key for key in ran if key[0] in "FIW"} == wanted and max(ran.values()) == 1

    def results(self, action: Action) -> list[tuple[str, int, int]]:
        made = {Kind.F: "F", Kind.I: "I", Kind.W: "W", Kind.B: "IW"}[action.kind]
        return [(what, action.stage, action.microbatch) for what in made]

    def needs(self, action: Action) -> list[tuple[str, int, int]]:
        stage, kind, number = action
        if kind == Kind.F:
            return [("F", stage - 1, number)] if stage else []
        if kind == Kind.W:
            return [("I", stage, number)]
        outer = [("I", stage + 1, number)] if stage + 1 < self.n_stages else []
        return [("F", stage, number), *outer]


def cycle_oracle(schedule: Schedule) -> bool:
    """Valid if every edge has both ends and the graph of cells has no cycle."""
    machine = Machine(schedule)
    graph: Any = nx.DiGraph()
    ran: Counter[Any] = Counter()
    maker: dict[Any, Any] = {}
    messages: dict[Any, dict[str, Any]] = {}
    cells = []
    for rank, row in enumerate(machine.rows):
        for position, cell in enumerate(row):
            node = (rank, position)
            for action in parts(cell):
                if machine.owner[action.stage] != rank:
                    return False
                if action.kind in COMMUNICATION:
                    end = "send" if action.kind in (Kind.SEND_F, Kind.SEND_B) else "receive"
                    node = ("message", action.message)
                    ran[end, action.message] += 1
                    messages.setdefault(action.message, {})[end] = (rank, position)
                elif action.kind == Kind.REDUCE_GRAD:
                    ran["reduce", action.stage] += 1
                else:
                    for made in machine.results(action):
                        ran[made] += 1
                        maker[made] = node
            cells.append((rank, position, cell, node))
    if not machine.all_done(ran) or any(len(ends) != 2 for ends in messages.values()):
        return False
    name = {(rank, position): node for rank, position, _, node in cells}
    for rank, position, cell, node in cells:
        graph.add_node(node)
        if position:
            graph.add_edge(name[rank, position - 1], node)
        for action in parts(cell):
            if not _add_needs(machine, graph, action, node, rank, position, maker, messages):
                return False
    return bool(nx.is_directed_acyclic_graph(graph))


def _add_needs(
    machine: Machine,
    graph: Any,
    action: Action,
    node: Any,
    rank: int,
    position: int,
    maker: dict[Any, Any],
    messages: dict[Any, dict[str, Any]],
) -> bool:
    """Edges into one action; False if it needs what its own list does not give it in time."""
    if action.kind == Kind.REDUCE_GRAD:
        made = [maker["W", action.stage, n] for n in range(machine.n_microbatches)]
        return all(place[1] < position for place in made)
    if action.kind in COMMUNICATION:
        what = "F" if action.message.direction == "forward" else "I"
        below = action.message.boundary
        stage, other = (below, below + 1) if what == "F" else (below + 1, below)
        if not 0 <= below < machine.n_stages - 1 or machine.owner[stage] == machine.owner[other]:
            return False
        if action.kind in (Kind.SEND_F, Kind.SEND_B):
            return bool(maker[what, stage, action.microbatch][1] < position)
        return True
    for what, stage, number in machine.needs(action):
        source = maker[what, stage, number]
        if machine.lowered and source[0] != rank:
            message = ("forward" if what == "F" else "backward", min(stage, action.stage), number)
            if message not in messages or messages[message]["receive"][1] >= position:
                return False
        else:
            graph.add_edge(source, node)
    return True


def interpreter_oracle(schedule: Schedule) -> bool:
    """Valid if ranks whose sends and receives block run their lists to the end."""
    machine = Machine(schedule)
    ran: Counter[Any] = Counter()
    held: list[set[Any]] = [set() for _ in machine.rows]  # what each rank has made or received
    heads = [0] * len(machine.rows)

    def head(rank: int) -> Cell | None:
        row = machine.rows[rank]
        return row[heads[rank]] if heads[rank] < len(row) else None

    def step(rank: int) -> bool | None:
        """True: moved; False: waits; None: does what cannot be done."""
        cell = head(rank)
        if cell is None:
            return False
        actions = parts(cell)
        if any(machine.owner[action.stage] != rank for action in actions):
            return None
        if actions[0].kind in COMMUNICATION:
            return meet(rank, actions[0])
        if actions[0].kind == Kind.REDUCE_GRAD:
            stage = actions[0].stage
            ran["reduce", stage] += 1
            numbers = range(machine.n_microbatches)
            if any(("W", stage, number) not in held[rank] for number in numbers):
                return None
            heads[rank] += 1
            return True
        for action in actions:
            for need in machine.needs(action):
                mine = need in held[rank]
                if machine.lowered and not mine:
                    return None
                if not mine and machine.owner[need[1]] == rank:
                    return None
                if not mine and need not in held[machine.owner[need[1]]]:
                    return False
        for action in actions:
            for made in machine.results(action):
                ran[made] += 1
                held[rank].add(made)
        heads[rank] += 1
        return True

    def meet(rank: int, action: Action) -> bool | None:
        sends = action.kind in (Kind.SEND_F, Kind.SEND_B)
        forward, below, number = action.message
        what = "F" if forward == "forward" else "I"
        source, target = (below, below + 1) if what == "F" else (below + 1, below)
        if not 0 <= below < machine.n_stages - 1:
            return None
        if sends and (what, source, number) not in held[rank]:
            return None
        peer = machine.owner[target if sends else source]
        other = head(peer)
        if peer == rank:
            return None
        if (
            not isinstance(other, Action)
            or other.kind not in COMMUNICATION
            or other.message != action.message
            or (other.kind in (Kind.SEND_F, Kind.SEND_B)) == sends
        ):
            return False
        giver, taker = (rank, peer) if sends else (peer, rank)
        if (what, source, number) not in held[giver]:
            return None
        held[taker].add((what, source, number))
        ran["message", action.message] += 1
        heads[rank] += 1
        heads[peer] += 1
        return True

    moved = True
    while moved:
        moved = False
        for rank in range(len(machine.rows)):
            while (done := step(rank)) is not False:
                if done is None:
                    return False
                moved = True
    finished = all(h == len(row) for h, row in zip(heads, machine.rows, strict=True))
    return finished and machine.all_done(ran)


def random_schedule(rng: np.random.Generator) -> Schedule:
    p, m = int(rng.integers(1, 5)), int(rng.integers(1, 7))
    name = str(rng.choice(SCHEDULE_NAMES))
    m = max(m, 2 * p) if name == "dualpipe-v" else m
    schedule = build_schedule(name, p, m)
    if rng.random() < 0.3:
        schedule = merge_backward(schedule)
    form = rng.integers(3)
    if form == 0:
        return schedule
    return lower(schedule) if form == 1 else defer_receives(lower(schedule))


def mutate(schedule: Schedule, rng: np.random.Generator) -> tuple[str, Schedule]:
    rows = [list(schedule.actions(rank)) for rank in range(schedule.n_ranks)]
    row = rows[int(rng.integers(len(rows)))]
    i = int(rng.integers(len(row)))
    how = str(rng.choice(["swap near", "swap far", "drop", "duplicate"]))
    if how.startswith("swap"):
        j = min(i + 1, len(row) - 1) if how == "swap near" else int(rng.integers(len(row)))
        row[i], row[j] = row[j], row[i]
    elif how == "drop":
        del row[i]
    else:
        other = rows[int(rng.integers(len(rows)))] if rng.random() < 0.3 else row
        other.insert(int(rng.integers(len(other) + 1)), row[i])
    changed = Schedule.from_actions(
        rows,
        name=schedule.name,
        stage_to_rank=schedule.stage_to_rank.tolist(),
        n_microbatches=schedule.n_microbatches,
    )
    return how.split()[0], changed


def count_mutants(n: int, seed: int = 0) -> Counter[str]:
    """Mutants by verdict; raises where the three disagree."""
    rng = np.random.default_rng(seed)
    counts: Counter[str] = Counter()
    while counts["mutants"] < n:
        original = random_schedule(rng)
        how, mutant = mutate(original, rng)
        fault = find_fault(mutant)
        verdicts = (fault is None, cycle_oracle(mutant), interpreter_oracle(mutant))
        if len(set(verdicts)) > 1:
            rows = [" ".join(map(str, mutant.actions(r))) for r in range(mutant.n_ranks)]
            raise AssertionError(f"{how}: {verdicts}, {fault}\n" + "\n".join(rows))
        counts["mutants"] += 1
        counts[f"{how}: valid" if fault is None else f"{how}: refused"] += 1
        counts["valid" if fault is None else f"refused: {fault.reason}"] += 1
    return counts


def test_originals_are_valid_for_all_three() -> None:
    rng = np.random.default_rng(1)
    for _ in range(100):
        schedule = random_schedule(rng)
        assert find_fault(schedule) is None
        assert cycle_oracle(schedule)
        assert interpreter_oracle(schedule)


def test_mutants() -> None:
    counts = count_mutants(300)
    assert counts["valid"] > 20
    reasons = ("wrong rank", "repeated", "missing", "out of order", "unmatched message")
    for reason in (*reasons, "deadlock"):
        assert counts[f"refused: {reason}"] > 0, counts


@pytest.mark.slow
def test_two_thousand_mutants() -> None:
    counts = count_mutants(2000, seed=7)
    assert counts["valid"] + sum(n for k, n in counts.items() if k.startswith("refused")) == 2000


NAIVE = """\
0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1
1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1
"""


def test_naive_1f1b_deadlocks_under_blocking_sends() -> None:
    """Receive, compute, send in 1F1B's order: each side stands in a send. GPipe's order runs."""
    rows = NAIVE.splitlines()
    rows[0] = "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1"
    stuck = parse_csv("\n".join(rows))
    for oracle in (cycle_oracle, interpreter_oracle):
        assert not oracle(stuck)
    with pytest.raises(ScheduleError, match="deadlock at rank 0, position 3") as caught:
        validate(stuck)
    assert "0SEND_F1 (rank 0) waits for a rank that stands at 1SEND_B0 (rank 1)" in str(
        caught.value
    )
    assert ">0SEND_F1<" in str(caught.value)
    mended = parse_csv(NAIVE.replace("0SEND_F1,0RECV_B0,0B0", "0RECV_B0,0B0,0SEND_F1"))
    assert validate(mended) is mended
    assert cycle_oracle(mended)
    assert interpreter_oracle(mended)


@pytest.mark.parametrize(
    ("rows", "match"),
    [
        ("0F0,0B0\n1F0,1B0,0F0", r"wrong rank at rank 1, position 2: 0F0 .* stage 0 is on rank 0"),
        ("0F0,0B0,0F0\n1F0,1B0", "repeated at rank 0, position 2: 0F0"),
        ("0F0,0F1,0B0\n1F0,1B0,1F1,1B1", "missing at rank 0, position 3: 0I1 or 0B1 never runs"),
        ("0F0,0I0\n1F0,1B0", "missing at rank 0, position 2: 0W0 or 0B0 never runs"),
        ("0F0,0I0,0W0,0B0\n1F0,1B0", "repeated at rank 0, position 3: 0B0"),
        ("0B0,0F0\n1F0,1B0", "out of order at rank 0, position 0: 0B0 stands before 0F0"),
        ("0F0,0W0,0I0\n1F0,1B0", "out of order .* 0W0 stands before 0I0"),
        ("(0F0;0B0)OVERLAP_F_B", "out of order .* 0B0 stands before 0F0 has ended"),
        ("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0", "deadlock .* 0B0 .rank 0. waits"),
        (
            "0F0,0SEND_F0,0B0\n1F0,1B0",
            "unmatched message .* 0RECV_B0 is missing|1RECV_F0 is missing",
        ),
        ("0F0,0SEND_B0,0B0\n1F0,1B0", "unmatched message"),
        ("0F0,0REDUCE_GRAD,0B0\n1F0,1B0", "out of order .* 0REDUCE_GRAD stands before 0B0"),
        ("0F0,0B0,0REDUCE_GRAD,0REDUCE_GRAD\n1F0,1B0", "repeated .* 0REDUCE_GRAD"),
    ],
)
def test_messages_name_the_cell(rows: str, match: str) -> None:
    with pytest.raises(ScheduleError, match=match):
        validate(parse_csv(rows))


if __name__ == "__main__":
    for key, number in sorted(count_mutants(int(sys.argv[1])).items()):
        print(f"{key:<30}{number:>6}")
