"""``mpipar train``: the training job."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpipar.cli.main import exit_code
from mpipar.comm import Communicator, init
from mpipar.errors import ParallelismError, RecipeError
from mpipar.train.recipe import Recipe, load_recipe, merge_recipe

if TYPE_CHECKING:
    from mpipar.train.stop import StopRequest
    from mpipar.train.trainer import Trainer


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
        "--mesh",
        metavar="pp=2,...",
        help="degrees of the whole mesh: axes that are not named have 1, dp is what remains",
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
    from mpipar.train.run_folder import choose_folder, discard, holding
    from mpipar.train.stop import StopRequest
    from mpipar.train.trainer import Trainer

    stop = StopRequest()
    comm = init()
    with contextlib.ExitStack() as stack:
        with told_once(comm):
            wanted = comm.made_by_root(lambda: dataclasses.asdict(_recipe(arguments)))
            resumes = comm.made_by_root(lambda: _resumes(arguments, wanted["run"]["folder"]))
            folder = choose_folder(comm, wanted["run"]["folder"], resumes)
            stack.enter_context(holding(comm, folder))
            try:
                if resumes:
                    wanted = comm.made_by_root(lambda: dataclasses.asdict(_kept(arguments, folder)))
                trainer = Trainer(comm, merge_recipe(Recipe(), wanted), folder)
            except ParallelismError:
                if comm.rank == 0 and not resumes:
                    discard(folder)
                raise
            if resumes and (arguments.resume or newest(comm, folder / "checkpoints")):
                trainer.resume()
        return _train(arguments, trainer, folder, stop)


def _train(arguments: argparse.Namespace, trainer: Trainer, folder: Path, stop: StopRequest) -> int:
    """Do the steps that are left and tell of them."""
    from mpipar.train.run_folder import plot_loss

    comm, steps = trainer.comm, trainer.recipe.train.steps
    say = print if comm.rank == 0 and not arguments.quiet else _silent
    tell_places(comm, folder, say if arguments.places else _silent)
    say(f"{comm.size} ranks, mesh {str(trainer.mesh).splitlines()[0]}, run folder {folder}")
    unit = "MB" if trainer.corpus.train.dtype.itemsize == 1 else "M tokens"
    say(f"text: {trainer.corpus.train.size / 1e6:.2f} {unit} to train on, "
        f"{trainer.corpus.held_out.size / 1e6:.2f} {unit} held out, bigram conditional entropy "
        f"{trainer.corpus.bigram_entropy:.4f} nat")  # fmt: skip
    if trainer.step >= steps:
        if comm.rank == 0:
            print(f"the run has all its {steps} steps; --steps {trainer.step + 1} or more goes on")
        return 0
    if trainer.step:
        say(f"going on after step {trainer.step}")
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


def _kept(arguments: argparse.Namespace, folder: Path) -> Recipe:
    """The recipe of a run that goes on: its text and its model stay what they are."""
    from mpipar.train.run_folder import RECIPE

    before = load_recipe(folder / RECIPE)
    recipe = _recipe(arguments, folder / RECIPE)
    if arguments.data is not None and "data.digest" not in " ".join(arguments.settings):
        recipe = merge_recipe(recipe, {"data": {"digest": before.data.digest}})
    model, given = (dataclasses.asdict(r.model) for r in (before, recipe))
    other = [f"model.{k}={v!r}, not {given.get(k)!r}" for k, v in model.items()
             if given.get(k) != v and k != "dropout"]  # fmt: skip
    if other:
        raise RecipeError(f"the run in {folder} has {'; '.join(other)}; a new run may differ")
    return recipe


def _degrees(text: str | None) -> dict[str, str]:
    """The degrees of ``--mesh`` by axis: the whole mesh, axes that are not named have 1."""
    degrees: dict[str, str] = {}
    for part in text.split(",") if text is not None else ():
        axis, equals, degree = (word.strip() for word in part.partition("="))
        if not axis or not equals or not degree:
            raise RecipeError(f"--mesh {text!r} must read axis=degree,..., e.g. pp=2,tp=2")
        if axis in degrees:
            raise RecipeError(f"--mesh {text!r} names {axis} twice")
        degrees[axis] = degree
    return degrees


def _recipe(arguments: argparse.Namespace, source: str | Path | None = None) -> Recipe:
    """Defaults < recipe < ``--set`` < the other options."""
    source = arguments.recipe if source is None else source
    degrees = _degrees(arguments.mesh)
    whole = {"dp": 0, "pp": 1, "tp": 1, "cp": 1, **degrees} if degrees else {}
    settings = [*arguments.settings, *(f"mesh.{axis}={n}" for axis, n in whole.items())]
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
