"""The acting half of a mesh: one sub-communicator per axis and per merged axes."""

from __future__ import annotations

from mpipar.comm import Communicator, IdentityCommunicator
from mpipar.errors import CollectiveMismatch
from mpipar.mesh.layout import AXES, MeshLayout


class Mesh:
    """Named axes over a communicator. Collective to make and to close.

    Parameters
    ----------
    comm : Communicator
        All ranks of the mesh.
    pp, dp, cp, tp : int or None
        Degrees; None (at most one) means what remains.
    order : tuple of str or str
        Axes from outermost to innermost.

    Raises
    ------
    CollectiveMismatch
        If ranks give different degrees; the same on every rank.

    Notes
    -----
    Cost: two small all-gathers to compare the degrees, and one split (two more) for each axis of a
    degree above 1.

    Examples
    --------
    >>> from mpipar.comm import ThreadWorld
    >>> def body(world):
    ...     with Mesh(world, tp=2) as mesh:
    ...         return int(mesh.comm("dp").all_reduce(world.rank))
    >>> ThreadWorld(4).run(body)
    [2, 4, 2, 4]
    """

    def __init__(
        self,
        comm: Communicator,
        *,
        pp: int | None = 1,
        dp: int | None = None,
        cp: int | None = 1,
        tp: int | None = 1,
        order: tuple[str, ...] | str = AXES,
    ) -> None:
        _agree(comm, [str(value) for value in (pp, dp, cp, tp, order)])
        self.layout = MeshLayout(comm.size, pp, dp, cp, tp, order)
        self.world = comm
        self.rank = comm.rank
        self.coordinate = self.layout.coordinate(comm.rank)
        self._comms: dict[tuple[str, ...], Communicator] = {}
        self._asked: dict[tuple[str, ...], Communicator] = {}
        for axis in self.layout.axes:
            self.comm(axis)

    def degree(self, *axes: str) -> int:
        """Product of the degrees of some axes.

        Parameters
        ----------
        *axes : str
            Names of axes.

        Returns
        -------
        int
            Their product.
        """
        return self.layout.degree(*axes)

    def comm(self, *axes: str) -> Communicator:
        """The communicator of the ranks that differ from this one along `axes` only.

        Parameters
        ----------
        *axes : str
            One axis (made with the mesh), or several merged: collective over the mesh the first
            time that a combination is asked for.

        Returns
        -------
        Communicator
            Its ranks in mesh order; closed with the mesh.
        """
        known = self._asked.get(axes)
        if known is not None:
            return known
        wanted = [axis for axis in axes if self.layout.degree(axis) > 1]
        key = tuple(axis for axis in self.layout.axes if axis in wanted)
        if key not in self._comms:
            members = self.layout.ranks(self.rank, *key)
            if len(members) == 1:
                self._comms[key] = IdentityCommunicator(self.world.deterministic)
            elif len(members) == self.world.size:
                self._comms[key] = self.world.labelled("x".join(key) or "world")
            else:
                group = self.world.split(members[0], self.rank, "x".join(key))
                self._comms[key] = group or IdentityCommunicator()
                self._comms[key].deterministic = self.world.deterministic
        found = self._asked[axes] = self._comms[key]
        return found

    def close(self) -> None:
        """Close the sub-communicators. Collective; the world communicator stays open."""
        for comm in self._comms.values():
            if comm.size < self.world.size:
                comm.close()
        self._comms.clear()
        self._asked.clear()

    def __enter__(self) -> Mesh:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __str__(self) -> str:
        return str(self.layout)


def _agree(comm: Communicator, given: list[str]) -> None:
    """Refuse degrees that differ between ranks, alike on all of them."""
    said = comm.all_gather_json(given) if comm.size > 1 else [given]
    for rank, theirs in enumerate(said):
        if theirs != said[0]:
            names = ("pp", "dp", "cp", "tp", "order")
            texts = [
                ", ".join(f"{n}={v}" for n, v in zip(names, row, strict=True))
                for row in (said[0], theirs)
            ]
            raise CollectiveMismatch(
                f"ranks made different meshes: rank 0: {texts[0]}; rank {rank}: {texts[1]}"
            )
