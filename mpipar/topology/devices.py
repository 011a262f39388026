"""Devices of one node and the links between them.

A `DeviceTopology` is a small directed graph: devices get ids as they are added, links carry a
bandwidth and a latency. Links to ids that were never given are refused, ties are broken by the
lowest id, and a pair without a link of its own is reached over the widest, then shortest, path.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NewType

from mpipar.errors import LayoutError
from mpipar.topology.link import NO_TIME, DeviceInfo, DeviceKind, Link
from mpipar.units import Bytes, BytesPerSecond, Seconds

if TYPE_CHECKING:
    import networkx

DeviceId = NewType("DeviceId", int)
"""Index of a device in its topology, given by `DeviceTopology.add_device`."""


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
        """All ids, ascending.

        Returns
        -------
        tuple of DeviceId
            Counted from 0.
        """
        return tuple(DeviceId(i) for i in range(len(self._devices)))

    def add_device(self, info: DeviceInfo) -> DeviceId:
        """Add a device and return its id.

        Parameters
        ----------
        info : DeviceInfo
            What is known of it.

        Returns
        -------
        DeviceId
            The next id.
        """
        self._devices.append(info)
        return DeviceId(len(self._devices) - 1)

    def device(self, device: DeviceId) -> DeviceInfo:
        """What is known of a device.

        Parameters
        ----------
        device : DeviceId
            Of this topology.

        Returns
        -------
        DeviceInfo
            As it was added.
        """
        self._check(device)
        return self._devices[device]

    def add_link(self, a: DeviceId, b: DeviceId, link: Link) -> None:
        """Link two devices in both directions (one, when both are the same device).

        Parameters
        ----------
        a, b : DeviceId
            Its ends.
        link : Link
            In each direction.
        """
        self.add_directed_link(a, b, link)
        self.add_directed_link(b, a, link)

    def add_directed_link(self, source: DeviceId, target: DeviceId, link: Link) -> None:
        """Link `source` to `target` only; a second link between the two replaces the first.

        Parameters
        ----------
        source, target : DeviceId
            Its ends, which must have been added.
        link : Link
            What joins them.
        """
        self._check(source, target)
        self._links.setdefault(source, {})[target] = link

    def link(self, source: DeviceId, target: DeviceId) -> Link | None:
        """The link between two devices itself, None where there is none.

        Parameters
        ----------
        source, target : DeviceId
            Its ends.

        Returns
        -------
        Link or None
            Directed; no path of several links.
        """
        self._check(source, target)
        return self._links.get(source, {}).get(target)

    def links(self, source: DeviceId) -> tuple[tuple[DeviceId, Link], ...]:
        """The links that leave a device, by target id.

        Parameters
        ----------
        source : DeviceId
            Where they start.

        Returns
        -------
        tuple of (DeviceId, Link)
            Targets and links.
        """
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

        Parameters
        ----------
        source, target : DeviceId
            Ends of the path.

        Returns
        -------
        BytesPerSecond or None
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
        """Ids of the devices of one kind, ascending.

        Parameters
        ----------
        kind : DeviceKind
            Which kind.

        Returns
        -------
        tuple of DeviceId
            Empty where there is none.
        """
        return tuple(i for i in self.device_ids() if self._devices[i].kind == kind)

    def total_memory(self, kind: DeviceKind) -> int:
        """Memory of all devices of one kind, in bytes.

        Parameters
        ----------
        kind : DeviceKind
            Which kind.

        Returns
        -------
        int
            Bytes; unknown memory counts as 0.
        """
        return sum(self._devices[i].memory_bytes for i in self.devices_of_kind(kind))

    def fastest_peer(self, source: DeviceId) -> tuple[DeviceId, Link] | None:
        """The other device behind the widest link; ties by latency, then by lowest id.

        Parameters
        ----------
        source : DeviceId
            Where the links start.

        Returns
        -------
        tuple of (DeviceId, Link) or None
            None where no link leaves it for another device.
        """
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
