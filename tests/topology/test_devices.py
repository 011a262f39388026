import math

import networkx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpipar.errors import CountOutOfRange, LayoutError, OutOfRange
from mpipar.topology import DeviceInfo, DeviceKind, DeviceTopology, Interconnect, Link
from mpipar.units import Bytes, BytesPerSecond, Seconds

NVLINK = Link(Interconnect.NVLINK, BytesPerSecond(300e9))
PCIE = Link(Interconnect.PCIE, BytesPerSecond(20e9))


def gpus(n: int) -> DeviceTopology:
    return DeviceTopology(DeviceInfo(i, DeviceKind.CUDA, f"gpu{i}", 2**30) for i in range(n))


def test_a_link_is_both_ways_unless_directed():
    node = gpus(3)
    node.add_link(0, 1, NVLINK)
    node.add_directed_link(1, 2, PCIE)
    assert node.link(0, 1) == node.link(1, 0) == NVLINK
    assert node.link(1, 2) == PCIE
    assert node.link(2, 1) is None


def test_one_mebibyte_at_32000_mebibytes_a_second_plus_five_microseconds():
    link = Link.of_mb_s(Interconnect.PCIE, 32_000).with_latency(Seconds(5e-6))
    time = link.transfer_time(Bytes(2**20))
    assert float(time) == pytest.approx(1 / 32_000 + 5e-6)
    assert 30e-6 < float(time) < 40e-6


def test_unknown_bandwidth_gives_no_time():
    assert Link.of_mb_s(Interconnect.UNKNOWN, 0).transfer_time(1) is None


def test_kinds_and_memory():
    node = gpus(2)
    cpu = node.add_device(DeviceInfo(0, DeviceKind.CPU, "host").with_memory_bytes(7))
    assert node.devices_of_kind(DeviceKind.CPU) == (cpu,)
    assert node.total_memory(DeviceKind.CUDA) == 2**31
    assert node.total_memory(DeviceKind.METAL) == 0


@pytest.mark.parametrize("ends", [(0, 2), (2, 0), (-1, 0)])
def test_links_to_unknown_devices_are_refused(ends):
    with pytest.raises(LayoutError, match=r"not in this topology, which has 2 devices"):
        gpus(2).add_link(*ends, NVLINK)


def test_fastest_peer_breaks_ties_by_latency_then_id():
    node = gpus(4)
    node.add_link(0, 3, NVLINK)
    node.add_link(0, 2, NVLINK.with_latency(Seconds(1e-6)))
    node.add_link(0, 1, NVLINK)
    assert node.fastest_peer(0)[0] == 1
    node.add_link(0, 1, PCIE)
    assert node.fastest_peer(0)[0] == 3
    assert gpus(1).fastest_peer(0) is None


def test_path_is_widest_then_shortest():
    node = gpus(4)
    node.add_link(0, 3, PCIE)
    for a, b in ((0, 1), (1, 2), (2, 3), (1, 3)):
        node.add_link(a, b, NVLINK.with_latency(Seconds(1e-6)))
    assert node.path(0, 3) == (0, 1, 3)
    assert float(node.transfer_time(0, 3, 300)) == pytest.approx(2e-6 + 1e-9)
    assert node.bandwidth(0, 3) == BytesPerSecond(300e9)


def test_a_device_reaches_itself_in_no_time_unless_a_link_says_otherwise():
    node = gpus(1)
    assert node.transfer_time(0, 0, 10) == Seconds(0)
    node.add_link(0, 0, PCIE)
    assert float(node.transfer_time(0, 0, 20)) == pytest.approx(1e-9)
    assert gpus(2).transfer_time(0, 1, 1) is None


def test_bad_values_are_refused():
    with pytest.raises(CountOutOfRange):
        Link(Interconnect.PCIE, None, lanes=0)
    with pytest.raises(OutOfRange):
        Link.of_mb_s(Interconnect.PCIE, -1)
    with pytest.raises(CountOutOfRange):
        DeviceInfo(-1, DeviceKind.CPU, "x")


@given(st.dictionaries(st.tuples(st.integers(0, 5), st.integers(0, 5)), st.integers(1, 9)))
def test_path_width_equals_the_best_of_all_simple_paths(edges):
    node = gpus(6)
    for (a, b), width in edges.items():
        node.add_directed_link(a, b, Link(Interconnect.PCIE, BytesPerSecond(width)))
    graph = node.to_networkx()
    for target in range(1, 6):
        paths = list(networkx.all_simple_edge_paths(graph, 0, target))
        best = max((min(edges[e] for e in path) for path in paths), default=None)
        route = node.path(0, target)
        assert (best is None) == (route is None)
        if best is not None:
            wide = [p for p in paths if min(edges[e] for e in p) == best]
            assert len(route) - 1 == min(map(len, wide))
            assert math.isclose(float(node.bandwidth(0, target)), best)
