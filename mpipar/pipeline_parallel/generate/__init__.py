"""The generators, one small module each, and their names."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from typing import Any, Final

from mpipar.errors import ScheduleError
from mpipar.pipeline_parallel.costs import Costs, Number
from mpipar.pipeline_parallel.generate.automatic import automatic
from mpipar.pipeline_parallel.generate.dualpipe_v import dualpipe_v
from mpipar.pipeline_parallel.generate.gpipe import gpipe
from mpipar.pipeline_parallel.generate.interleaved import interleaved
from mpipar.pipeline_parallel.generate.one_forward_one_backward import one_forward_one_backward
from mpipar.pipeline_parallel.generate.zb_v import zb_v
from mpipar.pipeline_parallel.generate.zero_bubble import zb_h1, zb_h2
from mpipar.pipeline_parallel.schedule import Schedule

_GENERATORS: Final[dict[str, Callable[..., Schedule]]] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved": interleaved,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "zb-v": zb_v,
    "dualpipe-v": dualpipe_v,
    "auto": automatic,
}
SCHEDULE_NAMES: Final = tuple(_GENERATORS)

_OPTIONS: Final = {
    "interleaved": ("n_chunks", "group_size"),
    "zb-v": ("costs",),
    "auto": ("costs", "memory_limit"),
}


def chunks_per_rank(name: str, n_chunks: int = 2) -> int:
    """Stages that each rank owns in a schedule.

    Parameters
    ----------
    name : str
        One of `SCHEDULE_NAMES`.
    n_chunks : int
        Chunks of the interleaved schedule.

    Returns
    -------
    int
        2 for the V-shaped schedules, `n_chunks` for the interleaved one, else 1.
    """
    return {"interleaved": n_chunks, "zb-v": 2, "dualpipe-v": 2}.get(name, 1)


def build_schedule(
    name: str,
    n_ranks: int,
    n_microbatches: int,
    *,
    n_chunks: int = 2,
    group_size: int | None = None,
    costs: Costs | None = None,
    memory_limit: Number | None = None,
) -> Schedule:
    """Build a schedule by its name.

    Parameters
    ----------
    name : str
        One of `SCHEDULE_NAMES`; case and underscores do not matter.
    n_ranks, n_microbatches : int
        Sizes.
    n_chunks, group_size : int, optional
        For "interleaved"; the others leave them aside, so that one call serves all.
    costs : Costs, optional
        For "zb-v" (of its chunks) and "auto".
    memory_limit : number, optional
        For "auto".

    Returns
    -------
    Schedule
        Valid by construction.

    Raises
    ------
    ScheduleError
        For an unknown name, or sizes at which the schedule is not defined; names the nearest.
    """
    key = name.lower().replace("_", "-")
    if key not in _GENERATORS:
        near = get_close_matches(key, _GENERATORS, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"names are {', '.join(_GENERATORS)}"
        raise ScheduleError(f"no schedule is called {name!r}; {hint}")
    given: dict[str, Any] = {
        "n_chunks": n_chunks,
        "group_size": group_size,
        "costs": costs,
        "memory_limit": memory_limit,
    }
    options = {option: given[option] for option in _OPTIONS.get(key, ())}
    return _GENERATORS[key](n_ranks, n_microbatches, **options)
