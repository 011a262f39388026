"""One folder a step: safetensors first, the index last, so an index means a whole checkpoint."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpipar.checkpoint.extent import Extent
from mpipar.checkpoint.reader import Held, Reader
from mpipar.comm import Communicator
from mpipar.errors import CheckpointError, DamagedCheckpoint

Array = NDArray[Any]
_FOLDER = re.compile(r"step-(\d{9})(?:\.(\d+))?")
_INDEX = "index.json"


def save(
    comm: Communicator,
    folder: Path,
    step: int,
    arrays: Mapping[str, Array],
    state: Mapping[str, Any],
    keep: int = 2,
    is_writer: bool | None = None,
    extents: Mapping[str, Extent] | None = None,
) -> Path:
    """Write a checkpoint: one file per writing rank, the index last. Collective.

    Parameters
    ----------
    comm : Communicator
        All ranks; they see one file system.
    folder : Path
        Where the checkpoints of a run stand.
    step : int
        Names the checkpoint.
    arrays : mapping of str to ndarray
        Parameters and optimizer state of this rank.
    state : mapping
        Small JSON values, such as the data position; rank 0's count.
    keep : int
        How many complete checkpoints stay; older ones are removed once this one is whole.
    is_writer : bool, optional
        Whether this rank writes its arrays; by default rank 0 alone, since replicas are equal.
    extents : mapping of str to Extent, optional
        Which parts of whole arrays some of them are; padding behind a part is not written.

    Returns
    -------
    Path
        Folder of the checkpoint.

    Raises
    ------
    CheckpointError
        On every rank, if it could not be written; older ones are untouched then.
    """
    target, scratch = folder_of(folder, step), prepare(comm, folder, step)
    writes = comm.rank == 0 if is_writer is None else is_writer
    parts = extents or {}

    def write_mine() -> dict[str, Any]:
        if not writes:
            return {}
        mine = {n: a if n not in parts else a[parts[n].at()] for n, a in arrays.items()}
        file = scratch / f"arrays-{comm.rank}.safetensors"
        return write(file, mine, {name: parts.get(name) for name in mine})

    def publish_all() -> None:
        if comm.rank == 0:
            publish(folder, step, state, files, keep)

    written = _everywhere(comm, target, write_mine)
    files = {name: facts for part in written for name, facts in part.items()}
    _everywhere(comm, target, publish_all)
    return target


def folder_of(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step stands."""
    return folder / f"step-{step:09d}"


def scratch_of(folder: Path, step: int) -> Path:
    """Where a checkpoint is written before it gets its name."""
    return folder / f".step-{step:09d}.partial"


def prepare(comm: Communicator, folder: Path, step: int) -> Path:
    """An empty folder to write into; what was left over goes. Collective.

    Parameters
    ----------
    comm : Communicator
        All ranks.
    folder : Path
        Where the checkpoints of a run stand.
    step : int
        Names the checkpoint.

    Returns
    -------
    Path
        The folder.

    Raises
    ------
    CheckpointError
        On every rank, if it cannot be made.
    """
    scratch = scratch_of(folder, step)

    def make() -> None:
        if comm.rank == 0:
            for left_over in folder.glob(".step-*.partial"):
                shutil.rmtree(left_over, ignore_errors=True)
            scratch.mkdir(parents=True)

    _everywhere(comm, folder_of(folder, step), make)
    return scratch


def _everywhere(comm: Communicator, target: Path, function: Callable[[], Any]) -> list[Any]:
    """What a function gives on each rank; its failure anywhere is raised on all ranks."""
    from safetensors import SafetensorError

    value: Any
    try:
        value = function()
    except (OSError, SafetensorError, TypeError, ValueError) as error:
        value = CheckpointError(f"checkpoint {target} could not be written: {error}")
    return comm.all_gather_json(value)


def write(
    file: Path, arrays: Mapping[str, Array], held: Mapping[str, Extent | None]
) -> dict[str, Any]:
    """Write one file. Local.

    Parameters
    ----------
    file : Path
        Where.
    arrays : mapping of str to ndarray
        Whole arrays or parts.
    held : mapping of str to Extent or None
        Which parts they are.

    Returns
    -------
    dict
        Its name with size, hash and the arrays in it.
    """
    from safetensors.numpy import save_file

    save_file({name: np.asarray(array, order="C") for name, array in arrays.items()}, file)
    _sync(file)
    names = {name: None if part is None else part.to_mapping() for name, part in held.items()}
    facts = {"bytes": file.stat().st_size, "blake2b": _digest(file), "arrays": names}
    return {file.name: facts}


def publish(
    folder: Path, step: int, state: Mapping[str, Any], files: Mapping[str, Any], keep: int
) -> None:
    """Write the index and give the folder its name, in that order; then old ones go. Local.

    Nothing is removed before the new one stands: a step that is saved again has a number behind
    its name until the one before is gone.

    Parameters
    ----------
    folder, step, state, keep
        As in `save`.
    files : mapping
        What `write` told of every file.
    """
    scratch, target = scratch_of(folder, step), folder_of(folder, step)
    index = {"format": 2, "step": step, "state": dict(state), "files": dict(files)}
    sealed = {**index, "blake2b": _seal(index)}
    (scratch / _INDEX).write_text(json.dumps(sealed, indent=1), encoding="utf-8")
    _sync(scratch / _INDEX)
    _sync(scratch)
    before = _of_step(folder, step)
    newer = target.with_name(f"{target.name}.{order_of(before[-1])[1] + 1}") if before else target
    scratch.rename(newer)
    _sync(folder)
    standing = complete(folder)
    for place in {*before, *(standing[:-keep] if keep > 0 else [])}:
        gone = place.with_name(f".{place.name}.partial")  # never half a checkpoint of that name
        place.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)
    if not target.exists():
        newer.rename(target)


def order_of(place: Path) -> tuple[int, int]:
    """Step and repetition of a folder's name; -1 for other names."""
    found = _FOLDER.fullmatch(place.name)
    return (int(found[1]), int(found[2] or 0)) if found else (-1, -1)


def _of_step(folder: Path, step: int) -> list[Path]:
    return sorted((p for p in folder.glob("step-*") if order_of(p)[0] == step), key=order_of)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def complete(folder: Path) -> list[Path]:
    """Checkpoints whose files are all there in their full length, the oldest first."""
    found = sorted((p for p in folder.glob("step-*") if order_of(p) >= (0, 0)), key=order_of)
    return [p for p in found if _is_complete(p)]


def _seal(index: Mapping[str, Any]) -> str:
    """Hash of what an index says."""
    rest = {key: value for key, value in index.items() if key != "blake2b"}
    return hashlib.blake2b(json.dumps(rest, sort_keys=True).encode(), digest_size=16).hexdigest()


def read_index(place: Path) -> dict[str, Any]:
    """The index of a checkpoint whose files are all there in their full length."""
    try:
        index: dict[str, Any] = json.loads((place / _INDEX).read_text(encoding="utf-8"))
        if _seal(index) != index["blake2b"]:
            raise ValueError("it was altered: its hash does not fit")
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise DamagedCheckpoint(f"{place / _INDEX} cannot be read: {error!r}") from None
    for name, facts in index["files"].items():
        try:
            size = (place / name).stat().st_size
        except OSError as error:
            raise DamagedCheckpoint(f"{place / name} cannot be read: {error.strerror}") from None
        if size != facts["bytes"]:
            raise DamagedCheckpoint(f"{place / name} has {size} bytes instead of {facts['bytes']}")
    return index


def _is_complete(place: Path) -> bool:
    try:
        read_index(place)
    except CheckpointError:
        return False
    return True


def load(
    place: Path,
    names: Iterable[str] | None = None,
    extents: Mapping[str, Extent] | None = None,
    comm: Communicator | None = None,
) -> tuple[dict[str, Array], dict[str, Any]]:
    """Read a checkpoint, or some of its arrays, or parts of them. Local without `comm`.

    Parameters
    ----------
    place : Path
        As `newest` returned it.
    names : iterable of str, optional
        Which arrays; only files that hold one of them are read. All by default.
    extents : mapping of str to Extent, optional
        Parts that are wanted instead of whole arrays, whatever parts the files hold.
    comm : Communicator, optional
        Ranks that share the check of the files, each file once; all of them call this.

    Returns
    -------
    tuple
        Arrays by name, and the state that was saved with them.

    Raises
    ------
    CheckpointError
        If it is incomplete, cut short or altered (names the file), or lacks an array.
    """
    index = read_index(place)
    held: dict[str, list[Held]] = {}
    for name, facts in index["files"].items():
        for array, values in _described(facts["arrays"]):
            held.setdefault(array, []).append((place / name, values))
    wanted = list(held) if names is None else list(names)
    problem: CheckpointError | None = None
    if missing := sorted(set(wanted) - set(held)):
        problem = CheckpointError(f"{place} lacks {', '.join(missing[:3])}")
    needed = {file.name for name in wanted for file, _ in held.get(name, ())}
    mine = sorted(needed) if comm is None else sorted(index["files"])[comm.rank :: comm.size]
    _agree(comm, problem or _altered(place, index["files"], mine))
    arrays, parts = {}, extents or {}
    with ExitStack() as stack:
        reader = Reader(place, stack)
        try:
            arrays = {n: reader.read(n, held[n], parts.get(n)) for n in wanted}
        except CheckpointError as error:
            problem = error
    _agree(comm, problem)
    return arrays, index["state"]


def _agree(comm: Communicator | None, problem: CheckpointError | None) -> None:
    """Raise a problem of any rank on all."""
    if comm is not None:
        comm.all_gather_json(problem)
    elif problem is not None:
        raise problem


def _described(arrays: Any) -> list[tuple[str, Extent | None]]:
    """Arrays of a file with what they hold; the first format had whole ones only, in a list."""
    pairs = arrays.items() if isinstance(arrays, dict) else ((name, None) for name in arrays)
    return [(name, Extent.from_mapping(v) if v else None) for name, v in pairs]


def _altered(
    place: Path, files: Mapping[str, Any], names: Iterable[str]
) -> DamagedCheckpoint | None:
    """What is wrong with the first file whose hash is not that of the index."""
    for name in names:
        if (digest := _digest(place / name)) != files[name]["blake2b"]:
            return DamagedCheckpoint(
                f"{place / name} was altered: its hash is {digest}, not the index's"
            )
    return None
