"""Devices, links, clusters and the cost of collectives on them: pure values, no communicator."""

from mpipar.topology.cluster import Cluster, Figure, NodeClass, Origin, Tier
from mpipar.topology.cluster_file import cluster_from_toml, cluster_to_toml, load_cluster
from mpipar.topology.cost import CollectiveCost, LinkCost, cheapest, collective_cost
from mpipar.topology.cost_fit import CostFit, fit_cost
from mpipar.topology.devices import DeviceId, DeviceTopology
from mpipar.topology.link import DeviceInfo, DeviceKind, Interconnect, Link
from mpipar.topology.presets import PRESETS
from mpipar.topology.rings import best_group, find_rings, useful_sizes
from mpipar.topology.smi import NodeMatrix, draw_matrix, parse_topo_matrix

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
