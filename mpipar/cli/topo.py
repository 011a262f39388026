"""``mpipar topo``: what this node, this job or a described machine looks like."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from mpipar.cli.arguments import PICTURE, new_file
from mpipar.errors import LayoutError
from mpipar.topology.cluster import Cluster
from mpipar.topology.cluster_file import cluster_to_toml, load_cluster
from mpipar.topology.discover import cpu_quota, numa_domains, nvml_devices
from mpipar.topology.presets import PRESETS
from mpipar.topology.rings import best_group, useful_sizes
from mpipar.topology.slurm import job_from_environment, parse_topology_conf
from mpipar.topology.smi import NodeMatrix, draw_matrix, parse_topo_matrix


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of this verb.

    Parameters
    ----------
    parser : argparse.ArgumentParser
        The verb's parser.
    """
    add = parser.add_argument
    add("--cluster", metavar="NAME", help=f"describe {', '.join(PRESETS)}, or a TOML file")
    add("--smi", metavar="FILE", help="read a text of `nvidia-smi topo -m` instead of asking")
    add("--switches", metavar="FILE", help="read Slurm's topology.conf")
    add("--plot", type=new_file(*PICTURE), metavar="FILE",
        help="save a picture: png, svg or pdf (plot extra)")  # fmt: skip
    add("--measure", nargs="?", const="cluster.toml", metavar="FILE",
        help="under a launcher: measure latency and bandwidth between every two ranks, and save "
        "them for `mpipar plan --cluster FILE` (default: cluster.toml)")  # fmt: skip
    add("--format", choices=("text", "json", "toml"), default="text", help="toml: a cluster file")


def main(arguments: argparse.Namespace) -> int:
    """Describe and draw.

    Parameters
    ----------
    arguments : argparse.Namespace
        Options of `configure`.

    Returns
    -------
    int
        0, or 1 where there is nothing to draw.
    """
    if arguments.measure:
        from mpipar.cli.measure import measure_job

        return measure_job(arguments.measure)
    cluster = load_cluster(arguments.cluster) if arguments.cluster else None
    matrix = None if cluster and not arguments.smi else _matrix(arguments.smi)
    if arguments.format == "toml":
        if cluster is None:
            raise LayoutError("--format toml writes a cluster: name it with --cluster")
        print(cluster_to_toml(cluster), end="")
    elif arguments.format == "json":
        print(json.dumps(_facts(cluster, matrix)))
    else:
        print(_cluster_text(cluster) if cluster else _node_text(matrix))
    if arguments.switches:
        tree = parse_topology_conf(Path(arguments.switches).read_text())
        levels = ", ".join(str(n) for n in tree.level_sizes())
        print(f"switches: up to {levels} nodes by level, from the leaves up")
    return _plot(arguments.plot, cluster, matrix) if arguments.plot else 0


def _matrix(file: str | None) -> NodeMatrix | None:
    if file:
        return parse_topo_matrix(Path(file).read_text())
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    done = subprocess.run([tool, "topo", "-m"], capture_output=True, text=True, timeout=60)
    return parse_topo_matrix(done.stdout) if done.returncode == 0 else None


def _facts(cluster: Cluster | None, matrix: NodeMatrix | None) -> dict[str, Any]:
    if cluster:
        return {key: vars(figure) for key, figure in cluster.figures().items()}
    domains = [
        {"index": d.index, "cpus": sorted(d.cpus), "usable": sorted(d.usable)}
        for d in numa_domains()
    ]
    job = job_from_environment(os.environ)
    return {
        "numa": domains,
        "cpu_quota": cpu_quota(),
        "devices": [vars(device) for device in nvml_devices()],
        "matrix": [list(row) for row in matrix.paths] if matrix else [],
        "job": vars(job) if job else None,
    }


def _node_text(matrix: NodeMatrix | None) -> str:
    lines = []
    for domain in numa_domains():
        gib = f", {domain.memory_bytes / 2**30:.1f} GiB" if domain.memory_bytes else ""
        lines.append(
            f"NUMA node {domain.index}: {len(domain.usable)} of {len(domain.cpus)} CPUs usable{gib}"
        )
    quota = cpu_quota()
    lines += [f"control group: {quota:g} CPUs' worth of time"] if quota else []
    lines += [f"{d.kind} {d.ordinal}: {d.name} at {d.bus_id}" for d in nvml_devices()]
    job = job_from_environment(os.environ)
    if job:
        above = f" under {' / '.join(job.switches)}" if job.switches else ""
        lines.append(f"Slurm job on {len(job.nodes)} nodes{above}")
    if matrix is None:
        return "\n".join([*lines, "no NVIDIA devices seen (driver or nvidia-smi missing)"])
    return "\n".join([*lines, "", draw_matrix(matrix) + _ring_text(matrix)])


def _ring_text(matrix: NodeMatrix) -> str:
    topology = matrix.topology()
    gpus = [topology.device_ids()[i] for i in matrix.gpus]
    if len(gpus) < 2 or len(gpus) != topology.num_devices:
        return ""
    lines = ["", "rings over direct links (group: how many at once):"]
    for size in useful_sizes(topology)[1:]:
        group, n_rings = best_group(topology, size)
        lines.append(f"  {size} GPUs {' '.join(map(str, group))}: {n_rings}")
    return "\n".join(lines)


def _cluster_text(cluster: Cluster) -> str:
    lines = [f"{cluster.name}: {cluster.n_devices} devices"]
    for node in cluster.nodes:
        lines.append(
            f"  {node.n_nodes} x {node.name}: {node.n_devices} x {node.device}, "
            f"{node.memory_gib.value:g} GiB, {node.peak_tflop_s.value:g} TFLOP/s, "
            f"{node.memory_gb_s.value:g} GB/s"
        )
    for tier in cluster.tiers:
        lines.append(
            f"  {tier.name}: joins {tier.n_devices}, {tier.gb_s.value:g} GB/s a device "
            f"({tier.gb_s.origin}) at {tier.efficiency.value:.0%} ({tier.efficiency.origin}), "
            f"{tier.latency_us.value:g} us ({tier.latency_us.origin})"
        )
    return "\n".join(lines)


def _plot(file: str, cluster: Cluster | None, matrix: NodeMatrix | None) -> int:
    from mpipar.topology.draw import draw_cluster, draw_node

    node = matrix.topology() if matrix else None
    if cluster:
        draw_cluster(cluster, node).savefig(file)
    elif node:
        from matplotlib.figure import Figure

        picture = Figure()
        draw_node(node, picture.add_subplot(), "this node")
        picture.savefig(file)
    else:
        print("nothing to draw: no devices seen; name a machine with --cluster")
        return 1
    return 0
