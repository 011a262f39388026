import time

import matplotlib
import pytest

from mpipar.errors import LayoutError
from mpipar.topology import PRESETS, cluster_from_toml, cluster_to_toml, load_cluster
from mpipar.topology.cluster import strides
from mpipar.topology.draw import draw_cluster, draw_node
from mpipar.topology.smi import parse_topo_matrix

matplotlib.use("Agg")

TEXT = """
name = "mine"
[[nodes]]
name = "box"
n_nodes = 2
n_devices = 4
device = "X"
memory_gib = 80
peak_tflop_s = [312.0, "published", "data sheet"]
memory_gb_s = [1800.0, "measured", "stream"]
[[tiers]]
name = "node"
n_devices = 4
gb_s = 100
latency_us = 1.5
[[tiers]]
name = "machine"
n_devices = 8
gb_s = 12.5
latency_us = 3
efficiency = 0.8
"""


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_survive_the_file_and_every_figure_has_its_origin(name):
    cluster = load_cluster(name)
    assert cluster_from_toml(cluster_to_toml(cluster)) == cluster
    assert all(figure.source or figure.origin == "assumed" for figure in cluster.figures().values())


def test_plain_numbers_are_given(tmp_path):
    (tmp_path / "mine.toml").write_text(TEXT)
    cluster = load_cluster(tmp_path / "mine.toml")
    assert cluster.n_devices == 8
    assert cluster.figures()["nodes.box.memory_gib"].origin == "given"
    assert cluster.figures()["nodes.box.memory_gb_s"].source == "stream"
    assert float(cluster.tiers[1].bandwidth) == pytest.approx(10e9)


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("n_devices = 8", "n_devices = 6", "cannot be made of groups of 4; 4 would do"),
        ("n_devices = 8", "n_devices = 4", "has 8 devices, its last tier joins 4"),
        ("gb_s = 100", "gbs = 100", "'gbs' is unknown"),
        ("latency_us = 3", "", "'latency_us' is missing"),
        ("name =", "name", "not TOML"),
        ('name = "mine"', "extra = 1", "'extra' is none of"),
    ],
)
def test_broken_files(old, new, why):
    with pytest.raises(LayoutError, match=why):
        cluster_from_toml(TEXT.replace(old, new, 1) if "tiers" not in old else TEXT)


def test_unknown_names_list_the_presets():
    with pytest.raises(LayoutError, match="dgx-h100"):
        load_cluster("nowhere")


def test_spans_of_a_group():
    machine = PRESETS["perlmutter"]
    assert machine.spans(4, 1) == (4, 1, 1)
    assert machine.spans(16, 2) == (2, 8, 1)
    assert machine.spans(1024, 4) == (1, 128, 8)
    assert machine.spans(4, 1024) == (1, 1, 4)


def test_taking_a_part():
    machine = PRESETS["perlmutter"]
    assert [n.n_nodes for n in machine.take(6400).nodes] == [1536, 64]
    assert machine.take(2).tiers[0].n_devices == 2
    assert machine.take(6400).weakest.memory_gib.value == 40
    with pytest.raises(LayoutError, match="4 would do"):
        machine.take(7)


def test_placement_of_32768_devices_is_closed_form():
    machine, start = PRESETS["dgx-h100"], time.perf_counter()
    degrees = {"pp": 16, "dp": 256, "cp": 1, "tp": 8}
    apart = strides(("pp", "dp", "cp", "tp"), degrees)
    assert {axis: machine.spans(degrees[axis], apart[axis]) for axis in degrees} == {
        "pp": (1, 16),
        "dp": (1, 256),
        "cp": (1, 1),
        "tp": (8, 1),
    }
    assert time.perf_counter() - start < 1
    graph = machine.to_networkx()
    assert graph.number_of_nodes() == 2


def test_pictures(tmp_path):
    draw_cluster(PRESETS["dgx-a100"].take(16)).savefig(tmp_path / "two.png")
    assert (tmp_path / "two.png").stat().st_size > 10_000
    figure = matplotlib.figure.Figure()
    axes = figure.add_subplot()
    node = parse_topo_matrix("\tGPU0\tGPU1\tCPU Affinity\nGPU0\tX\tNV2\t\nGPU1\tNV2\tX\t\n")
    draw_node(node.topology(), axes, "pair")
    assert len(axes.lines) == 1
