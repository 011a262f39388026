"""How many all-reduce rings the direct links of a node can carry at once.

A ring is a directed cycle through every device of a group; two rings are edge-disjoint when no
lane carries both in the same direction. On a mesh of point-to-point links this count, times the
bandwidth of a lane, is the bus bandwidth of a large all-reduce (within 6 % on a DGX-1V), while
"the NVLink bandwidth" is wrong there by up to six times.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

from mpipar.errors import CountOutOfRange
from mpipar.topology.devices import DeviceId, DeviceTopology
from mpipar.topology.link import Interconnect

MOST_LANES = 18
"""Most NVLink lanes that a GPU has had: where more show, a switch shares them."""

MOST_STEPS = 20_000
"""Steps after which the search for more rings stops and the best set so far is the answer."""

Ring = tuple[DeviceId, ...]
Lanes = dict[tuple[DeviceId, DeviceId], int]


def find_rings(
    topology: DeviceTopology,
    group: Sequence[DeviceId] | None = None,
    interconnect: Interconnect = Interconnect.NVLINK,
) -> tuple[Ring, ...]:
    """A largest set of edge-disjoint directed rings through a group of devices.

    Parameters
    ----------
    topology : DeviceTopology
        The node. Where a device shows more than `MOST_LANES` lanes in all, its lanes lead to a
        switch, and every device can carry as many rings as it has lanes to one peer.
    group : sequence of DeviceId, optional
        Devices that take part (default: all).
    interconnect : Interconnect
        Links that count.

    Returns
    -------
    tuple of tuple of DeviceId
        The rings, each from the lowest id; empty when no ring exists. Two devices make a ring
        out of one lane, there and back.
    """
    members = tuple(sorted(topology.device_ids() if group is None else group))
    if len(members) < 2 or len(set(members)) < len(members):
        raise CountOutOfRange("distinct devices in a ring", "2 or more", len(set(members)))
    lanes = _lanes(topology, members, interconnect)
    if _switched(topology, members, interconnect):
        complete = len(lanes) == len(members) * (len(members) - 1)
        return (members,) * min(lanes.values()) if complete else ()
    limit = min(
        min(sum(n for (a, _), n in lanes.items() if a == m) for m in members),
        min(sum(n for (_, b), n in lanes.items() if b == m) for m in members),
    )
    return _pack(tuple(_cycles(members, lanes)), lanes, limit)


def _lanes(topology: DeviceTopology, members: Ring, kind: Interconnect) -> Lanes:
    pairs = ((a, b, topology.link(a, b)) for a in members for b in members if a != b)
    return {(a, b): link.lanes for a, b, link in pairs if link and link.interconnect == kind}


def _switched(topology: DeviceTopology, members: Ring, kind: Interconnect) -> bool:
    everyone = topology.device_ids()
    lanes = _lanes(topology, everyone, kind)
    return any(sum(n for (a, _), n in lanes.items() if a == m) > MOST_LANES for m in members)


def _cycles(members: Ring, lanes: Lanes) -> Iterator[Ring]:
    """Every directed Hamiltonian cycle, each once, from the lowest id."""
    first = members[0]

    def grow(route: Ring) -> Iterator[Ring]:
        if len(route) == len(members):
            if (route[-1], first) in lanes:
                yield route
            return
        for peer in members:
            if peer not in route and (route[-1], peer) in lanes:
                yield from grow((*route, peer))

    yield from grow((first,))


def _pack(cycles: tuple[Ring, ...], lanes: Lanes, limit: int) -> tuple[Ring, ...]:
    """Most cycles that fit the lanes at once: depth first, each cycle as often as it fits."""
    best: tuple[Ring, ...] = ()
    steps = 0

    def search(start: int, left: Lanes, chosen: tuple[Ring, ...]) -> bool:
        nonlocal best, steps
        steps += 1
        if len(chosen) > len(best):
            best = chosen
        if len(best) == limit or steps > MOST_STEPS:
            return True
        for i in range(start, len(cycles)):
            edges = tuple(zip(cycles[i], (*cycles[i][1:], cycles[i][0]), strict=True))
            if all(left[edge] for edge in edges):
                rest = left | {edge: left[edge] - 1 for edge in edges}
                bound = min(sum(n for (a, _), n in rest.items() if a == m) for m in cycles[i])
                if len(chosen) + 1 + bound > len(best) and search(i, rest, (*chosen, cycles[i])):
                    return True
        return False

    search(0, lanes, ())
    return best


def best_group(topology: DeviceTopology, n_devices: int) -> tuple[Ring, int]:
    """The group of a given size that carries most rings; ties by lowest ids.

    Parameters
    ----------
    topology : DeviceTopology
        The node.
    n_devices : int
        Size of the group, 2 or more.

    Returns
    -------
    tuple
        The group, and its number of rings.
    """
    if not 2 <= n_devices <= topology.num_devices:
        raise CountOutOfRange("devices in a group", f"2..{topology.num_devices}", n_devices)
    counted = (
        (len(find_rings(topology, group)), group)
        for group in combinations(topology.device_ids(), n_devices)
    )
    n_rings, group = max(counted, key=lambda item: (item[0], [-i for i in item[1]]))
    return group, n_rings


def useful_sizes(topology: DeviceTopology) -> tuple[int, ...]:
    """Group sizes that no smaller group beats: more devices must not mean a slower all-reduce.

    Parameters
    ----------
    topology : DeviceTopology
        The node.

    Returns
    -------
    tuple of int
        Sizes from 1 up; on a DGX-1V five is not among them.
    """
    sizes, most = [1], 1
    for n in range(2, topology.num_devices + 1):
        n_rings = best_group(topology, n)[1]
        if n_rings >= most:
            sizes.append(n)
            most = n_rings
    return tuple(sizes)
