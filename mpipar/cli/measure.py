"""``mpipar topo --measure``: what this job's links and ranks do, as a cluster file."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from mpipar.comm import Communicator, init
from mpipar.comm.placement import places
from mpipar.errors import LaunchError, LayoutError
from mpipar.topology.cluster import Cluster, Figure, NodeClass, Origin, Tier
from mpipar.topology.cluster_file import cluster_to_toml
from mpipar.topology.cost_fit import CostFit, fit_cost
from mpipar.topology.discover import numa_domains
from mpipar.topology.link import DeviceKind

SIZES = tuple(1 << k for k in range(3, 23))
"""Bytes of the messages, 8 to 4 MiB."""
Pair = tuple[int, int]


def ping_pong(comm: Communicator, peer: int, n_bytes: int, n_repeats: int) -> float:
    """Median seconds of one message between this rank and another; both call it.

    Parameters
    ----------
    comm : Communicator
        Both ranks are in it.
    peer : int
        The other rank.
    n_bytes : int
        Of a message.
    n_repeats : int
        Round trips after the first, which is not counted.

    Returns
    -------
    float
        Half a round trip.
    """
    there, back = np.zeros(n_bytes, np.uint8), np.empty(n_bytes, np.uint8)
    times = []
    for _ in range(n_repeats + 1):
        start = time.perf_counter()
        if comm.rank < peer:
            comm.send(there, peer)
            comm.recv(back, peer)
        else:
            comm.recv(back, peer)
            comm.send(there, peer)
        times.append(time.perf_counter() - start)
    return median(times[1:]) / 2


def measure_pairs(
    comm: Communicator, sizes: Sequence[int] = SIZES, n_repeats: int = 30
) -> dict[Pair, list[tuple[float, float]]]:
    """Ping-pong between every two ranks, one pair at a time. Collective.

    Parameters
    ----------
    comm : Communicator
        All ranks.
    sizes : sequence of int
        Bytes of the messages.
    n_repeats : int
        Round trips of a size.

    Returns
    -------
    dict
        Bytes and seconds by pair, the same on every rank.
    """
    found: list[list[Any]] = []
    for a in range(comm.size):
        for b in range(a + 1, comm.size):
            comm.barrier()
            if comm.rank in (a, b):
                peer = b if comm.rank == a else a
                times = [(n, ping_pong(comm, peer, n, n_repeats)) for n in sizes]
                found += [[a, b, times]] if comm.rank == a else []
    told = comm.all_gather_json(found)
    return {(a, b): [(n, t) for n, t in times] for part in told for a, b, times in part}


def measured_cluster(
    pairs: Mapping[Pair, Sequence[tuple[float, float]]],
    nodes: Sequence[str],
    own: Mapping[str, float],
) -> Cluster:
    """A cluster of what was measured; a rank is a device.

    Parameters
    ----------
    pairs : mapping
        Of `measure_pairs`.
    nodes : sequence of str
        Node of each rank; names do not get into the cluster.
    own : mapping of str to float
        `memory_gib`, `peak_tflop_s` and `memory_gb_s` of the weakest rank.

    Returns
    -------
    Cluster
        One tier in the node, and one between nodes where there are several; the slowest pair of
        a tier decides, since a collective waits for it.

    Raises
    ------
    LayoutError
        If nodes hold different numbers of ranks.
    """
    counts = {node: list(nodes).count(node) for node in nodes}
    if len(set(counts.values())) > 1:
        raise LayoutError(
            f"nodes hold {sorted(counts.values())} ranks; start as many on each of them"
        )
    local = len(nodes) // len(counts)

    def tier(name: str, n_devices: int, is_local: bool) -> Tier:
        fits = [
            fit_cost(points, with_root=False)
            for (a, b), points in pairs.items()
            if (nodes[a] == nodes[b]) is is_local
        ]
        gb_s = min((_gb_s(f) for f in fits), default=1.0)  # one rank a node: never used
        latency = max((f.constant_s * 1e6 for f in fits), default=0.0)
        worst = max((f.left_out_error for f in fits), default=0.0)
        how = f"ping-pong, {len(fits)} pairs one at a time, left-out error to {worst:.0%}"
        origin = Origin.MEASURED if fits else Origin.ASSUMED
        bandwidth, delay = (Figure(x, origin, how) for x in (gb_s, latency))
        whole = Figure(1.0, origin, "included in the bandwidth")
        return Tier(name, n_devices, bandwidth, delay, whole)

    tiers = [tier("node", local, True)]
    if len(counts) > 1:
        tiers.append(tier("machine", len(nodes), False))
    names = ("memory_gib", "peak_tflop_s", "memory_gb_s")
    figures = (Figure(own[name], Origin.MEASURED, "all ranks at once") for name in names)
    node = NodeClass("node", len(counts), local, "rank", DeviceKind.CPU, *figures)
    return Cluster("measured", (node,), tuple(tiers))


def _gb_s(fit: CostFit) -> float:
    return 1e-9 / max(fit.per_byte_s, 1e-15)


def measure_rank(comm: Communicator, n_local: int) -> dict[str, float]:
    """What the weakest rank has and does while all work. Collective.

    Parameters
    ----------
    comm : Communicator
        All ranks.
    n_local : int
        Ranks that share a node.

    Returns
    -------
    dict of str to float
        As in `measured_cluster`.
    """
    a, out = np.ones((512, 512), np.float32), np.empty((512, 512), np.float32)
    line, copy = np.ones(1 << 22), np.empty(1 << 22)
    comm.barrier()
    product = _median_seconds(lambda: np.matmul(a, a, out=out))
    moved = _median_seconds(lambda: np.copyto(copy, line))
    memory = sum(domain.memory_bytes for domain in numa_domains()) / 2**30 / n_local
    own = {
        "memory_gib": memory,
        "peak_tflop_s": 2 * 512**3 / product / 1e12,
        "memory_gb_s": 2 * line.nbytes / moved / 1e9,
    }
    told = comm.all_gather_json(own)
    return {name: min(each[name] for each in told) for name in own}


def _median_seconds(work: Callable[[], Any], n_repeats: int = 9) -> float:
    times = []
    for _ in range(n_repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return median(times)


def measure_job(file: str) -> int:
    """Measure, print the pairs, and save the cluster. Collective over the job.

    Parameters
    ----------
    file : str
        TOML file to write.

    Returns
    -------
    int
        Exit code 0.

    Raises
    ------
    LaunchError
        With one rank.
    """
    comm = init()
    if comm.size < 2:
        raise LaunchError("topo --measure needs 2 ranks or more: mpipar run -n 2 topo --measure")
    nodes = [place.node for place in places(comm)]
    pairs = measure_pairs(comm)
    own = measure_rank(comm, nodes.count(nodes[comm.rank]))
    cluster = measured_cluster(pairs, nodes, own)
    if comm.rank == 0:
        print("ranks     latency us    GB/s  left-out error")
        for (a, b), points in sorted(pairs.items()):
            fit = fit_cost(points, with_root=False)
            latency_us = fit.constant_s * 1e6
            print(
                f"{a:>3} {b:>3} {latency_us:>13.2f} {_gb_s(fit):>7.2f} {fit.left_out_error:>15.0%}"
            )
        Path(file).write_text(cluster_to_toml(cluster))
        print(f"saved: {file}; use it with `mpipar plan MODEL --cluster {file}`")
    return 0
