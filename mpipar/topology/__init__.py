"""Devices, links, clusters and the cost of collectives on them: pure values, no communicator."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpipar.topology.cluster import Cluster, Figure, NodeClass, Origin, Tier
    from mpipar.topology.cluster_file import cluster_from_toml, cluster_to_toml, load_cluster
    from mpipar.topology.cost import CollectiveCost, LinkCost, cheapest, collective_cost
    from mpipar.topology.cost_fit import CostFit, fit_cost
    from mpipar.topology.devices import (
        DeviceId,
        DeviceInfo,
        DeviceKind,
        DeviceTopology,
        Interconnect,
        Link,
    )
    from mpipar.topology.presets import PRESETS
    from mpipar.topology.rings import best_group, find_rings, useful_sizes
    from mpipar.topology.smi import NodeMatrix, draw_matrix, parse_topo_matrix

_HOMES = {
    "cluster": ("Cluster", "Figure", "NodeClass", "Origin", "Tier"),
    "cluster_file": ("cluster_from_toml", "cluster_to_toml", "load_cluster"),
    "cost": ("CollectiveCost", "LinkCost", "cheapest", "collective_cost"),
    "cost_fit": ("CostFit", "fit_cost"),
    "devices": (
        "DeviceId",
        "DeviceInfo",
        "DeviceKind",
        "DeviceTopology",
        "Interconnect",
        "Link",
    ),
    "presets": ("PRESETS",),
    "rings": ("best_group", "find_rings", "useful_sizes"),
    "smi": ("NodeMatrix", "draw_matrix", "parse_topo_matrix"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Cluster",
    "CollectiveCost",
    "CostFit",
    "DeviceId",
    "DeviceInfo",
    "DeviceKind",
    "DeviceTopology",
    "Figure",
    "Interconnect",
    "Link",
    "LinkCost",
    "NodeClass",
    "NodeMatrix",
    "Origin",
    "PRESETS",
    "Tier",
    "best_group",
    "cheapest",
    "cluster_from_toml",
    "cluster_to_toml",
    "collective_cost",
    "draw_matrix",
    "find_rings",
    "fit_cost",
    "load_cluster",
    "parse_topo_matrix",
    "useful_sizes",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
