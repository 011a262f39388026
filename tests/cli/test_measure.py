"""`mpipar topo --measure`: real messages, and a cluster file that the planner reads."""

import pytest

from mpipar.cli import measure
from mpipar.cli.main import main
from mpipar.cli.measure import measure_pairs, measure_rank, measured_cluster
from mpipar.comm import IdentityCommunicator, ThreadWorld
from mpipar.errors import LayoutError
from mpipar.topology import Origin, cluster_from_toml, cluster_to_toml

OWN = {"memory_gib": 4.0, "peak_tflop_s": 0.5, "memory_gb_s": 10.0}


def line(latency_us: float, gb_s: float) -> list[tuple[float, float]]:
    return [(n, latency_us * 1e-6 + n / (gb_s * 1e9)) for n in (8, 4096, 1 << 16, 1 << 20)]


def test_every_pair_is_measured_and_every_rank_knows():
    found = ThreadWorld(3).run(lambda comm: measure_pairs(comm, (8, 4096, 65536), 2))
    assert found[0] == found[1] == found[2]
    assert sorted(found[0]) == [(0, 1), (0, 2), (1, 2)]
    for points in found[0].values():
        assert [n for n, _ in points] == [8, 4096, 65536]
        assert all(t > 0 for _, t in points)


def test_the_weakest_rank_is_told_to_all():
    first, second = ThreadWorld(2).run(lambda comm: measure_rank(comm, 2))
    assert first == second
    assert all(value > 0 for value in first.values())


def test_the_slowest_pair_decides_and_the_file_reads_back():
    near, slow, far = line(2, 8), line(3, 6), line(20, 1.5)
    pairs = {(0, 1): near, (2, 3): slow} | {(a, b): far for a in (0, 1) for b in (2, 3)}
    cluster = measured_cluster(pairs, ["x", "x", "y", "y"], OWN)
    node, machine = cluster.tiers
    assert (node.n_devices, machine.n_devices, cluster.n_devices) == (2, 4, 4)
    assert node.gb_s.value == pytest.approx(6)
    assert node.latency_us.value == pytest.approx(3)
    assert machine.gb_s.value == pytest.approx(1.5)
    assert machine.latency_us.value == pytest.approx(20)
    assert {figure.origin for figure in cluster.figures().values()} == {Origin.MEASURED}
    assert cluster_from_toml(cluster_to_toml(cluster)) == cluster
    assert "x" not in {cluster.name, *(n.name for n in cluster.nodes)}


def test_with_one_rank_a_node_the_inside_of_a_node_is_not_called_measured():
    node, machine = measured_cluster({(0, 1): line(20, 1.5)}, ["x", "y"], OWN).tiers
    assert (node.n_devices, node.gb_s.origin) == (1, Origin.ASSUMED)
    assert (machine.n_devices, machine.gb_s.origin) == (2, Origin.MEASURED)


def test_unequal_nodes_are_refused():
    with pytest.raises(LayoutError, match=r"\[1, 2\] ranks"):
        measured_cluster({}, ["x", "x", "y"], OWN)


def test_one_rank_has_nothing_to_measure(capsys, monkeypatch):
    monkeypatch.setattr(measure, "init", IdentityCommunicator)
    assert main(["topo", "--measure"]) == 4
    assert "mpipar run -n 2 topo --measure" in capsys.readouterr().err
