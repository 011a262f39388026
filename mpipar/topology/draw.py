"""Pictures of topologies (needs the `plot` extra): boxes, and lines as wide as their links."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from mpipar.topology.cluster import Cluster
from mpipar.topology.devices import DeviceId, DeviceTopology
from mpipar.topology.link import DeviceKind, Interconnect

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Picture

_COLOURS = {
    Interconnect.NVLINK: "tab:green",
    Interconnect.INFINITY_FABRIC: "tab:red",
    Interconnect.PCIE: "tab:blue",
    Interconnect.SHARED_MEMORY: "tab:purple",
    Interconnect.NETWORK: "tab:orange",
    Interconnect.UNKNOWN: "tab:gray",
}


def draw_node(
    topology: DeviceTopology, axes: Axes, name: str = "", centre: DeviceId | None = None
) -> None:
    """Draw one node: devices on a circle, a line for every linked pair.

    Parameters
    ----------
    topology : DeviceTopology
        The node.
    axes : matplotlib.axes.Axes
        Where to draw; its limits are set.
    name : str
        Title.
    centre : DeviceId, optional
        A device, such as a switch, that is drawn in the middle of the circle.
    """
    ids = topology.device_ids()
    ring = [i for i in ids if i != centre]
    spot = {i: _spot(place, len(ring)) for place, i in enumerate(ring)}
    if centre is not None:
        spot[centre] = (0.0, 0.0)
    widest = max((link.width for i in ids for _, link in topology.links(i)), default=1.0) or 1.0
    kinds = {}
    for a in ids:
        for b, link in topology.links(a):
            if a < b or (a != b and topology.link(b, a) is None):
                line = _line(axes, spot[a], spot[b], link.width / widest, link.interconnect)
                kinds[link.interconnect] = line
    for i in ids:
        info = topology.device(i)
        box = "round" if info.kind is not DeviceKind.OTHER else "square"
        label = f"{info.name}\n#{i}"
        style = {"boxstyle": box, "facecolor": "white", "edgecolor": "black"}
        axes.text(*spot[i], label, ha="center", va="center", fontsize=7, bbox=style)
    axes.set(xlim=(-1.35, 1.35), ylim=(-1.35, 1.35), aspect="equal", title=name)
    axes.axis("off")
    if kinds:
        axes.legend(
            list(kinds.values()), [str(kind) for kind in kinds], fontsize=7, loc="lower right"
        )


def _spot(place: int, n_devices: int) -> tuple[float, float]:
    angle = math.pi / 2 - 2 * math.pi * place / max(n_devices, 1)
    return math.cos(angle), math.sin(angle)


def _line(axes: Axes, a: Any, b: Any, share: float, kind: Interconnect) -> Any:
    (line,) = axes.plot(
        (a[0], b[0]), (a[1], b[1]), color=_COLOURS[kind], linewidth=0.4 + 2.6 * share, zorder=0
    )
    return line


def draw_cluster(cluster: Cluster, node: DeviceTopology | None = None, n_shown: int = 2) -> Picture:
    """Draw the first nodes of a machine and the switch tiers above them.

    Parameters
    ----------
    cluster : Cluster
        The machine.
    node : DeviceTopology, optional
        What to draw inside a node (default: devices around their switch).
    n_shown : int
        How many nodes to draw.

    Returns
    -------
    matplotlib.figure.Figure
        Save it with its `savefig`; no window is opened.
    """
    from matplotlib.figure import Figure as Picture

    inside = node or _star(cluster)
    centre = None if node else inside.device_ids()[-1]
    n_nodes = sum(part.n_nodes for part in cluster.nodes)
    shown = min(n_shown, n_nodes)
    picture = Picture(figsize=(4 * shown, 3.4 + 0.5 * len(cluster.tiers)))
    for i in range(shown):
        axes = picture.add_axes((i / shown, 0.0, 1 / shown, 0.72))
        draw_node(inside, axes, f"node {i} of {n_nodes}", centre)
    top = picture.add_axes((0.0, 0.74, 1.0, 0.24))
    for level, tier in enumerate(cluster.tiers[1:]):
        text = (
            f"{tier.name}: {tier.n_devices} devices, "
            f"{tier.gb_s.value:g} GB/s each ({tier.gb_s.origin})"
        )
        top.text(0.5, 0.3 + 0.4 * level, text, ha="center", bbox={"facecolor": "0.93"})
        for i in range(shown if level == 0 else 1):
            x = (i + 0.5) / shown if level == 0 else 0.5
            top.plot(
                (0.5, x), (0.3 + 0.4 * level, -0.1 + 0.4 * level), color="tab:orange", zorder=0
            )
    top.set(xlim=(0, 1), ylim=(-0.1, 1.4))
    top.text(0.5, 1.25, cluster.name, ha="center", fontsize=12)
    top.axis("off")
    return picture


def _star(cluster: Cluster) -> DeviceTopology:
    """A node's devices, each linked to the one that stands for their switch."""
    from mpipar.topology.link import DeviceInfo, Link

    first, tier = cluster.nodes[0], cluster.tiers[0]
    topology = DeviceTopology(
        DeviceInfo(i, first.kind, first.device) for i in range(first.n_devices)
    )
    switch = topology.add_device(DeviceInfo(0, DeviceKind.OTHER, tier.name))
    kind = Interconnect.NVLINK if first.kind is DeviceKind.CUDA else Interconnect.UNKNOWN
    for i in topology.device_ids()[:-1]:
        topology.add_link(i, switch, Link(kind, tier.bandwidth, tier.latency))
    return topology
