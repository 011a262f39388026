"""Where the ranks of this job stand, and how many threads each may use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mpipar.comm.base import Communicator
from mpipar.launch.binding import fair_threads
from mpipar.launch.environment import in_allocation, thread_settings
from mpipar.launch.place import Place, with_rank


def places(comm: Communicator) -> tuple[Place, ...]:
    """Where every rank stands. Collective.

    Parameters
    ----------
    comm : Communicator
        From `init`.

    Returns
    -------
    tuple of Place
        In the order of the ranks; `mpipar.launch.place.place_table` prints it.

    Notes
    -----
    Cost: one all-gather of some 300 bytes a rank.
    """
    from mpipar.comm.world import own_place

    mine = with_rank(own_place(), comm.rank, blas_threads())
    return tuple(Place.from_json(values) for values in comm.all_gather_json(mine.to_json()))


def blas_threads() -> int:
    """Threads that the loaded array libraries use in this process.

    Returns
    -------
    int
        The largest of them; 1 where none is loaded.
    """
    from threadpoolctl import threadpool_info

    return max((int(pool["num_threads"]) for pool in threadpool_info()), default=1)


def limit_threads(
    environment: Mapping[str, str], cores: Sequence[Sequence[int]], index: int
) -> None:
    """Set the threads of the array libraries: the rank's cores in a batch job, else one.

    `mpipar run` says so in the environment; this is for ranks started by ``mpirun`` or ``srun``.

    Parameters
    ----------
    environment : mapping of str to str
        Where all thread variables are set, the user or the launcher has chosen, and it stays.
    cores : sequence of sequence of int
        Cores of each rank of the node. Bound ranks have their own; others divide them.
    index : int
        Which of them is this process.
    """
    if not thread_settings(environment):
        return
    from threadpoolctl import threadpool_limits

    is_job = in_allocation(environment)
    threadpool_limits(fair_threads([frozenset(c) for c in cores], index) if is_job else 1)
