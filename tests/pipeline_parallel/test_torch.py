"""Our schedules in PyTorch pipelining's hands: the same orders, accepted by its own checks."""

import csv
import io
from typing import Any

import pytest

from mpipar.pipeline_parallel import build_schedule, defer_receives, format_csv, lower

pytestmark = pytest.mark.bench


@pytest.fixture(scope="module")
def schedules() -> Any:
    return pytest.importorskip("torch.distributed.pipelining.schedules")


def rows_of(schedules: Any, text: str) -> dict[int, list[Any]]:
    rows = csv.reader(io.StringIO(text))
    return {rank: [schedules._Action.from_str(c) for c in row] for rank, row in enumerate(rows)}


class Stage:
    """What PyTorch's schedules read of a stage when they are built."""

    submod = None

    def __init__(self, index: int, n_stages: int, n_ranks: int) -> None:
        self.stage_index, self.num_stages = index, n_stages
        self.group_size, self.group_rank = n_ranks, 0


@pytest.mark.parametrize(
    ("name", "theirs"), [("interleaved", "Interleaved1F1B"), ("dualpipe-v", "DualPipeV")]
)
@pytest.mark.parametrize(("p", "m"), [(2, 4), (3, 6), (4, 8), (4, 12)])
def test_same_order(schedules: Any, name: str, theirs: str, p: int, m: int) -> None:
    mine = [0, p] if name == "interleaved" else [0, 2 * p - 1]
    stages = [Stage(index, 2 * p, p) for index in mine]
    other = schedules.get_schedule_class(theirs)(stages, m)
    want = [",".join(str(a) for a in other.pipeline_order[r] if a is not None) for r in range(p)]
    assert format_csv(build_schedule(name, p, m)).splitlines() == want


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "auto"])
@pytest.mark.parametrize(("p", "m"), [(2, 1), (3, 5), (4, 8)])
def test_accepted(schedules: Any, name: str, p: int, m: int) -> None:
    schedule = build_schedule(name, p, m)
    owner = schedules._validate_schedule(
        rows_of(schedules, format_csv(schedule)), p, schedule.n_stages, m
    )
    assert [owner[s] for s in range(schedule.n_stages)] == schedule.stage_to_rank.tolist()
    for lowered in (lower(schedule), defer_receives(lower(schedule))):
        rows = rows_of(schedules, format_csv(lowered))
        rows = {r: [a for a in row if a.microbatch_index is not None] for r, row in rows.items()}
        schedules._simulate_comms_compute(rows, owner.__getitem__, schedule.n_stages)
