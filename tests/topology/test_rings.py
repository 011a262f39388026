import csv
from itertools import pairwise
from pathlib import Path

import pytest

from mpipar.errors import CountOutOfRange
from mpipar.topology import (
    DeviceInfo,
    DeviceKind,
    DeviceTopology,
    Interconnect,
    Link,
    best_group,
    find_rings,
    useful_sizes,
)
from mpipar.units import BytesPerSecond

MESH = (
    "0-1:1 0-2:1 0-3:2 0-4:2 1-2:2 1-3:1 1-5:2 2-3:2 2-6:1 3-7:1 4-5:1 4-6:1 4-7:2 5-6:2 "
    "5-7:1 6-7:2"
)
TABLE = Path(__file__).parents[1] / "data/dgx1v_rings.csv"


def mesh(pairs: str, n: int) -> DeviceTopology:
    node = DeviceTopology(DeviceInfo(i, DeviceKind.CUDA, "gpu") for i in range(n))
    for word in pairs.split():
        ends, lanes = word.split(":")
        a, b = map(int, ends.split("-"))
        link = Link(Interconnect.NVLINK, BytesPerSecond(25e9 * int(lanes)), lanes=int(lanes))
        node.add_link(a, b, link)
    return node


@pytest.mark.parametrize(
    "row", list(csv.DictReader(TABLE.read_text().splitlines())), ids=lambda row: row["ranks"]
)
def test_rings_of_the_first_devices_of_a_dgx1v(row):
    found = find_rings(mesh(MESH, 8), range(int(row["ranks"])))
    assert len(found) == int(row["rings"])
    if found:
        assert 22.5 * len(found) == pytest.approx(float(row["measured_GBps"]), rel=0.06)


def test_rings_are_edge_disjoint_and_pass_every_device():
    node = mesh(MESH, 8)
    used: dict[tuple[int, int], int] = {}
    for ring in find_rings(node):
        assert sorted(ring) == list(range(8))
        for edge in pairwise((*ring, ring[0])):
            used[edge] = used.get(edge, 0) + 1
    assert all(count <= node.link(*edge).lanes for edge, count in used.items())


def test_a_bonded_pair_is_chosen_and_five_devices_never():
    node = mesh(MESH, 8)
    assert best_group(node, 2) == ((0, 3), 2)
    assert 5 not in useful_sizes(node)
    assert 8 in useful_sizes(node)


def test_a_switched_node_has_as_many_rings_as_lanes_to_the_switch():
    everyone = " ".join(f"{a}-{b}:12" for a in range(8) for b in range(a))
    assert [len(find_rings(mesh(everyone, 8), range(n))) for n in (2, 5, 8)] == [12, 12, 12]


def test_four_devices_with_four_lanes_a_pair_are_a_mesh():
    everyone = " ".join(f"{a}-{b}:4" for a in range(4) for b in range(a))
    assert len(find_rings(mesh(everyone, 4))) == 12


def test_no_links_no_rings_and_one_device_is_refused():
    assert find_rings(mesh("", 4)) == ()
    with pytest.raises(CountOutOfRange):
        find_rings(mesh("", 4), [0, 0])
    with pytest.raises(CountOutOfRange):
        best_group(mesh("", 2), 3)
