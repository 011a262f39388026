import pytest

from mpipar.errors import LayoutError
from mpipar.topology import DeviceKind, Interconnect, draw_matrix, find_rings, parse_topo_matrix
from mpipar.topology.smi import matrix_of


def matrix(names, path, affinity):
    """The text that a driver would print, with tabs, for a path function."""
    head = "\t" + "\t".join(names) + "\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n"
    rows = []
    for i, name in enumerate(names):
        cells = [" X " if i == j else path(i, j) for j in range(len(names))]
        tail = affinity(i) if name.startswith("GPU") else "\t"
        rows.append(name + "\t" + "\t".join(cells) + "\t" + tail + "\n")
    return head + "".join(rows) + "\nLegend:\n\n  X    = Self\n"


def gpus(n):
    return [f"GPU{i}" for i in range(n)]


SWITCH = matrix(
    gpus(8), lambda i, j: "NV18", lambda i: f"{i // 4 * 48}-{i // 4 * 48 + 47}\t{i // 4}\tN/A"
)
PCIE = matrix(gpus(4), lambda i, j: "PIX" if i // 2 == j // 2 else "SYS", lambda i: "0-31\t0\tN/A")
VIRTUAL = matrix(gpus(4), lambda i, j: "PHB", lambda i: "0-23\tN/A\tN/A")


def few_nics():
    names = [*gpus(8), "NIC0", "NIC1", "NIC2", "NIC3"]

    def path(i, j):
        if i < 8 and j < 8:
            return "NV12"
        side = [x // 2 if x < 8 else x - 8 for x in (i, j)]
        return "PXB" if side[0] == side[1] else "SYS"

    text = matrix(names, path, lambda i: "0-63\t0\tN/A")
    return text + "\nNIC Legend:\n\n" + "".join(f"  NIC{i}: mlx5_{i}\n" for i in range(4))


MESH_PAIRS = {(0, 1): 1, (0, 2): 1, (0, 3): 2, (1, 2): 2, (1, 3): 1, (2, 3): 2}


def mesh_path(i, j):
    a, b = sorted((i % 4, j % 4))
    if i // 4 == j // 4:
        return f"NV{MESH_PAIRS[a, b]}"
    return {0: "NV2", 1: "NV2", 2: "NV1", 3: "NV1"}[a] if a == b else "SYS"


def test_eight_gpu_mesh_gives_six_rings():
    node = parse_topo_matrix(matrix(gpus(8), mesh_path, lambda i: "0-39\t0")).topology()
    assert node.link(0, 3).lanes == 2
    assert node.link(0, 5).interconnect is Interconnect.PCIE
    assert len(find_rings(node)) == 6


def test_switched_node_is_read_with_affinity():
    read = parse_topo_matrix(SWITCH)
    assert read.cpus[7] == "48-95"
    assert read.numa == (0,) * 4 + (1,) * 4
    assert len(find_rings(read.topology())) == 18


def test_colours_and_spaces_instead_of_tabs_make_no_difference():
    coloured = SWITCH.replace("\tGPU0", "\t\x1b[4mGPU0\x1b[0m", 1)
    spaced = PCIE.expandtabs(16)
    assert parse_topo_matrix(coloured) == parse_topo_matrix(SWITCH)
    assert parse_topo_matrix(spaced) == parse_topo_matrix(PCIE)


def test_pcie_only_and_virtual_machines():
    node = parse_topo_matrix(PCIE).topology()
    assert node.link(0, 1).bandwidth > node.link(0, 2).bandwidth
    assert find_rings(node) == ()
    read = parse_topo_matrix(VIRTUAL)
    assert read.numa == (None,) * 4
    assert read.nearest_nics(0) == ()


def test_fewer_nics_than_gpus_share_the_nearest():
    read = parse_topo_matrix(few_nics())
    assert [read.names[i] for gpu in read.gpus for i in read.nearest_nics(gpu)] == [
        f"NIC{i // 2}" for i in range(8)
    ]
    assert read.aliases["NIC3"] == "mlx5_3"
    assert len(read.topology().devices_of_kind(DeviceKind.OTHER)) == 4


def test_masked_subset_keeps_its_own_numbers():
    read = parse_topo_matrix(matrix(["GPU0"], lambda i, j: "X", lambda i: "8-15\t1\tN/A"))
    assert (read.names, read.cpus, read.numa) == (("GPU0",), ("8-15",), (1,))


@pytest.mark.parametrize("text", [SWITCH, PCIE, VIRTUAL, few_nics()])
def test_drawn_text_is_read_back(text):
    read = parse_topo_matrix(text)
    assert parse_topo_matrix(draw_matrix(read)) == read


def test_any_topology_is_drawn_with_its_legend():
    drawn = draw_matrix(matrix_of(parse_topo_matrix(few_nics()).topology()))
    assert "NV12" in drawn
    assert "NV#  =" in drawn
    assert parse_topo_matrix(drawn).paths == parse_topo_matrix(few_nics()).paths


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("no devices", "GPU0 is expected"),
        ("\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tNV1\t0-3\n", "no row for GPU1"),
        ("\tGPU0\tCPU Affinity\nGPU0\tQQ\t0-3\n", "'QQ' is none of"),
    ],
)
def test_broken_texts_are_refused(text, why):
    with pytest.raises(LayoutError, match=why):
        parse_topo_matrix(text)
