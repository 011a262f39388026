"""The founding surface: slots, steps and their counts, as views of `Schedule`.

One slot is one forward or one full backward. By that rule 1F1B over 4 stages and 8 microbatches
takes 22 slots, 2 (S + M - 1), and never fewer.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from mpipar.errors import CountOutOfRange
from mpipar.pipeline_parallel.action import Kind
from mpipar.pipeline_parallel.costs import Costs
from mpipar.pipeline_parallel.generate import build_schedule
from mpipar.pipeline_parallel.schedule import Schedule
from mpipar.pipeline_parallel.simulation import simulate
from mpipar.pipeline_parallel.timeline import Timeline


class StageOp(Enum):
    """What a stage does in one slot."""

    Forward = "forward"
    Backward = "backward"
    Idle = "idle"


class ScheduleKind(Enum):
    """The founding schedules; the value is the name of the generator."""

    GPipe = "gpipe"
    OneForwardOneBackward = "1f1b"


@dataclass(frozen=True)
class ScheduleStep:
    """One slot of one stage; `microbatch` is 0 where it idles."""

    stage: int
    time: int
    op: StageOp
    microbatch: int


@dataclass(frozen=True)
class SlotSchedule:
    """A schedule of one stage per rank seen as a table of stages and slots.

    Parameters
    ----------
    schedule : Schedule
        With F and B only.
    """

    schedule: Schedule

    @cached_property
    def timeline(self) -> Timeline:
        """The timeline in which F and B take one slot each."""
        return simulate(self.schedule, Costs(forward_us=1, backward_us=1))

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return self.schedule.n_stages

    @property
    def num_microbatches(self) -> int:
        """Number of microbatches."""
        return self.schedule.n_microbatches

    @property
    def total_steps(self) -> int:
        """Slots from the first to the last action of any stage."""
        return int(self.timeline.makespan)

    @property
    def bubble_steps(self) -> int:
        """Idle slots of all stages."""
        return self.num_stages * self.total_steps - len(self.schedule)

    @property
    def bubble_ratio(self) -> float:
        """Idle slots over all slots: bubble over total."""
        return float(self.timeline.bubble_over_total())

    def steps(self, stage: int) -> tuple[ScheduleStep, ...]:
        """All slots of a stage.

        Parameters
        ----------
        stage : int
            A stage.

        Returns
        -------
        tuple of ScheduleStep
            `total_steps` of them.
        """
        if not 0 <= stage < self.num_stages:
            raise CountOutOfRange("stage", f"0..{self.num_stages}", stage)
        row = [ScheduleStep(stage, t, StageOp.Idle, 0) for t in range(self.total_steps)]
        schedule, times = self.schedule, self.timeline.start.tolist()
        for i in range(int(schedule.offsets[stage]), int(schedule.offsets[stage + 1])):
            op = StageOp.Forward if schedule.kind[i] == Kind.F else StageOp.Backward
            row[times[i]] = ScheduleStep(stage, times[i], op, int(schedule.microbatch[i]))
        return tuple(row)

    def at_time(self, time: int) -> tuple[ScheduleStep, ...]:
        """What every stage does in one slot.

        Parameters
        ----------
        time : int
            A slot.

        Returns
        -------
        tuple of ScheduleStep
            One per stage; empty past the end.
        """
        if not 0 <= time < self.total_steps:
            return ()
        return tuple(self.steps(stage)[time] for stage in range(self.num_stages))


@dataclass(frozen=True)
class PipelineConfig:
    """Sizes of a pipeline, each at least 1."""

    num_stages: int
    num_microbatches: int

    def __post_init__(self) -> None:
        for field in ("num_stages", "num_microbatches"):
            if getattr(self, field) < 1:
                raise CountOutOfRange(field, "1 or more", getattr(self, field))

    def build_schedule(self, kind: ScheduleKind) -> SlotSchedule:
        """Build one of the founding schedules.

        Parameters
        ----------
        kind : ScheduleKind
            Which.

        Returns
        -------
        SlotSchedule
            Its `schedule` is the value that runs.
        """
        return SlotSchedule(build_schedule(kind.value, self.num_stages, self.num_microbatches))
