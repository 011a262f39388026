"""A whole machine as node classes and switch tiers, never as a matrix over its devices.

A tier joins groups of devices: the first is the node, the last the whole machine. A group of
ranks that stand `stride` apart is described by how many of them each tier joins, which is all
that a collective's cost needs, so 32,768 devices cost no more than eight. Every figure carries
where it comes from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from mpipar.errors import LayoutError, OutOfRange
from mpipar.topology.link import DeviceKind
from mpipar.units import Bytes, BytesPerSecond, FlopsPerSecond, Seconds

if TYPE_CHECKING:
    import networkx


class Origin(StrEnum):
    """Where a figure comes from."""

    MEASURED = "measured"
    GIVEN = "given"
    PUBLISHED = "published"
    ASSUMED = "assumed"


@dataclass(frozen=True)
class Figure:
    """A number with its origin.

    Parameters
    ----------
    value : float
        In the unit that its owner states.
    origin : Origin
        Where it comes from.
    source : str
        In words.
    """

    value: float
    origin: Origin = Origin.GIVEN
    source: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.value < float("inf"):
            raise OutOfRange("figure", "0 or more and finite", self.value)


@dataclass(frozen=True)
class NodeClass:
    """Equal nodes.

    Parameters
    ----------
    name : str
        For people.
    n_nodes : int
        How many there are.
    n_devices : int
        Devices of a node.
    device : str
        Name of a device.
    kind : DeviceKind
        Its kind.
    memory_gib, peak_tflop_s, memory_gb_s : Figure
        Of one device: memory in 2**30 bytes, dense 16-bit matrix peak in 10^12 operations a
        second, memory bandwidth in 10^9 bytes a second.
    """

    name: str
    n_nodes: int
    n_devices: int
    device: str
    kind: DeviceKind
    memory_gib: Figure
    peak_tflop_s: Figure
    memory_gb_s: Figure

    def __post_init__(self) -> None:
        if self.n_nodes < 1 or self.n_devices < 1:
            raise LayoutError(
                f"node class {self.name}: {self.n_nodes} nodes of {self.n_devices} devices; "
                "both must be 1 or more"
            )

    @property
    def memory(self) -> Bytes:
        """Memory of one device."""
        return Bytes(round(self.memory_gib.value * 2**30))

    @property
    def peak(self) -> FlopsPerSecond:
        """Peak of one device."""
        return FlopsPerSecond(self.peak_tflop_s.value * 1e12)


@dataclass(frozen=True)
class Tier:
    """One level of the network.

    Parameters
    ----------
    name : str
        Such as `node`, `leaf switch`, `group`, `machine`.
    n_devices : int
        Devices that one group of this tier joins.
    gb_s : Figure
        What each device can send through this tier while all others do, one direction, in 10^9
        bytes a second.
    latency_us : Figure
        Time of one small message, in microseconds.
    efficiency : Figure
        Share of the bandwidth that a large collective reaches.
    """

    name: str
    n_devices: int
    gb_s: Figure
    latency_us: Figure
    efficiency: Figure = field(default=Figure(0.9, Origin.ASSUMED))

    @property
    def bandwidth(self) -> BytesPerSecond:
        """Usable bandwidth of one device: line rate times efficiency."""
        return BytesPerSecond(self.gb_s.value * self.efficiency.value * 1e9)

    @property
    def latency(self) -> Seconds:
        """Latency of one message."""
        return Seconds(self.latency_us.value * 1e-6)


@dataclass(frozen=True)
class Cluster:
    """Node classes and tiers.

    Parameters
    ----------
    name : str
        For people.
    nodes : tuple of NodeClass
        All with the same number of devices a node.
    tiers : tuple of Tier
        From the node out; each group size divides the next, the last holds every device.
    """

    name: str
    nodes: tuple[NodeClass, ...]
    tiers: tuple[Tier, ...]

    def __post_init__(self) -> None:
        if not self.nodes or not self.tiers:
            raise LayoutError(f"cluster {self.name} needs a node class and a tier at least")
        sizes = [tier.n_devices for tier in self.tiers]
        local = {node.n_devices for node in self.nodes}
        if local != {sizes[0]}:
            raise LayoutError(
                f"cluster {self.name}: nodes have {sorted(local)} devices, the first tier "
                f"({self.tiers[0].name}) joins {sizes[0]}; they must be equal"
            )
        for below, above in pairwise(sizes):
            if below > above or above % below:
                raise LayoutError(
                    f"cluster {self.name}: a tier of {above} devices cannot be made of groups of "
                    f"{below}; {above // below * below or below} would do"
                )
        if sizes[-1] < self.n_devices:
            raise LayoutError(
                f"cluster {self.name} has {self.n_devices} devices, its last tier joins {sizes[-1]}"
            )

    @property
    def n_devices(self) -> int:
        """All devices."""
        return sum(node.n_nodes * node.n_devices for node in self.nodes)

    @property
    def weakest(self) -> NodeClass:
        """What a job over all classes can count on in every node: the class with least memory."""
        return min(self.nodes, key=lambda n: (n.memory_gib.value, n.peak_tflop_s.value))

    def take(self, n_devices: int) -> Cluster:
        """The same machine with only `n_devices` devices, from its first classes.

        Parameters
        ----------
        n_devices : int
            How many; less than a node, or whole nodes.

        Returns
        -------
        Cluster
            Tiers that are no longer crossed stay, so figures do not change.

        Raises
        ------
        LayoutError
            If there are not so many, or the last node would be cut.
        """
        local = self.tiers[0].n_devices
        if not 1 <= n_devices <= self.n_devices or (n_devices > local and n_devices % local):
            near = min(max(n_devices // local, 1) * local, self.n_devices)
            raise LayoutError(
                f"{n_devices} devices of {self.name} ({self.n_devices} in nodes of {local}) "
                f"cannot be taken; {near} would do"
            )
        nodes, left = [], n_devices
        for node in self.nodes:
            n_nodes = min(node.n_nodes, -(-left // local))
            if n_nodes > 0:
                per_node = min(left, local)
                values = vars(node) | {"n_nodes": n_nodes, "n_devices": per_node}
                nodes.append(NodeClass(**values))
                left -= n_nodes * per_node
        tiers = self.tiers
        if n_devices < local:
            first = Tier(**(vars(tiers[0]) | {"n_devices": n_devices}))
            tiers = (first,)
        return Cluster(self.name, tuple(nodes), tiers)

    def spans(self, degree: int, stride: int) -> tuple[int, ...]:
        """How many ranks of a group each tier joins, for a group of ranks `stride` apart.

        Parameters
        ----------
        degree : int
            Ranks of the group.
        stride : int
            Distance between neighbours, in device numbers.

        Returns
        -------
        tuple of int
            One factor a tier, 1 where the group does not spread; their product is at least
            `degree` and equal to it where the sizes divide.
        """
        inside, factors = 1, []
        for tier in self.tiers:
            within = min(degree, max(inside, -(-tier.n_devices // stride)))
            factors.append(-(-within // inside))
            inside = within
        return tuple(factors)

    def to_networkx(self) -> networkx.Graph[Any]:
        """Tiers and node classes as a small tree for networkx (needs the `plot` extra).

        Returns
        -------
        networkx.Graph
            One vertex a tier and a node class, whatever the number of devices; `count` says how
            many it stands for, an edge's `weight` is the bandwidth of a device in bytes a second.
        """
        import networkx

        graph = networkx.Graph(name=self.name)
        for node in self.nodes:
            graph.add_node(node.name, count=node.n_nodes, n_devices=node.n_devices)
        below = [node.name for node in self.nodes]
        for tier in self.tiers[1:]:
            graph.add_node(tier.name, count=-(-self.n_devices // tier.n_devices))
            graph.add_edges_from(
                (name, tier.name, {"weight": float(tier.bandwidth)}) for name in below
            )
            below = [tier.name]
        return graph

    def figures(self) -> dict[str, Figure]:
        """Every figure by a dotted name, with its origin.

        Returns
        -------
        dict of str to Figure
            Names such as ``tiers.node.gb_s``.
        """
        named = [*((f"nodes.{n.name}", n) for n in self.nodes)]
        named += [(f"tiers.{t.name}", t) for t in self.tiers]  # type: ignore[misc]
        return {
            f"{name}.{key}": value
            for name, owner in named
            for key, value in vars(owner).items()
            if isinstance(value, Figure)
        }


def strides(order: Sequence[str], degrees: Mapping[str, int]) -> dict[str, int]:
    """Distance between neighbours on each mesh axis.

    Parameters
    ----------
    order : sequence of str
        Axes from outermost to innermost.
    degrees : mapping of str to int
        Size of each axis.

    Returns
    -------
    dict of str to int
        Stride of each axis, 1 for the innermost.
    """
    stride, found = 1, {}
    for axis in reversed(order):
        found[axis] = stride
        stride *= degrees[axis]
    return found
