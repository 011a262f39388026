"""Pipeline parallelism: one schedule value that is generated, validated, simulated and run.

The global object is the chain of layers; a rank owns the stages that the placement gives it; the
messages at each boundary between two ranks keep the chain whole. ``build_schedule`` makes a
`Schedule`, `validate` proves that it can run, `simulate` times it, `lower` adds the sends and
receives that an executor needs. None of this touches a communicator. `PipelineExecutor` runs it;
what it measured has the form of a simulation.
"""

from typing import TYPE_CHECKING, Any

from mpipar.pipeline_parallel.action import Action, Kind, Message, OverlappedPair, parse_action
from mpipar.pipeline_parallel.assignment import StageAssignment
from mpipar.pipeline_parallel.compare import Figures, compare_schedules, slot_grid
from mpipar.pipeline_parallel.costs import Costs
from mpipar.pipeline_parallel.founding import (
    PipelineConfig,
    ScheduleKind,
    ScheduleStep,
    SlotSchedule,
    StageOp,
)
from mpipar.pipeline_parallel.gantt import draw_gantt, save_gantt
from mpipar.pipeline_parallel.generate import SCHEDULE_NAMES, build_schedule
from mpipar.pipeline_parallel.measured import (
    compare_timelines,
    load_measured,
    measured_costs,
    predict,
    save_measured,
)
from mpipar.pipeline_parallel.passes import (
    add_gradient_reduction,
    add_sends_receives,
    compute_only,
    defer_receives,
    lower,
    merge_backward,
    split_backward,
)
from mpipar.pipeline_parallel.schedule import Schedule, placement
from mpipar.pipeline_parallel.simulation import peak_memory, simulate
from mpipar.pipeline_parallel.stage import Stage
from mpipar.pipeline_parallel.text import (
    format_csv,
    format_schedule,
    parse_csv,
    parse_schedule,
    read_schedule,
)
from mpipar.pipeline_parallel.timeline import Timeline
from mpipar.pipeline_parallel.trace import chrome_trace, write_chrome_trace
from mpipar.pipeline_parallel.validation import Fault, find_fault, validate

if TYPE_CHECKING:
    from mpipar.pipeline_parallel.executor import PipelineExecutor

__all__ = [
    "Action",
    "Costs",
    "Fault",
    "Figures",
    "Kind",
    "Message",
    "OverlappedPair",
    "PipelineConfig",
    "PipelineExecutor",
    "SCHEDULE_NAMES",
    "Schedule",
    "ScheduleKind",
    "ScheduleStep",
    "SlotSchedule",
    "Stage",
    "StageAssignment",
    "StageOp",
    "Timeline",
    "add_gradient_reduction",
    "add_sends_receives",
    "build_schedule",
    "chrome_trace",
    "compare_schedules",
    "compare_timelines",
    "compute_only",
    "defer_receives",
    "draw_gantt",
    "find_fault",
    "format_csv",
    "format_schedule",
    "load_measured",
    "lower",
    "measured_costs",
    "merge_backward",
    "parse_action",
    "parse_csv",
    "parse_schedule",
    "peak_memory",
    "placement",
    "predict",
    "read_schedule",
    "save_gantt",
    "save_measured",
    "simulate",
    "slot_grid",
    "split_backward",
    "validate",
    "write_chrome_trace",
]


def __getattr__(name: str) -> Any:
    if name == "PipelineExecutor":
        from mpipar.pipeline_parallel.executor import PipelineExecutor

        return PipelineExecutor
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
