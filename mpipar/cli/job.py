"""``mpipar job train RECIPE``: print the Slurm script of a run."""

from __future__ import annotations

import argparse
import sys

from mpipar.errors import LaunchError, LayoutError, UnevenSplit
from mpipar.launch.script import JobRequest, job_script, limit_seconds
from mpipar.mesh.layout import MeshLayout
from mpipar.train.recipe import Recipe, load_recipe
from mpipar.units.remainder import exact_size


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options.

    Parameters
    ----------
    parser : argparse.ArgumentParser
        Of the verb.
    """
    parser.description = (
        "Print the Slurm script of a run. Example: mpipar job train recipe.toml --nodes 2 "
        "--gpus-per-node 4 --time 02:00:00 > train.sbatch && sbatch train.sbatch"
    )
    add = parser.add_argument
    add("kind", choices=["train"], help="what the job does")
    add("recipe", help="TOML recipe; its mesh must fill the allocation")
    add("--nodes", type=_positive, required=True, metavar="N")
    add("--gpus-per-node", type=int, required=True, metavar="G", help="0 for a job on CPUs")
    add("--ranks-per-node", type=_positive, metavar="R", help="of a node (default: one a GPU)")
    add(
        "--cpus-per-task",
        type=_positive,
        default=8,
        metavar="C",
        help="cores of a rank (default 8)",
    )
    add(
        "--time",
        type=_limit,
        required=True,
        metavar="LIMIT",
        help="as Slurm takes it: 30, 02:00:00, 1-12",
    )
    add("--launcher", choices=["srun", "mpirun"], default="srun")
    add("--mpi", choices=["openmpi", "mpich"], default="openmpi", help="decides srun's --mpi")
    add("--checkpoint-before", type=_positive, metavar="SECONDS",
        help="the run stops with a checkpoint so long before the limit (default 300)")  # fmt: skip
    add("--pieces", type=int, default=0, metavar="N",
        help="an array of N jobs one after the other instead of requeueing")  # fmt: skip
    add("--sbatch", action="append", default=[], metavar="OPTION",
        help="a further option, as --sbatch=--partition=gpu")  # fmt: skip


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a whole number of at least 1 is needed, got {text!r}")
    return int(text)


def _limit(text: str) -> str:
    try:
        limit_seconds(text)
    except LaunchError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def main(arguments: argparse.Namespace) -> int:
    """Print the script.

    Parameters
    ----------
    arguments : argparse.Namespace
        As parsed.

    Returns
    -------
    int
        Exit code 0.

    Raises
    ------
    LayoutError
        If the recipe's mesh does not fill the allocation.
    """
    recipe = load_recipe(arguments.recipe)
    per_node = arguments.ranks_per_node or arguments.gpus_per_node or 1
    job = JobRequest(
        arguments.recipe,
        arguments.nodes,
        per_node,
        arguments.gpus_per_node,
        arguments.cpus_per_task,
        arguments.time,
        arguments.launcher,
        "pmix" if arguments.mpi == "openmpi" else "pmi2",
        arguments.checkpoint_before or max(1, min(300, limit_seconds(arguments.time) // 4)),
        arguments.pieces,
        tuple(arguments.sbatch),
    )
    script = job_script(job)
    check_fill(recipe, arguments.nodes, per_node)
    if arguments.gpus_per_node and per_node != arguments.gpus_per_node:
        print(
            f"note: {per_node} ranks on {arguments.gpus_per_node} GPUs of a node; one rank a GPU "
            "is the usual choice",
            file=sys.stderr,
        )
    print(script, end="")
    return 0


def check_fill(recipe: Recipe, n_nodes: int, ranks_per_node: int) -> MeshLayout:
    """The recipe's mesh on an allocation, or a refusal.

    Parameters
    ----------
    recipe : Recipe
        With its mesh.
    n_nodes, ranks_per_node : int
        The allocation.

    Returns
    -------
    MeshLayout
        With every degree known.

    Raises
    ------
    LayoutError
        If the degrees do not multiply to the ranks.
    UnevenSplit
        If the batch does not divide over the mesh.
    """
    m, n_ranks = recipe.mesh, n_nodes * ranks_per_node
    allocation = f"{n_nodes} nodes x {ranks_per_node} ranks"
    try:
        mesh = MeshLayout(n_ranks, m.pp or None, m.dp or None, m.cp or None, m.tp or None, m.order)
        exact_size(recipe.train.batch, mesh.degree("dp"), "train.batch", "dp")
    except UnevenSplit as error:
        raise UnevenSplit("train.batch / dp", f"on {allocation}: {error.details}") from None
    except LayoutError as error:
        raise LayoutError(f"the mesh of the recipe does not fill {allocation}: {error}") from None
    return mesh
