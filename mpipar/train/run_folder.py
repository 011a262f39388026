"""A run's folder: resolved recipe, metrics as JSON lines, checkpoints, and the loss curve."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sys
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import IO, Any

import numpy as np

from mpipar._version import version as own_version
from mpipar.comm import Communicator
from mpipar.errors import CheckpointError, RecipeError

RECIPE = "recipe.toml"
METRICS = "metrics.jsonl"
CURVE = "loss.png"
LOCK = ".lock"
TIMELINE = "timeline.json"
ENVIRONMENT = "environment.json"


def choose_folder(comm: Communicator, folder: str, resume: bool) -> Path:
    """The run folder of all ranks: a new one, or the one to go on in. Collective.

    Parameters
    ----------
    comm : Communicator
        All ranks; rank 0 looks and makes the folder.
    folder : str
        The user's choice; empty for ``runs/DATE-TIME``, or the newest run when resuming.
    resume : bool
        Whether a run is to go on.

    Returns
    -------
    Path
        Exists.

    Raises
    ------
    RecipeError
        If a new run would overwrite another.
    CheckpointError
        If there is no run to go on.
    """

    def choose() -> str:
        try:
            return str(_resumed(folder) if resume else _fresh(folder))
        except OSError as error:
            raise RecipeError(
                f"run folder {error.filename} cannot be made: {error.strerror}"
            ) from None

    return Path(comm.made_by_root(choose))


@contextlib.contextmanager
def holding(comm: Communicator, folder: Path) -> Iterator[None]:
    """Keep other jobs out of a run folder for as long as this one lasts. Collective.

    Parameters
    ----------
    comm : Communicator
        All ranks; rank 0 holds a lock, which ends with its process.
    folder : Path
        Run folder. Where the file system knows no locks, nothing is held.

    Raises
    ------
    RecipeError
        On every rank, if another job is at work there.
    """
    file: IO[str] | None = None

    def take() -> None:
        nonlocal file
        file = (folder / LOCK).open("a")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise RecipeError(
                f"another job is at work in run folder {folder}; --run names another folder"
            ) from None
        except OSError:
            return

    comm.made_by_root(take)
    try:
        yield
    finally:
        if file is not None:
            file.close()


def discard(folder: Path) -> None:
    """Remove a new run folder in which nothing was written. Local.

    Parameters
    ----------
    folder : Path
        Stays if it holds anything.
    """
    with contextlib.suppress(OSError):
        if {p.name for p in folder.iterdir()} <= {LOCK}:
            (folder / LOCK).unlink(missing_ok=True)
            folder.rmdir()


def write_environment(folder: Path, n_ranks: int) -> None:
    """Note what a run used, as numbers and well-known names. Local.

    Parameters
    ----------
    folder : Path
        Run folder; ``environment.json`` is replaced.
    n_ranks : int
        Of the run.
    """
    mpi4py = sys.modules.get("mpi4py.MPI")
    vendor, version = mpi4py.get_vendor() if mpi4py is not None else ("none", ())
    facts = {
        "mpipar": own_version,
        "python": list(sys.version_info[:3]),
        "numpy": [int(part) for part in np.__version__.split(".")[:2]],
        "mpi": vendor,
        "mpi_version": list(version),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0,
        "n_ranks": n_ranks,
    }
    (folder / ENVIRONMENT).write_text(json.dumps(facts) + "\n", encoding="utf-8")


def _fresh(folder: str) -> Path:
    base = Path(folder) if folder else Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S}"
    place, n = base, 1
    while not folder:
        try:
            place.mkdir(parents=True)  # another job may begin in the same second
            return place
        except FileExistsError:
            place, n = base.with_name(f"{base.name}-{n}"), n + 1
    if (place / METRICS).exists():
        raise RecipeError(
            f"run folder {place} holds a run already; --resume goes on with it, or choose another"
        )
    place.mkdir(parents=True, exist_ok=True)
    return place


def _resumed(folder: str) -> Path:
    if folder:
        place = Path(folder)
    else:
        runs = sorted(p.parent for p in Path("runs").glob(f"*/{RECIPE}"))
        if not runs:
            raise CheckpointError("--resume: no run under 'runs'; name one with --run FOLDER")
        place = runs[-1]
    if not (place / RECIPE).is_file():
        raise CheckpointError(f"--resume: {place} holds no {RECIPE}, so it is no run folder")
    return place


class Metrics:
    """Metrics of a run as JSON lines; rank 0 writes, the others do nothing.

    Parameters
    ----------
    folder : Path
        Run folder.
    is_writer : bool
        Whether this is rank 0.
    from_step : int
        Lines after this step, left by a run that was cut off, are removed.
    """

    def __init__(self, folder: Path, is_writer: bool, from_step: int = 0) -> None:
        self._file = folder / METRICS if is_writer else None
        if self._file is not None and self._file.exists():
            kept = [r for r in read_metrics(folder) if r["step"] <= from_step]
            text = "".join(json.dumps(r) + "\n" for r in kept)
            self._file.write_text(text, encoding="utf-8")

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record.

        Parameters
        ----------
        record : mapping
            JSON values, with ``step``.
        """
        if self._file is not None:
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(dict(record)) + "\n")


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Records of a run; a last line that was cut short is left out.

    Parameters
    ----------
    folder : Path
        Run folder.

    Returns
    -------
    list of dict
        In the order of writing.
    """
    records = []
    for line in (folder / METRICS).read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


def plot_loss(folder: Path, bigram_entropy: float) -> Path | None:
    """Draw the loss curve, if the ``plot`` extra is installed.

    Parameters
    ----------
    folder : Path
        Run folder with metrics.
    bigram_entropy : float
        Drawn as a line to beat, in nats.

    Returns
    -------
    Path or None
        The PNG.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return None
    records = read_metrics(folder)
    trained = [(r["step"], r["loss"]) for r in records if "loss" in r]
    held = [(r["step"], r["held_out_loss"]) for r in records if "held_out_loss" in r]
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for points, style, label in ((trained, "-", "training"), (held, "o", "held out")):
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label)
    axes.axhline(bigram_entropy, color="0.5", ls="--", label="bigram entropy")
    axes.set(xlabel="step", ylabel="loss (nat per byte)")
    axes.legend()
    figure.savefig(folder / CURVE, dpi=120)
    return folder / CURVE
