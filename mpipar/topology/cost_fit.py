"""Cost of a collective from measured times, with the error on sizes left out of the fit.

The model is ``t(n) = a + b n + c sqrt(n)`` with no negative part: the alpha-beta line, and the
square-root term of a transfer pipelined in segments of the best size, whose cost is the square of
``sqrt(r a) + sqrt(n b)`` (Chan et al. 2007). The term stays only where it lowers the error on the
size left out, so a fit has at most three parameters and never more than sizes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from mpipar.errors import CountOutOfRange, OutOfRange
from mpipar.topology.cost import FORMS, LinkCost
from mpipar.units import Bytes, Seconds

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class CostFit:
    """A fitted cost.

    Parameters
    ----------
    constant_s, per_byte_s, per_root_byte_s : float
        The three parts a, b and c.
    fit_error : float
        Mean relative error on the points of the fit.
    left_out_error : float
        Mean relative error on each size by a fit without it.
    n_sizes : int
        Distinct sizes.
    """

    constant_s: float
    per_byte_s: float
    per_root_byte_s: float
    fit_error: float
    left_out_error: float
    n_sizes: int

    def time(self, n_bytes: Bytes | int) -> Seconds:
        """Predicted time for a size.

        Parameters
        ----------
        n_bytes : Bytes or int
            The whole vector.

        Returns
        -------
        Seconds
            Of the collective.
        """
        n = np.array([float(int(Bytes(n_bytes)))])
        parts = np.array([self.constant_s, self.per_byte_s, self.per_root_byte_s])
        return Seconds(float((_terms(n, True) @ parts)[0]))

    def link(self, op: str, algorithm: str, n_ranks: int) -> LinkCost:
        """The alpha and beta that make this algorithm cost the constant and linear parts.

        Parameters
        ----------
        op, algorithm : str
            Keys of `mpipar.topology.cost.FORMS`.
        n_ranks : int
            Ranks that took part.

        Returns
        -------
        LinkCost
            To be used at other rank counts; the square-root part is left out.
        """
        rounds, sent, _ = FORMS[op][algorithm](n_ranks, 1.0)
        return LinkCost(self.constant_s / max(rounds, 1), self.per_byte_s / max(sent, 1e-30))


def fit_cost(points: Iterable[tuple[float, float]], with_root: bool = True) -> CostFit:
    """Fit times to sizes with relative weights.

    Parameters
    ----------
    points : iterable of (float, float)
        Bytes and seconds; at least three distinct sizes.
    with_root : bool
        Whether the square-root term may be used.

    Returns
    -------
    CostFit
        With two parameters, or three where that lowers the left-out error.

    Raises
    ------
    CountOutOfRange
        With fewer sizes than parameters and one to leave out.
    OutOfRange
        If a size or a time is not positive.
    """
    table = np.array(sorted(points), dtype=np.float64).reshape(-1, 2)
    sizes, times = table[:, 0], table[:, 1]
    n_sizes = len(set(sizes.tolist()))
    if n_sizes < 3:
        raise CountOutOfRange("distinct sizes of a fit", "3 or more", n_sizes)
    if not (table > 0).all():
        raise OutOfRange("sizes and times of a fit", "above 0", float(table.min()))
    fits = []
    for root in (False, True)[: 1 + (with_root and n_sizes > 3)]:
        parts = _solve(sizes, times, root)
        error = float(np.abs(_terms(sizes, root) @ parts / times - 1).mean())
        fits.append((_left_out(sizes, times, root), error, (*parts.tolist(), 0.0)[:3]))
    left_out, error, (a, b, c) = min(fits, key=lambda fit: fit[0])
    return CostFit(a, b, c, error, left_out, n_sizes)


def _terms(sizes: Floats, root: bool) -> Floats:
    return np.stack([np.ones_like(sizes), sizes, *([np.sqrt(sizes)] if root else [])], axis=1)


def _solve(sizes: Floats, times: Floats, root: bool) -> Floats:
    """Least squares of the relative error over all subsets of terms with no negative part."""
    matrix = _terms(sizes, root) / times[:, None]
    n_terms, ones = matrix.shape[1], np.ones(len(times))
    best, least = np.zeros(n_terms), np.inf
    for kept in (k for n in range(1, n_terms + 1) for k in combinations(range(n_terms), n)):
        some = list(kept)
        parts = np.linalg.lstsq(matrix[:, some], ones, rcond=None)[0]
        error = float(((matrix[:, some] @ parts - 1) ** 2).sum())
        if (parts >= 0).all() and error < least:
            best, least = np.zeros(n_terms), error
            best[some] = parts
    return best


def _left_out(sizes: Floats, times: Floats, root: bool) -> float:
    errors: list[float] = []
    for size in np.unique(sizes):
        out = sizes == size
        parts = _solve(sizes[~out], times[~out], root)
        errors += np.abs(_terms(sizes[out], root) @ parts / times[out] - 1).tolist()
    return float(np.mean(errors))
