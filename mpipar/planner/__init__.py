"""Which degrees, microbatch, schedule and placement to train with, at what price, and why."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpipar.planner.calibration import Calibration, calibrate
    from mpipar.planner.configs import Configs
    from mpipar.planner.memory import MIXED, SINGLE, Precision, stage_memory, state_bytes
    from mpipar.planner.plan import Option, Plan, Pricing, make_plan
    from mpipar.planner.search import Choices
    from mpipar.planner.spec import MODELS, ModelSpec, spec_from_mapping
    from mpipar.planner.step import Practice, step_time
    from mpipar.planner.text import plan_text, recipe_toml

_HOMES = {
    "calibration": ("Calibration", "calibrate"),
    "configs": ("Configs",),
    "memory": ("MIXED", "SINGLE", "Precision", "stage_memory", "state_bytes"),
    "plan": ("Option", "Plan", "Pricing", "make_plan"),
    "search": ("Choices",),
    "spec": ("MODELS", "ModelSpec", "spec_from_mapping"),
    "step": ("Practice", "step_time"),
    "text": ("plan_text", "recipe_toml"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

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


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
