"""Published makespans, bubble rates and peaks, reproduced exactly."""

import csv
from fractions import Fraction
from pathlib import Path

import pytest

from mpipar.pipeline_parallel import Costs, build_schedule, simulate, validate

DATA = Path(__file__).parent.parent / "data"


def rows(name: str) -> list[dict[str, str]]:
    with (DATA / name).open() as file:
        return list(csv.DictReader(file))


def costs_of(row: dict[str, str], chunks: int = 1) -> Costs:
    """Costs of a whole rank's share; the table may give those of its chunks."""
    forward, inputs, weight = (int(row[key]) * chunks for key in ("TF", "TB", "TW"))
    return Costs(forward, inputs, weight, latency_us=int(row["Tcomm"]))


def printed(value: Fraction | int, text: str) -> bool:
    """Equal to the decimal as printed, to its last digit."""
    return abs(value - Fraction(text)) <= Fraction(1, 2 * 10 ** len(text.partition(".")[2]))


def check(row: dict[str, str], costs: Costs, *, p: int, m: int, v: int) -> Fraction:
    """The columns both tables share; returns what the interleaved column leaves out."""
    work = m * (costs.forward_us + costs.input_us + costs.weight_us)
    assert work == int(row["ideal"])
    for name, column, rate in (
        ("1f1b", "1f1b", "rate_1f1b"),
        ("zb-h1", "zb_h1", "rate_h1"),
        ("zb-h2", "zb_h2", "rate_h2"),
    ):
        timeline = simulate(build_schedule(name, p, m), costs)
        length = "longest_span" if name == "zb-h2" else "makespan"
        assert getattr(timeline, length) == int(row[column])
        assert printed(timeline.bubble_over_total(length), row[rate])
    schedule = build_schedule("interleaved", p, m, n_chunks=v)
    chunk = costs.per_chunk(v)
    loose = simulate(schedule, chunk, wrap_transfers="first_of_group_only")
    assert printed(loose.makespan, row["1f1b_i"])
    assert printed(loose.bubble_over_total(), row["rate_1f1b_i"])
    strict = simulate(schedule, chunk)
    return strict.bubble_over_total() - loose.bubble_over_total()


@pytest.mark.parametrize(
    "row", rows("zero_bubble_makespans.csv"), ids=lambda r: r["p"] + "x" + r["m"]
)
def test_zero_bubble(row: dict[str, str]) -> None:
    p, m = int(row["p"]), int(row["m"])
    costs = costs_of(row)
    omitted = check(row, costs, p=p, m=m, v=int(row["v_1f1bi"]))
    assert Fraction(8, 10_000) < omitted < Fraction(36, 10_000)
    for stages, column in ((1, "zb_1p"), (2, "zb_2p")):
        schedule = build_schedule("auto", p, m, costs=costs, memory_limit=stages * p)
        timeline = simulate(validate(schedule), costs)
        assert timeline.longest_span <= int(row[column])
        assert max(timeline.peak_memory) <= stages * p


@pytest.mark.parametrize(
    "row", rows("zero_bubble_zbv_makespans.csv"), ids=lambda r: r["p"] + "x" + r["m"]
)
def test_zero_bubble_v(row: dict[str, str]) -> None:
    p, m = int(row["p"]), int(row["m"])
    assert check(row, costs_of(row, 2), p=p, m=m, v=int(row["v_1f1bi"])) > 0
    chunk = costs_of(row)
    timeline = simulate(validate(build_schedule("zb-v", p, m, costs=chunk)), chunk)
    assert timeline.longest_span == int(row["zb_v"])
    assert printed(timeline.bubble_over_total("longest_span"), row["rate_zbv"])
    assert max(timeline.peak_memory) <= p


@pytest.mark.parametrize("row", rows("schedule_unit_time.csv"), ids=lambda r: r["p"] + "x" + r["m"])
def test_unit_times(row: dict[str, str]) -> None:
    p, m = int(row["p"]), int(row["m"])
    half = Costs().per_chunk(2)
    gpipe, one = (simulate(build_schedule(name, p, m)) for name in ("gpipe", "1f1b"))
    two = simulate(build_schedule("interleaved", p, m), half)
    assert gpipe.makespan == int(row["gpipe"])
    assert one.makespan == int(row["1f1b"])
    assert two.makespan == Fraction(row["interleaved_v2"])
    assert simulate(build_schedule("zb-h1", p, m)).makespan == int(row["zb_h1"])
    assert simulate(build_schedule("zb-h2", p, m)).longest_span == int(row["zb_h2"])
    assert simulate(build_schedule("zb-v", p, m), half).longest_span == int(row["zb_v"])
    assert gpipe.peak_memory[0] == int(row["peak_inflight_stage0_gpipe"])
    assert one.peak_memory[0] == int(row["peak_1f1b"])
    assert two.peak_memory[0] == Fraction(row["peak_interleaved_v2"])


def test_dualpipe_v() -> None:
    schedule = build_schedule("dualpipe-v", 4, 10)
    timeline = simulate(validate(schedule), Costs(1, 1, 1, pair_us=3))
    assert timeline.makespan == 66
    assert timeline.busy == (60,) * 4
    assert timeline.idle == (6,) * 4


@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 1), (3, 7), (5, 2), (8, 40)])
def test_closed_forms(p: int, m: int) -> None:
    """1F1B and GPipe last (m + p - 1)(F + B); the two bubbles are (p-1)/m and (p-1)/(m+p-1)."""
    for name in ("gpipe", "1f1b"):
        timeline = simulate(build_schedule(name, p, m), Costs(Fraction(1, 3), Fraction(2, 7), 5))
        assert timeline.makespan == (m + p - 1) * (Fraction(1, 3) + Fraction(2, 7) + 5)
        assert timeline.bubble_over_ideal() == Fraction(p - 1, m)
        assert timeline.bubble_over_total() == Fraction(p - 1, m + p - 1)


def test_weight_memory_bounds_what_a_cap_can_reach() -> None:
    """With all memory held until W no schedule under 2p reaches the published zb_2p.

    The first rank's span holds the last rank's F and I and all of its W but the 2p - 1 that it
    may still owe, plus one trip up and down the pipeline (but for the ends of the two spans).
    """
    row = rows("zero_bubble_makespans.csv")[0]
    p, m = int(row["p"]), int(row["m"])
    costs = costs_of(row)
    forward, inputs, weight = costs.forward_us, costs.input_us, costs.weight_us
    trip = (p - 1) * (forward + inputs + 2 * costs.latency_us)
    bound = m * (forward + inputs) + (m - (2 * p - 1)) * weight + trip
    assert bound > int(row["zb_2p"])
    held = Costs(forward, inputs, weight, latency_us=costs.latency_us, held_for_weight=1)
    schedule = build_schedule("auto", p, m, costs=held, memory_limit=2 * p)
    assert simulate(schedule, held).longest_span == bound
