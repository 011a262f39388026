"""One folder a step: safetensors first, the index last, so an index means a whole checkpoint."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpipar.comm import Communicator
from mpipar.errors import CheckpointError, ParallelismError

Array = NDArray[Any]
_FOLDER = re.compile(r"step-(\d{9})")
_INDEX = "index.json"
_ARRAYS = "arrays-0.safetensors"


def save(
    comm: Communicator,
    folder: Path,
    step: int,
    arrays: Mapping[str, Array],
    state: Mapping[str, Any],
    keep: int = 2,
) -> Path:
    """Write a checkpoint. Collective; rank 0 writes, since replicas are equal.

    Parameters
    ----------
    comm : Communicator
        All ranks.
    folder : Path
        Where the checkpoints of a run stand.
    step : int
        Names the checkpoint.
    arrays : mapping of str to ndarray
        Parameters and optimizer state.
    state : mapping
        Small JSON values, such as the data position.
    keep : int
        How many complete checkpoints stay; older ones are removed once this one is whole.

    Returns
    -------
    Path
        Folder of the checkpoint.

    Raises
    ------
    CheckpointError
        On every rank, if it could not be written; older ones are untouched then.
    """
    target = folder / f"step-{step:09d}"
    outcome: ParallelismError | None = None
    if comm.rank == 0:
        try:
            _write(target, step, arrays, state)
            for old in _complete(folder)[:-keep] if keep > 0 else []:
                shutil.rmtree(old, ignore_errors=True)
        except OSError as error:
            outcome = CheckpointError(f"checkpoint {target} could not be written: {error}")
    comm.broadcast_json(outcome)
    return target


def _write(target: Path, step: int, arrays: Mapping[str, Array], state: Mapping[str, Any]) -> None:
    from safetensors.numpy import save_file

    scratch = target.with_name(f".{target.name}.partial")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    file = scratch / _ARRAYS
    save_file({n: np.ascontiguousarray(a) for n, a in arrays.items()}, file)
    _sync(file)
    index = {
        "format": 1,
        "step": step,
        "state": dict(state),
        "files": {_ARRAYS: {"bytes": file.stat().st_size, "blake2b": _digest(file)}},
    }
    (scratch / _INDEX).write_text(json.dumps(index, indent=1))
    _sync(scratch / _INDEX)
    shutil.rmtree(target, ignore_errors=True)
    scratch.rename(target)
    _sync(target.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _complete(folder: Path) -> list[Path]:
    found = [p for p in folder.glob("step-*") if _FOLDER.fullmatch(p.name)]
    return sorted(p for p in found if (p / _INDEX).is_file() and _why_broken(p) is None)


def _why_broken(place: Path) -> str | None:
    try:
        files = json.loads((place / _INDEX).read_text())["files"]
        for name, facts in files.items():
            size = (place / name).stat().st_size
            if size != facts["bytes"]:
                return f"{place / name} has {size} bytes instead of {facts['bytes']}"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{place}: {type(error).__name__} {error}"
    return None


def newest(comm: Communicator, folder: Path) -> Path | None:
    """The newest complete checkpoint, agreed by all ranks. Collective.

    Parameters
    ----------
    comm : Communicator
        All ranks; they see one file system.
    folder : Path
        Where the checkpoints of a run stand.

    Returns
    -------
    Path or None
        None if there is none.
    """
    steps = sorted(p.name for p in _complete(folder)) if folder.is_dir() else []
    common = set.intersection(*map(set, comm.all_gather_json(steps)))
    return folder / max(common) if common else None


def load(place: Path) -> tuple[dict[str, Array], dict[str, Any]]:
    """Read a checkpoint. Local.

    Parameters
    ----------
    place : Path
        As `newest` returned it.

    Returns
    -------
    tuple
        Arrays by name, and the state that was saved with them.

    Raises
    ------
    CheckpointError
        If it is incomplete, cut short or altered; names the file.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    if why := _why_broken(place):
        raise CheckpointError(f"checkpoint is not whole: {why}")
    index = json.loads((place / _INDEX).read_text())
    file = place / _ARRAYS
    if (digest := _digest(file)) != index["files"][_ARRAYS]["blake2b"]:
        raise CheckpointError(f"{file} was altered: its hash is {digest[:12]}..., not the index's")
    try:
        return load_file(file), index["state"]
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from None
