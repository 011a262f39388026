"""Which degrees, microbatch, schedule and placement to train with, at what price, and why."""

from mpipar.planner.calibration import Calibration, calibrate
from mpipar.planner.configs import Configs
from mpipar.planner.memory import MIXED, SINGLE, Precision, stage_memory, state_bytes
from mpipar.planner.option import Option
from mpipar.planner.plan import Plan, Pricing, make_plan
from mpipar.planner.search import Choices
from mpipar.planner.spec import MODELS, ModelSpec, spec_from_mapping
from mpipar.planner.step import Practice, step_time
from mpipar.planner.text import plan_text, recipe_toml

__all__ = [
    "MIXED",
    "MODELS",
    "SINGLE",
    "Calibration",
    "Choices",
    "Configs",
    "ModelSpec",
    "Option",
    "Plan",
    "Practice",
    "Precision",
    "Pricing",
    "calibrate",
    "make_plan",
    "plan_text",
    "recipe_toml",
    "spec_from_mapping",
    "stage_memory",
    "state_bytes",
    "step_time",
]
