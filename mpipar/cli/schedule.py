"""``mpipar schedule``: a pipeline schedule drawn, its bubble next to the others', its picture."""

from __future__ import annotations

import argparse
import json
from fractions import Fraction
from typing import Any

from mpipar.cli.arguments import PICTURE, at_most, new_file
from mpipar.errors import ScheduleError
from mpipar.pipeline_parallel.compare import Figures, compare_schedules, slot_grid
from mpipar.pipeline_parallel.costs import Costs
from mpipar.pipeline_parallel.gantt import save_gantt
from mpipar.pipeline_parallel.generate import SCHEDULE_NAMES, build_schedule, chunks_per_rank
from mpipar.pipeline_parallel.measured import compare_timelines, load_measured
from mpipar.pipeline_parallel.passes import compute_only, lower
from mpipar.pipeline_parallel.schedule import Schedule
from mpipar.pipeline_parallel.simulation import simulate
from mpipar.pipeline_parallel.text import format_csv, read_schedule
from mpipar.pipeline_parallel.trace import write_chrome_trace
from mpipar.pipeline_parallel.validation import validate


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of this verb.

    Parameters
    ----------
    parser : argparse.ArgumentParser
        The verb's parser.
    """
    add = parser.add_argument
    add("name", nargs="?", metavar="NAME", help=f"one of {', '.join(SCHEDULE_NAMES)}")
    add("--stages", type=at_most(1024), default=4, metavar="P", help="pipeline ranks (default 4)")
    add("--microbatches", type=at_most(4096), default=8, metavar="M", help="per step (default 8)")
    add(
        "--chunks",
        type=at_most(64),
        default=2,
        metavar="V",
        help="per rank, interleaved (default 2)",
    )
    add(
        "--times",
        type=_numbers,
        default=[1, 1, 1],
        metavar="F,I,W",
        help="microseconds of forward, input and weight gradient of a rank's share (default 1,1,1)",
    )
    add("--transfer", type=Fraction, default=0, metavar="US", help="time of a message (default 0)")
    add("--memory-limit", type=Fraction, metavar="N", help="for auto: microbatches a rank may hold")
    add(
        "--file",
        metavar="FILE",
        help="instead of NAME: a schedule in text or PyTorch's CSV, or a run's timeline.json, "
        "whose measured times are shown beside simulated ones",
    )
    add("--plot", type=new_file(*PICTURE), metavar="FILE",
        help="save a Gantt picture: png, svg or pdf (plot extra)")  # fmt: skip
    add(
        "--trace",
        type=new_file(),
        metavar="FILE",
        help="save a Chrome trace, to be opened in Perfetto",
    )
    add("--format", choices=("text", "json", "csv"), default="text", help="csv is PyTorch's form")


def main(arguments: argparse.Namespace) -> int:
    """Draw, compare and save.

    Parameters
    ----------
    arguments : argparse.Namespace
        Options of `configure`.

    Returns
    -------
    int
        0.
    """
    if arguments.file and arguments.file.endswith(".json"):
        print(compare_timelines(load_measured(arguments.file)))
        return 0
    forward, inputs, weight = arguments.times
    costs = Costs(forward, inputs, weight, latency_us=arguments.transfer)
    schedule = _schedule(arguments, costs)
    share = costs
    if schedule.n_stages % schedule.n_ranks == 0:
        share = costs.per_chunk(schedule.n_stages // schedule.n_ranks)
    if arguments.plot:
        save_gantt(simulate(compute_only(schedule), share), arguments.plot)
    if arguments.trace:
        lowered = schedule if schedule.is_lowered else lower(schedule)
        write_chrome_trace(simulate(lowered, share), arguments.trace)
    if arguments.format == "csv":
        print(format_csv(schedule), end="")
        return 0
    names = [name for name in SCHEDULE_NAMES if name != schedule.name]
    others, refused = compare_schedules(
        schedule.n_ranks,
        schedule.n_microbatches,
        costs,
        n_chunks=arguments.chunks,
        memory_limit=arguments.memory_limit,
        names=names,
    )
    figures = [Figures.of(simulate(schedule, share)), *others]
    show = _show_json if arguments.format == "json" else _show_text
    show(schedule, figures, refused)
    return 0


def _numbers(text: str) -> list[Fraction]:
    parts = [Fraction(part) for part in text.split(",")]
    if len(parts) != 3:
        raise argparse.ArgumentTypeError(f"{text!r}: three numbers F,I,W are needed")
    return parts


def _schedule(arguments: argparse.Namespace, costs: Costs) -> Schedule:
    if (arguments.file is None) == (arguments.name is None):
        raise ScheduleError(
            f"give a NAME or a --file; names are {', '.join(SCHEDULE_NAMES)}"
            if arguments.file is None
            else f"give either NAME ({arguments.name}) or --file, not both"
        )
    if arguments.file is not None:
        return validate(read_schedule(arguments.file))
    chunks = chunks_per_rank(arguments.name, arguments.chunks)
    return validate(
        build_schedule(
            arguments.name,
            arguments.stages,
            arguments.microbatches,
            n_chunks=arguments.chunks,
            costs=costs.per_chunk(chunks),
            memory_limit=arguments.memory_limit,
        )
    )


def _show_text(schedule: Schedule, figures: list[Figures], refused: list[str]) -> None:
    print(
        f"{schedule.name}: {schedule.n_ranks} ranks, {schedule.n_stages} stages, "
        f"{schedule.n_microbatches} microbatches; valid, also if every send blocks\n"
    )
    print(slot_grid(schedule))
    titles = ("schedule", "stages", "makespan us", "longest span us", "peak")
    rates = ("bubble/ideal", "bubble/total", "by span")
    print(f"\n{titles[0]:<12}{titles[1]:>7}" + "".join(f"{t:>16}" for t in titles[2:4]), end="")
    print("".join(f"{rate:>14}" for rate in rates) + f"{titles[4]:>7}")
    for row in figures:
        lengths = (row.makespan_us, row.longest_span_us)
        bubbles = (row.bubble_over_ideal, row.bubble_over_total, row.span_bubble_over_total)
        print(f"{row.name:<12}{row.n_stages:>7}", end="")
        print("".join(f"{float(length):>16.10g}" for length in lengths), end="")
        print("".join(f"{float(bubble):>14.2%}" for bubble in bubbles), end="")
        print(f"{float(row.peak_memory):>7.4g}")
    print("\nbubble/ideal: idle over work; bubble/total: idle over makespan; by span: idle in the")
    print("longest rank's span over that span. peak: activations of whole ranks' shares held.")
    for reason in refused:
        print(f"left out: {reason}")


def _show_json(schedule: Schedule, figures: list[Figures], refused: list[str]) -> None:
    out: dict[str, Any] = {
        "schedule": {
            "name": schedule.name,
            "n_ranks": schedule.n_ranks,
            "n_stages": schedule.n_stages,
            "n_microbatches": schedule.n_microbatches,
            "stage_to_rank": schedule.stage_to_rank.tolist(),
            "actions": [[str(a) for a in schedule.actions(r)] for r in range(schedule.n_ranks)],
        },
        "figures": [
            {k: float(v) if isinstance(v, Fraction) else v for k, v in vars(row).items()}
            for row in figures
        ],
        "left_out": refused,
    }
    print(json.dumps(out, indent=2))
