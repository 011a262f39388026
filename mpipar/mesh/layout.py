"""The pure half of a mesh: degrees, order, and rank <-> coordinate both ways."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass

from mpipar.errors import CountOutOfRange, LayoutError
from mpipar.units.remainder import divisors

AXES = ("pp", "dp", "cp", "tp")
"""Mesh axes from outermost to innermost: tensor-parallel neighbours are nearest."""


@dataclass(frozen=True)
class MeshLayout:
    """World size as a product of named degrees, without any communicator.

    Parameters
    ----------
    world_size : int
        Number of ranks.
    pp, dp, cp, tp : int or None
        Degrees of the pipeline, data, context and tensor axes; None (at most one) means what
        remains. After construction all are numbers.
    order : tuple of str or str
        Axes from outermost to innermost.

    Raises
    ------
    LayoutError
        If the degrees do not multiply to the world size; names the nearest valid degrees.

    Examples
    --------
    >>> layout = MeshLayout(8, tp=2)
    >>> layout.dp, layout.coordinate(5)
    (4, {'pp': 0, 'dp': 2, 'cp': 0, 'tp': 1})
    """

    world_size: int
    pp: int | None = 1
    dp: int | None = None
    cp: int | None = 1
    tp: int | None = 1
    order: tuple[str, ...] | str = AXES

    def __post_init__(self) -> None:
        order = tuple(self.order.split()) if isinstance(self.order, str) else tuple(self.order)
        if sorted(order) != sorted(AXES):
            raise LayoutError(
                f"order {' '.join(order)!r} must name each of {', '.join(AXES)} once; "
                f"{' '.join(AXES)!r} is the default"
            )
        object.__setattr__(self, "order", order)
        if self.world_size < 1:
            raise CountOutOfRange("world size", "1 or more", self.world_size)
        given = {axis: getattr(self, axis) for axis in AXES}
        for axis, degree in given.items():
            if degree is not None and (isinstance(degree, bool) or not isinstance(degree, int)):
                raise LayoutError(f"degree {axis}={degree!r} is no whole number; {axis}=1 would do")
            if degree is not None and degree < 1:
                raise CountOutOfRange(f"degree {axis}", "1 or more", degree)
        open_axes = [axis for axis, degree in given.items() if degree is None]
        if len(open_axes) > 1:
            raise LayoutError(
                f"{' and '.join(open_axes)} are both left open; at most one degree can be what "
                "remains"
            )
        known = math.prod(degree for degree in given.values() if degree is not None)
        if self.world_size % known or (not open_axes and known != self.world_size):
            raise LayoutError(self._refusal(given, bool(open_axes)))
        for axis in open_axes:
            object.__setattr__(self, axis, self.world_size // known)

    def _refusal(self, given: Mapping[str, int | None], is_open: bool) -> str:
        text = " x ".join(f"{axis}={d}" for axis, d in given.items() if d not in (None, 1))
        known = math.prod(d for d in given.values() if d is not None)
        choices = []
        for axis, degree in given.items():
            if degree is None or (degree == 1 and is_open):
                continue
            others = known // degree
            if self.world_size % others == 0:
                rest = self.world_size // others
                valid = divisors(rest) if is_open else (rest,)
                near = sorted(valid, key=lambda d: (abs(d - degree), d))[:3]
                choices.append(f"{axis}={' or '.join(map(str, sorted(near)))}")
        hint = f"; {', or '.join(choices)} would do" if choices else ""
        if not choices:
            hint = f"; the degrees must multiply to {self.world_size}, whose divisors are "
            hint += ", ".join(map(str, divisors(self.world_size)))
        return (
            f"{text or 'the mesh'} makes {known} ranks, which does not fit {self.world_size}{hint}"
        )

    @property
    def axes(self) -> tuple[str, ...]:
        """Axes from outermost to innermost."""
        return tuple(self.order)

    @property
    def degrees(self) -> dict[str, int]:
        """Degree of each axis, in the order of the mesh."""
        return {axis: int(getattr(self, axis)) for axis in self.order}

    def degree(self, *axes: str) -> int:
        """Product of the degrees of some axes.

        Parameters
        ----------
        *axes : str
            Names of axes.

        Returns
        -------
        int
            Their product, 1 for none.
        """
        return math.prod(self.degrees[self.check_axis(axis)] for axis in axes)

    def check_axis(self, axis: str) -> str:
        """The axis, or a refusal that names the nearest one.

        Parameters
        ----------
        axis : str
            Name of an axis.

        Returns
        -------
        str
            The same.
        """
        if axis not in AXES:
            near = difflib.get_close_matches(axis, AXES, 1, 0.0)
            raise LayoutError(f"no mesh axis {axis!r}; the axes are {', '.join(AXES)}; {near[0]}?")
        return axis

    def coordinate(self, rank: int) -> dict[str, int]:
        """Where a rank stands.

        Parameters
        ----------
        rank : int
            Rank of the world.

        Returns
        -------
        dict of str to int
            Index along each axis.
        """
        if not 0 <= rank < self.world_size:
            raise CountOutOfRange("rank", f"0..{self.world_size - 1}", rank)
        place = {}
        for axis in reversed(self.axes):
            rank, place[axis] = divmod(rank, self.degrees[axis])
        return {axis: place[axis] for axis in self.order}

    def rank(self, **coordinate: int) -> int:
        """The rank at a coordinate.

        Parameters
        ----------
        **coordinate : int
            Index along each axis; 0 where left out.

        Returns
        -------
        int
            Rank of the world.
        """
        for axis in coordinate:
            self.check_axis(axis)
        rank = 0
        for axis in self.order:
            index, degree = coordinate.get(axis, 0), self.degrees[axis]
            if not 0 <= index < degree:
                raise CountOutOfRange(f"index along {axis}", f"0..{degree - 1}", index)
            rank = rank * degree + index
        return rank

    def ranks(self, rank: int, *axes: str) -> tuple[int, ...]:
        """The ranks that differ from `rank` along `axes` only, in mesh order, itself included.

        Parameters
        ----------
        rank : int
            Rank of the world.
        *axes : str
            Axes that vary.

        Returns
        -------
        tuple of int
            As many as the product of the degrees of `axes`.
        """
        place = self.coordinate(rank)
        found = [place]
        for axis in self.order:
            if axis in [self.check_axis(a) for a in axes]:
                found = [{**p, axis: i} for p in found for i in range(self.degrees[axis])]
        return tuple(self.rank(**p) for p in found)

    def neighbours(self, rank: int, axis: str) -> tuple[int | None, int | None]:
        """The ranks before and after along an axis.

        Parameters
        ----------
        rank : int
            Rank of the world.
        axis : str
            Along which axis.

        Returns
        -------
        tuple of (int or None)
            None beyond the ends; on a ring take the ends of `ranks`.
        """
        line = self.ranks(rank, axis)
        here = line.index(rank)
        before = line[here - 1] if here > 0 else None
        return before, line[here + 1] if here + 1 < len(line) else None

    def __str__(self) -> str:
        """A picture: one row per outer coordinate, the innermost used axis across."""
        used = [axis for axis in self.axes if self.degrees[axis] > 1] or [self.axes[-1]]
        inner, width = used[-1], len(str(self.world_size - 1))
        lines = [" x ".join(f"{axis}={self.degrees[axis]}" for axis in self.order)]
        for rank in range(self.world_size):
            if self.coordinate(rank)[inner]:
                continue
            place = " ".join(f"{axis}{self.coordinate(rank)[axis]}" for axis in used[:-1])
            row = " ".join(f"{r:{width}d}" for r in self.ranks(rank, inner))
            lines.append(f"{place + ' ' if place else ''}{inner}: {row}")
        return "\n".join(lines)
