"""The network as the search sees it: the cost of a group by its degree and its stride.

A ring over a group passes each tier's boundary once for each unit below it. A group that owns
whole units (tensor parallelism over two nodes) crosses on the cards of all its members there; one
that shares its nodes with other groups gets the bandwidth of one device, as the measured gradient
all-reduces of such groups show. The slowest tier decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpipar.planner.configs import ORDERS, Configs
from mpipar.topology.cluster import Cluster

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Scale:
    """A convention in which a collective's bytes are counted (Calculon's, for comparison).

    Parameters
    ----------
    scale, offset : float
        The collective costs ``alpha + bytes x scale x (1 + offset / p) beta``.
    """

    scale: float
    offset: float


RING: Mapping[str, Scale] = {
    "all_reduce": Scale(2.0, -1.0),
    "reduce_scatter": Scale(1.0, -1.0),
    "all_gather": Scale(1.0, -1.0),
    "all_to_all": Scale(1.0, -1.0),
    "send": Scale(1.0, 0.0),
}
"""Bytes of the ring and pairwise forms (Patarasuk and Yuan 2009)."""


@dataclass(frozen=True)
class Fabric:
    """Tiers as arrays.

    Parameters
    ----------
    sizes : tuple of int
        Devices that one group of each tier joins.
    bytes_per_s : tuple of float
        Usable bandwidth of one device through each tier.
    latency_s : tuple of float
        Of one message.
    call_s : float
        Of a collective, however small.
    scales : tuple of mapping
        Bytes of each collective on each tier (default: `RING` everywhere).
    """

    sizes: tuple[int, ...]
    bytes_per_s: tuple[float, ...]
    latency_s: tuple[float, ...]
    call_s: float = 0.0
    scales: tuple[Mapping[str, Scale], ...] = ()

    @classmethod
    def of(cls, cluster: Cluster, call_s: float = 10e-6) -> Fabric:
        """The tiers of a cluster."""
        return cls(
            tuple(tier.n_devices for tier in cluster.tiers),
            tuple(float(tier.bandwidth) for tier in cluster.tiers),
            tuple(float(tier.latency) for tier in cluster.tiers),
            call_s,
        )

    def group(self, degree: Any, stride: Any) -> Group:
        """The cost of groups of `degree` ranks that stand `stride` apart."""
        degree, stride = (np.asarray(x, np.float64) for x in (degree, stride))
        inside, alpha, beta = np.ones_like(degree), np.zeros_like(degree), np.zeros_like(degree)
        top = np.zeros(degree.shape, np.int64)
        for j, size in enumerate(self.sizes):
            within = np.minimum(degree, np.maximum(inside, np.ceil(size / stride)))
            crossed = within > inside
            hops = np.minimum(within / inside - 1, 2 * np.log2(np.maximum(within / inside, 1)))
            alpha = alpha + hops * self.latency_s[j]
            owned = np.where(inside >= (self.sizes[j - 1] if j else 1), inside, 1)
            beta = np.maximum(beta, np.where(crossed, 1 / (self.bytes_per_s[j] * owned), 0))
            top = np.where(crossed, j, top)
            inside = within
        return Group(degree, alpha, beta, top, self)

    def hop(self, distance: Any) -> Group:
        """The cost of a message between two ranks that stand `distance` apart."""
        return self.group(np.full(np.shape(distance), 2.0), distance)


@dataclass(frozen=True)
class Group:
    """Groups with their costs.

    Parameters
    ----------
    degree, alpha_s, beta_s_per_byte : array
        Ranks, latency of one pass around, and seconds a byte on the slowest tier.
    top : array of int
        Highest tier crossed.
    fabric : Fabric
        Where they stand.
    """

    degree: Floats
    alpha_s: Floats
    beta_s_per_byte: Floats
    top: NDArray[np.int64]
    fabric: Fabric

    def time(self, op: str, n_bytes: Any) -> Floats:
        """Seconds of a collective over the whole vector of `n_bytes`; 0 for groups of one."""
        scales = self.fabric.scales or (RING,) * len(self.fabric.sizes)
        factors = [s[op] for s in scales]
        scale = np.array([f.scale for f in factors])[self.top]
        offset = np.array([f.offset for f in factors])[self.top]
        passes = 2 if op == "all_reduce" else 1
        wire = n_bytes * scale * (1 + offset / self.degree) * self.beta_s_per_byte
        time = self.fabric.call_s + passes * self.alpha_s + wire
        return np.asarray(np.where(self.degree > 1, time, 0.0))


def axis_strides(configs: Configs) -> dict[str, NDArray[np.int64]]:
    """Distance between neighbours on each axis, by each configuration's order of axes."""
    found = {axis: np.ones(len(configs), np.int64) for axis in ORDERS[0]}
    for i, order in enumerate(ORDERS):
        mine = np.flatnonzero(configs.order == i)
        stride = np.ones(len(mine), np.int64)
        for axis in reversed(order) if len(mine) else ():
            found[axis][mine] = stride
            stride = stride * getattr(configs, axis)[mine]
    return found
