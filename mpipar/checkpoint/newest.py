"""Which checkpoint a run goes on from: the newest sound one."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mpipar.checkpoint.extent import Extent
from mpipar.checkpoint.store import complete, load, order_of, read_index
from mpipar.comm import Communicator
from mpipar.comm.call import Array
from mpipar.errors import CheckpointError, DamagedCheckpoint


class Newest(NamedTuple):
    """What was read.

    Parameters
    ----------
    place : Path
        Folder of the checkpoint.
    arrays : dict of str to ndarray
        By name.
    state : dict
        Saved with them.
    passed_over : tuple of str
        What is wrong with newer ones.
    """

    place: Path
    arrays: dict[str, Array]
    state: dict[str, Any]
    passed_over: tuple[str, ...]


def newest(comm: Communicator, folder: Path, without: Container[str] = ()) -> Path | None:
    """The newest complete checkpoint, agreed by all ranks. Collective.

    Parameters
    ----------
    comm : Communicator
        All ranks; they see one file system.
    folder : Path
        Where the checkpoints of a run stand.
    without : container of str, optional
        Names of folders that are not looked at.

    Returns
    -------
    Path or None
        None if there is none.
    """
    steps = sorted(p.name for p in complete(folder)) if folder.is_dir() else []
    common = set.intersection(*map(set, comm.all_gather_json(steps)))
    left = [folder / name for name in common if name not in without]
    return max(left, key=order_of, default=None)


def load_newest(
    comm: Communicator,
    folder: Path,
    names: Iterable[str] | None = None,
    extents: Mapping[str, Extent] | None = None,
) -> Newest:
    """Read the newest sound checkpoint; those that are cut short or altered are passed over.

    Collective.

    Parameters
    ----------
    comm : Communicator
        All ranks.
    folder : Path
        Where the checkpoints of a run stand.
    names, extents
        As in `load`.

    Returns
    -------
    Newest
        With what is wrong with newer ones.

    Raises
    ------
    CheckpointError
        If there is no sound one, or it lacks an array.
    """
    wanted = None if names is None else list(names)
    wrong = _incomplete(folder)
    while (place := newest(comm, folder, wrong)) is not None:
        try:
            arrays, state = load(place, wanted, extents, comm)
        except DamagedCheckpoint as error:
            wrong[place.name] = str(error)
            continue
        order = order_of(place)
        newer = [text for name, text in wrong.items() if order_of(Path(name)) > order]
        return Newest(place, arrays, state, tuple(newer))
    reasons = "".join(f"; {text}" for _, text in sorted(wrong.items()))
    raise CheckpointError(f"no complete checkpoint in {folder}{reasons}")


def _incomplete(folder: Path) -> dict[str, str]:
    """What is wrong with the others, by name."""
    wrong = {}
    for place in folder.glob("step-*"):
        if order_of(place) >= (0, 0):
            try:
                read_index(place)
            except DamagedCheckpoint as error:
                wrong[place.name] = str(error)
    return wrong
