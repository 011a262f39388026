"""``mpipar plan``: which degrees, microbatch and schedule to train with, and why."""

from __future__ import annotations

import argparse
import json
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

from mpipar.cli.arguments import new_file, positive
from mpipar.errors import LayoutError
from mpipar.planner.calibration import UNCALIBRATED, Calibration
from mpipar.planner.memory import MIXED, SINGLE
from mpipar.planner.plan import Pricing, make_plan
from mpipar.planner.search import ALL
from mpipar.planner.spec import MODELS, ModelSpec, spec_from_mapping
from mpipar.planner.text import plan_text, recipe_toml
from mpipar.topology.cluster_file import load_cluster
from mpipar.topology.presets import PRESETS

AXES = ("tp", "pp", "dp", "cp", "ep", "micro")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of this verb.

    Parameters
    ----------
    parser : argparse.ArgumentParser
        The verb's parser.
    """
    add = parser.add_argument
    add("model", metavar="MODEL", help=f"{', '.join(MODELS)}, or a TOML file with [model]")
    add("--cluster", required=True, metavar="NAME", help=f"{', '.join(PRESETS)}, or a TOML file")
    add("--batch", type=positive, required=True, help="rows of the global batch")
    add(
        "--devices",
        type=positive,
        metavar="N",
        help="use only so many (default: the whole machine)",
    )
    add("--sequence", type=positive, metavar="S", help="tokens of a row (default: the model's)")
    add("--precision", choices=("mixed", "single"), help="default: mixed, single on CPUs")
    add("--calibration", metavar="FILE", help="TOML with constants fitted to runs")
    for axis in AXES:
        add(f"--{axis}", type=positive, metavar="N", help=f"fix {axis}")
    add("--recipe", type=new_file("toml"), metavar="FILE", help="write a recipe for `mpipar train`")
    add("--format", choices=("text", "json"), default="text", help="of what is printed")


def main(arguments: argparse.Namespace) -> int:
    """Search, print, and write the recipe.

    Parameters
    ----------
    arguments : argparse.Namespace
        Options of `configure`.

    Returns
    -------
    int
        0; what cannot fit is an error of the tree.
    """
    spec = _model(arguments.model)
    if arguments.sequence:
        spec = replace(spec, sequence=arguments.sequence)
    cluster = load_cluster(arguments.cluster)
    if arguments.devices:
        cluster = cluster.take(arguments.devices)
    on_cpu = cluster.weakest.kind == "cpu"
    single = arguments.precision == "single" or (on_cpu and arguments.precision is None)
    constants = _calibration(arguments.calibration) if arguments.calibration else UNCALIBRATED
    pricing = Pricing(spec, cluster, SINGLE if single else MIXED, constants)
    given = tuple((k, getattr(arguments, k)) for k in AXES if getattr(arguments, k) is not None)
    plan = make_plan(pricing, arguments.batch, replace(ALL, fixed=given))
    print(json.dumps(plan.to_mapping()) if arguments.format == "json" else plan_text(plan))
    if arguments.recipe:
        Path(arguments.recipe).write_text(recipe_toml(plan))
    return 0


def _read(name: str, what: str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(name).read_text())
    except OSError as error:
        raise LayoutError(f"{what} {name} cannot be read: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise LayoutError(f"{what} {name} is no TOML: {error}") from None


def _model(name: str) -> ModelSpec:
    if name in MODELS:
        return MODELS[name]
    if not Path(name).is_file():
        raise LayoutError(f"model {name!r} is neither a file nor one of {', '.join(MODELS)}")
    section = _read(name, "model file").get("model")
    if not isinstance(section, dict):
        raise LayoutError(f"model file {name} has no section [model]")
    known = ("label_smoothing", "ignore_index", "eps", "dropout")
    values = {key: value for key, value in section.items() if key not in known}
    return spec_from_mapping(
        {"name": Path(name).stem, "dropout": bool(section.get("dropout", 0))} | values
    )


def _calibration(name: str) -> Calibration:
    values = _read(name, "calibration file")
    unknown = [key for key in values if key not in vars(UNCALIBRATED)]
    if unknown:
        raise LayoutError(
            f"calibration file {name}: {unknown[0]!r} is unknown; keys are "
            f"{', '.join(vars(UNCALIBRATED))}"
        )
    return replace(UNCALIBRATED, **{"source": f"given: {Path(name).name}"} | values)
