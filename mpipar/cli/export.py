"""``mpipar export``: a run's weights as a folder that other tools read."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mpipar.errors import CheckpointError


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of this verb.

    Parameters
    ----------
    parser : argparse.ArgumentParser
        The verb's parser.
    """
    parser.description = (
        "Write the newest complete checkpoint of a run, whatever its mesh was, as one safetensors "
        "file with config.json in Hugging Face names (GPT-2 or Llama). No launcher is needed."
    )
    parser.add_argument("run", type=Path, help="run folder of `mpipar train`")
    parser.add_argument("folder", type=Path, help="where to write; made if it is not there")
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16", "float64"),
                        help="of the weights; by default that of the run")  # fmt: skip
    parser.add_argument("--overwrite", action="store_true",
                        help="replace what a folder holds of an earlier export")  # fmt: skip


def main(arguments: argparse.Namespace) -> int:
    """Export.

    Parameters
    ----------
    arguments : argparse.Namespace
        Options of `configure`.

    Returns
    -------
    int
        0.
    """
    import ml_dtypes  # noqa: F401  # without it NumPy does not know bfloat16
    import numpy as np

    from mpipar import checkpoint
    from mpipar.comm import IdentityCommunicator
    from mpipar.models import build_model
    from mpipar.train.recipe import load_recipe
    from mpipar.train.run_folder import RECIPE

    recipe = load_recipe(arguments.run / RECIPE)
    if not arguments.overwrite and (held := _held(arguments.folder)):
        raise CheckpointError(
            f"{arguments.folder} holds {held} already; --overwrite replaces it, or choose another"
        )
    found = checkpoint.load_newest(
        IdentityCommunicator(), arguments.run / "checkpoints", build_model(recipe.model).shapes()
    )
    for text in found.passed_over:
        print(f"note: passed over: {text}", file=sys.stderr)
    weights = found.arrays
    if arguments.dtype is not None:
        kind = np.dtype(arguments.dtype)
        weights = {name: weight.astype(kind) for name, weight in weights.items()}
    checkpoint.export_hf(arguments.folder, recipe.model, weights)
    print(f"step {found.state['step']} of {arguments.run} -> {arguments.folder}")
    return 0


def _held(folder: Path) -> str:
    """What an export would replace there."""
    names = ("config.json", "model.safetensors")
    return next((name for name in names if (folder / name).exists()), "")
