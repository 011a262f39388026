"""``mpipar train``: the training job."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mpipar.cli.main import exit_code
from mpipar.comm import Communicator, init
from mpipar.errors import ParallelismError, RecipeError
from mpipar.train.recipe import Recipe, load_recipe, merge_recipe


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options.

    Parameters
    ----------
    parser : argparse.ArgumentParser
        Of the verb.
    """
    parser.description = (
        "Train a byte-level GPT, data-parallel over the ranks: on the sources of Python's own "
        "standard library, or on --data. Example: mpipar run -n 2 train --set train.steps=100"
    )
    parser.add_argument("recipe", nargs="?", help="TOML recipe; a run folder's repeats that run")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE",
                        dest="settings", help="change one key of the recipe")  # fmt: skip
    parser.add_argument(
        "--data", metavar="PATH", help="file or folder to train on; tokens if it ends in .npy"
    )
    parser.add_argument("--init", metavar="MODEL",
                        help="start from the weights of a Hugging Face folder or GGUF file, which "
                        "decide the model; --set model.sequence=N shortens rows")  # fmt: skip
    parser.add_argument("--steps", type=int, help="optimizer steps")
    parser.add_argument(
        "--mesh", metavar="pp=2,...", help="degrees of the mesh; dp is what remains"
    )
    parser.add_argument("--schedule", help="of the pipeline: a name, or a file")
    parser.add_argument("--run", metavar="FOLDER", help="run folder")
    parser.add_argument("--resume", action="store_true",
                        help="go on from the newest complete checkpoint")  # fmt: skip
    parser.add_argument("--resume-if-any", action="store_true",
                        help="go on if --run holds a run, else start it")  # fmt: skip
    parser.add_argument(
        "--places", action="store_true", help="print each rank's node, cores, GPU and network card"
    )
    parser.add_argument("--trace", action="store_true",
                        help="record every call and part of a step: `mpipar trace`")  # fmt: skip
    parser.add_argument("--quiet", action="store_true", help="only the table at the end")


def main(arguments: argparse.Namespace) -> int:
    """Train. Collective over the job.

    Parameters
    ----------
    arguments : argparse.Namespace
        As parsed.

    Returns
    -------
    int
        Exit code 0.
    """
    from mpipar.checkpoint import newest
    from mpipar.train.run_folder import RECIPE, choose_folder, plot_loss
    from mpipar.train.stop import StopRequest
    from mpipar.train.trainer import Trainer

    stop = StopRequest()
    comm = init()
    say = print if comm.rank == 0 and not arguments.quiet else _silent
    with told_once(comm):
        source = arguments.recipe
        wanted = comm.made_by_root(lambda: dataclasses.asdict(_recipe(arguments, source)))
        resumes = comm.made_by_root(lambda: _resumes(arguments, wanted["run"]["folder"]))
        folder = choose_folder(comm, wanted["run"]["folder"], resumes)
        if resumes:
            source = folder / RECIPE
            wanted = comm.made_by_root(lambda: dataclasses.asdict(_recipe(arguments, source)))
        trainer = Trainer(comm, merge_recipe(Recipe(), wanted), folder)
    tell_places(comm, folder, say if arguments.places else _silent)
    say(f"{comm.size} ranks, mesh {str(trainer.mesh).splitlines()[0]}, run folder {folder}")
    unit = "MB" if trainer.corpus.train.dtype.itemsize == 1 else "M tokens"
    say(f"text: {trainer.corpus.train.size / 1e6:.2f} {unit} to train on, "
        f"{trainer.corpus.held_out.size / 1e6:.2f} {unit} held out, bigram conditional entropy "
        f"{trainer.corpus.bigram_entropy:.4f} nat")  # fmt: skip
    if resumes and (arguments.resume or newest(comm, folder / "checkpoints")):
        say(f"going on after step {trainer.resume()}")
    figures = trainer.run(say, stop)
    if comm.rank == 0:
        curve = plot_loss(folder, trainer.corpus.bigram_entropy)
        print(table(figures, folder))
        if curve is not None:
            print(f"loss curve: {curve}")
    return 0


def _resumes(arguments: argparse.Namespace, folder: str) -> bool:
    """Whether the run goes on; of a run that never wrote a checkpoint only the recipe is kept."""
    from mpipar.train.run_folder import RECIPE

    if arguments.resume_if_any and not folder:
        raise RecipeError("--resume-if-any needs the run's folder: --run FOLDER")
    return bool(arguments.resume or (arguments.resume_if_any and Path(folder, RECIPE).is_file()))


def tell_places(comm: Communicator, folder: Path, say: Callable[[str], None]) -> None:
    """Write the table of ranks into the run folder, and warn of what is wrong in it. Collective.

    Parameters
    ----------
    comm : Communicator
        All ranks.
    folder : Path
        Run folder.
    say : callable
        Gets the table, on rank 0.
    """
    from mpipar.comm.placement import places
    from mpipar.launch.place import place_problems, place_table

    found = places(comm)
    if comm.rank == 0:
        text = place_table(found)
        (folder / "ranks.txt").write_text(text + "\n", encoding="utf-8")
        say(text)
        for problem in place_problems(found):
            print(f"note: {problem}", file=sys.stderr)


def _silent(_: str) -> None:
    return None


@contextlib.contextmanager
def told_once(comm: Communicator) -> Iterator[None]:
    """Let rank 0 alone tell errors of a part in which all ranks raise the same ones.

    Parameters
    ----------
    comm : Communicator
        All ranks.
    """
    try:
        yield
    except ParallelismError as error:
        if comm.rank == 0:
            raise
        raise SystemExit(exit_code(error)) from None


def _recipe(arguments: argparse.Namespace, source: str | Path | None) -> Recipe:
    """Defaults < recipe < ``--set`` < the other options."""
    degrees = arguments.mesh.split(",") if arguments.mesh else []
    settings = [*arguments.settings, *(f"mesh.{degree.strip()}" for degree in degrees)]
    changes: dict[str, dict[str, Any]] = {"data": {}, "train": {}, "run": {}}
    if arguments.data is not None:
        changes["data"] = {"path": arguments.data, "digest": ""}
    model = None
    if arguments.init is not None:
        from mpipar.checkpoint import open_pretrained

        model = open_pretrained(arguments.init).config
        changes["train"]["init"] = str(Path(arguments.init).absolute())
    if arguments.steps is not None:
        changes["train"]["steps"] = arguments.steps
    if arguments.schedule is not None:
        changes["train"]["schedule"] = arguments.schedule
    if arguments.run is not None:
        changes["run"]["folder"] = arguments.run
    if arguments.trace:
        changes["run"]["trace"] = True
    return merge_recipe(load_recipe(source, settings, model), changes)


def table(figures: dict[str, Any], folder: Any) -> str:
    """The table at the end of a run.

    Parameters
    ----------
    figures : dict
        From `Trainer.run`.
    folder : Path
        Run folder.

    Returns
    -------
    str
        Two columns.
    """
    held, bigram = figures.get("held_out_loss"), figures["bigram entropy"]
    rows = [
        ("steps", f"{figures['steps']}"),
        ("ranks", f"{figures['ranks']}"),
        ("parameters", f"{figures['parameters']:,}"),
        ("training loss", f"{figures['training loss']:.4f} nat"),
        ("held-out loss", f"{held:.4f} nat" if held is not None else "not evaluated"),
        ("bigram conditional entropy", f"{bigram:.4f} nat"),
        ("below the bigram entropy", f"{bigram - held:.4f} nat" if held is not None else "-"),
        ("tokens/s", f"{figures['tokens_per_s']:,.0f}"),
        ("tokens/s/rank", f"{figures['tokens_per_s'] / figures['ranks']:,.0f}"),
        ("communication", f"{figures['communication_share']:.1%} of the time"),
        ("largest peak memory", f"{figures['largest peak GiB']:.2f} GiB"),
        ("time", f"{figures['seconds']:.1f} s"),
        ("run folder", str(folder)),
    ]
    if predicted := figures.get("predicted step s"):
        measured = figures["step s"]
        off = f"{measured / predicted - 1:+.0%}"
        both = f"{predicted:.4g} s predicted, {measured:.4g} s measured ({off})"
        rows.insert(-2, ("time a step", both))
    width = max(len(name) for name, _ in rows)
    rule = "-" * (width + 2 + max(len(value) for _, value in rows))
    return "\n".join([rule, *(f"{name:<{width}}  {value}" for name, value in rows), rule])
