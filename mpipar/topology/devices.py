"""Devices of one node and the links between them.

A `DeviceTopology` is a small directed graph: devices get ids as they are added, links carry a
bandwidth and a latency. Links to ids that were never given are refused, ties are broken by the
lowest id, and a pair without a link of its own is reached over the widest, then shortest, path.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NewType

from mpipar.errors import CountOutOfRange, LayoutError, NonFiniteValue
from mpipar.units import Bytes, BytesPerSecond, Seconds

if TYPE_CHECKING:
    import networkx

MIB = 2**20
NO_TIME = Seconds(0)

DeviceId = NewType("DeviceId", int)
"""Index of a device in its topology, given by `DeviceTopology.add_device`."""


class DeviceKind(StrEnum):
    """What a device is."""

    CPU = "cpu"
    CUDA = "cuda"
    ROCM = "rocm"
    METAL = "metal"
    INTEL_GPU = "intel-gpu"
    OTHER = "other"


class Interconnect(StrEnum):
    """What a link is made of."""

    NVLINK = "nvlink"
    PCIE = "pcie"
    INFINITY_FABRIC = "infinity-fabric"
    SHARED_MEMORY = "shared-memory"
    NETWORK = "network"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class DeviceInfo:
    """One device: its number under its driver, its kind and name, and what is known of it.

    Parameters
    ----------
    ordinal : int
        The driver's number; not a key between libraries (join by `bus_id` or UUID).
    kind : DeviceKind
        What it is.
    name : str
        Name for people.
    memory_bytes : int
        Memory; 0 means unknown.
    gflops : float
        Peak in 10^9 operations a second; 0 means unknown.
    bus_id : str
        PCI bus id with its domain, "" where there is none.
    """

    ordinal: int
    kind: DeviceKind
    name: str
    memory_bytes: int = 0
    gflops: float = 0.0
    bus_id: str = ""

    def __post_init__(self) -> None:
        if self.ordinal < 0 or self.memory_bytes < 0:
            raise CountOutOfRange(
                "device ordinal and memory", "0 or more", min(self.ordinal, self.memory_bytes)
            )
        if not 0 <= self.gflops < float("inf"):
            raise NonFiniteValue("device gflops", self.gflops)

    def with_memory_bytes(self, memory_bytes: int) -> DeviceInfo:
        """The same device with its memory given, in bytes."""
        return replace(self, memory_bytes=memory_bytes)

    def with_gflops(self, gflops: float) -> DeviceInfo:
        """The same device with its peak given, in 10^9 operations a second."""
        return replace(self, gflops=gflops)


@dataclass(frozen=True)
class Link:
    """One directed link, or several bonded ones that act as one.

    Parameters
    ----------
    interconnect : Interconnect
        What it is made of.
    bandwidth : BytesPerSecond or None
        Bandwidth of all its lanes together; None means unknown.
    latency : Seconds
        Time before the first byte arrives.
    lanes : int
        Number of bonded links (the `4` of `NV4`).
    """

    interconnect: Interconnect
    bandwidth: BytesPerSecond | None
    latency: Seconds = NO_TIME
    lanes: int = 1

    def __post_init__(self) -> None:
        if self.lanes < 1:
            raise CountOutOfRange("link lanes", "1 or more", self.lanes)

    @classmethod
    def of_mb_s(cls, interconnect: Interconnect, mb_s: float, latency_us: float = 0.0) -> Link:
        """A link from its bandwidth in 2**20 bytes a second (0: unknown) and latency in us."""
        bandwidth = BytesPerSecond(mb_s * MIB) if mb_s else None
        return cls(interconnect, bandwidth, Seconds(latency_us * 1e-6))

    def with_latency(self, latency: Seconds) -> Link:
        """The same link with its latency given."""
        return replace(self, latency=latency)

    def transfer_time(self, n_bytes: Bytes | int) -> Seconds | None:
        """Time to move `n_bytes`: latency + bytes / bandwidth; None if the bandwidth is unknown."""
        return self.latency + Bytes(n_bytes) / self.bandwidth if self.bandwidth else None

    @property
    def width(self) -> float:
        """Bandwidth in bytes a second for comparisons, 0 when unknown."""
        return float(self.bandwidth) if self.bandwidth else 0.0


class DeviceTopology:
    """Devices and directed links, with deterministic answers.

    Parameters
    ----------
    devices : iterable of DeviceInfo
        Devices to add at once; their ids count from 0.
    """

    def __init__(self, devices: Iterable[DeviceInfo] = ()) -> None:
        self._devices: list[DeviceInfo] = list(devices)
        self._links: dict[DeviceId, dict[DeviceId, Link]] = {}

    @property
    def num_devices(self) -> int:
        """Number of devices."""
        return len(self._devices)

    def device_ids(self) -> tuple[DeviceId, ...]:
        """All ids, ascending."""
        return tuple(DeviceId(i) for i in range(len(self._devices)))

    def add_device(self, info: DeviceInfo) -> DeviceId:
        """Add a device and return its id."""
        self._devices.append(info)
        return DeviceId(len(self._devices) - 1)

    def device(self, device: DeviceId) -> DeviceInfo:
        """What is known of a device."""
        self._check(device)
        return self._devices[device]

    def add_link(self, a: DeviceId, b: DeviceId, link: Link) -> None:
        """Link two devices in both directions (one, when both are the same device)."""
        self.add_directed_link(a, b, link)
        self.add_directed_link(b, a, link)

    def add_directed_link(self, source: DeviceId, target: DeviceId, link: Link) -> None:
        """Link `source` to `target` only; a second link between the two replaces the first."""
        self._check(source, target)
        self._links.setdefault(source, {})[target] = link

    def link(self, source: DeviceId, target: DeviceId) -> Link | None:
        """The link between two devices itself, None where there is none."""
        self._check(source, target)
        return self._links.get(source, {}).get(target)

    def links(self, source: DeviceId) -> tuple[tuple[DeviceId, Link], ...]:
        """The links that leave a device, by target id."""
        self._check(source)
        return tuple(sorted(self._links.get(source, {}).items()))

    def path(self, source: DeviceId, target: DeviceId) -> tuple[DeviceId, ...] | None:
        """The widest path, then the one with fewest hops, then with the lowest ids.

        Parameters
        ----------
        source, target : DeviceId
            Ends of the path; equal ends give a path of one device.

        Returns
        -------
        tuple of DeviceId or None
            The devices passed, both ends included; None where no link leads there.
        """
        self._check(source, target)
        width = self._width(source, target)
        if width is None:
            return None
        frontier: list[tuple[DeviceId, ...]] = [(source,)]
        seen = {source}
        while frontier:
            reached: list[tuple[DeviceId, ...]] = []
            for route in frontier:
                if route[-1] == target:
                    return route
                for peer, link in self.links(route[-1]):
                    if peer not in seen and link.width >= width:
                        seen.add(peer)
                        reached.append((*route, peer))
            frontier = reached
        return None

    def _width(self, source: DeviceId, target: DeviceId) -> float | None:
        best = {source: float("inf")}
        heap = [(-best[source], source)]
        while heap:
            negative, node = heapq.heappop(heap)
            if node == target:
                return -negative
            for peer, link in self.links(node):
                width = min(-negative, link.width)
                if width > best.get(peer, -1.0):
                    best[peer] = width
                    heapq.heappush(heap, (-width, peer))
        return None

    def bandwidth(self, source: DeviceId, target: DeviceId) -> BytesPerSecond | None:
        """Bandwidth of the narrowest link of the path; None where there is none or it is unknown.

        A device has a bandwidth to itself only where a link to itself was added.
        """
        whole = self._end_to_end(source, target)
        return whole.bandwidth if whole else None

    def transfer_time(
        self, source: DeviceId, target: DeviceId, n_bytes: Bytes | int
    ) -> Seconds | None:
        """Time along the path: its latencies added, bytes over its narrowest link.

        Parameters
        ----------
        source, target : DeviceId
            Ends. A device reaches itself in no time unless a link to itself was added.
        n_bytes : Bytes or int
            Bytes to move.

        Returns
        -------
        Seconds or None
            None where no path leads there or its bandwidth is unknown.
        """
        whole = self._end_to_end(source, target)
        if source == target and whole is None:
            return NO_TIME
        return whole.transfer_time(n_bytes) if whole else None

    def _end_to_end(self, source: DeviceId, target: DeviceId) -> Link | None:
        route = self.path(source, target)
        if route is None or source == target:
            return self.link(source, target)
        hops = [self._links[a][b] for a, b in pairwise(route)]
        latency = Seconds(sum(float(hop.latency) for hop in hops))
        narrowest = min(hops, key=lambda hop: hop.width)
        return Link(hops[0].interconnect, narrowest.bandwidth, latency)

    def devices_of_kind(self, kind: DeviceKind) -> tuple[DeviceId, ...]:
        """Ids of the devices of one kind, ascending."""
        return tuple(i for i in self.device_ids() if self._devices[i].kind == kind)

    def total_memory(self, kind: DeviceKind) -> int:
        """Memory of all devices of one kind, in bytes."""
        return sum(self._devices[i].memory_bytes for i in self.devices_of_kind(kind))

    def fastest_peer(self, source: DeviceId) -> tuple[DeviceId, Link] | None:
        """The other device behind the widest link; ties by latency, then by lowest id."""
        peers = [(p, link) for p, link in self.links(source) if p != source]
        return min(peers, key=lambda x: (-x[1].width, x[1].latency, x[0]), default=None)

    def to_networkx(self) -> networkx.DiGraph[Any]:
        """The same graph for networkx (needs the `plot` extra).

        Returns
        -------
        networkx.DiGraph
            Nodes carry `info`; edges carry `link` and `weight`, the bandwidth in bytes a second.
        """
        import networkx

        graph = networkx.DiGraph()
        graph.add_nodes_from((i, {"info": self._devices[i]}) for i in self.device_ids())
        for source in self.device_ids():
            for target, link in self.links(source):
                graph.add_edge(source, target, link=link, weight=link.width)
        return graph

    def _check(self, *devices: DeviceId) -> None:
        for device in devices:
            if not 0 <= device < len(self._devices):
                known = f"0..{len(self._devices) - 1}" if self._devices else "none yet"
                raise LayoutError(
                    f"device {device} is not in this topology, which has {len(self._devices)} "
                    f"devices (ids {known}); add it first with add_device"
                )
