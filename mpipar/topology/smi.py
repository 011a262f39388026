"""The text of `nvidia-smi topo -m`: read into a matrix, turned into a topology, drawn again.

Path classes, nearest first (NVIDIA's legend): `NV#` (bonded NVLink lanes), `PIX` (at most one
PCIe bridge), `PXB` (several bridges), `PHB` (a CPU's host bridge), `NODE` (host bridges of one
NUMA node), `SYS` (between NUMA nodes). Indices in this text are NVML's, which ignores
`CUDA_VISIBLE_DEVICES`; join with other libraries by bus id.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from mpipar.errors import LayoutError
from mpipar.topology.devices import DeviceId, DeviceTopology
from mpipar.topology.link import DeviceInfo, DeviceKind, Interconnect, Link
from mpipar.units import BytesPerSecond

LEGEND: Mapping[str, str] = MappingProxyType(
    {
        "X": "the device itself",
        "SYS": "over PCIe and the link between NUMA nodes",
        "NODE": "over PCIe and the link between host bridges of one NUMA node",
        "PHB": "over PCIe and a host bridge, typically the CPU",
        "PXB": "over several PCIe bridges, no host bridge",
        "PIX": "over at most one PCIe bridge",
        "NV#": "over a bonded set of # NVLink lanes",
    }
)
PATH_BYTES_PER_S: Mapping[str, float] = MappingProxyType(
    {"SYS": 9e9, "NODE": 11e9, "PHB": 12e9, "PXB": 20e9, "PIX": 24e9, "NV": 25e9}
)
"""Assumed bandwidth of a path class (`NV`: of one lane) in bytes a second; measure to know."""

_NEAREST = ("NV", "PIX", "PXB", "PHB", "NODE", "SYS")


@dataclass(frozen=True)
class NodeMatrix:
    """A node as its driver describes it: one path class for every pair of devices.

    Parameters
    ----------
    names : tuple of str
        Device names in order (`GPU0`, `NIC0`, `mlx5_0`).
    paths : tuple of tuple of str
        Path class from row to column; `X` on the diagonal.
    cpus : tuple of str
        CPU list of each device, "" where unknown.
    numa : tuple of int or None
        NUMA node of each device, None where unknown (a virtual machine says -1 or N/A).
    aliases : mapping of str to str
        What the legend says a NIC is called (`NIC0` to `mlx5_0`).
    """

    names: tuple[str, ...]
    paths: tuple[tuple[str, ...], ...]
    cpus: tuple[str, ...]
    numa: tuple[int | None, ...]
    aliases: Mapping[str, str]

    @property
    def gpus(self) -> tuple[int, ...]:
        """Positions of the GPUs among the names."""
        return tuple(i for i, name in enumerate(self.names) if name.startswith("GPU"))

    def nearest_nics(self, gpu: int) -> tuple[int, ...]:
        """Positions of the NICs with the nearest path class to a GPU: several, or none.

        Parameters
        ----------
        gpu : int
            Position of the GPU.

        Returns
        -------
        tuple of int
            Ascending.
        """
        nics = [i for i in range(len(self.names)) if i not in self.gpus]
        ranks = {i: _rank(self.paths[gpu][i]) for i in nics}
        return tuple(i for i in nics if ranks[i] == min(ranks.values()))

    def topology(self, bytes_per_s: Mapping[str, float] = PATH_BYTES_PER_S) -> DeviceTopology:
        """The same node as devices and links.

        Parameters
        ----------
        bytes_per_s : mapping of str to float
            Bandwidth by path class, `NV` for one lane.

        Returns
        -------
        DeviceTopology
            Device ids are positions among the names; NICs are of kind `OTHER`.
        """
        topology = DeviceTopology()
        for i, name in enumerate(self.names):
            kind = DeviceKind.CUDA if i in self.gpus else DeviceKind.OTHER
            topology.add_device(DeviceInfo(int(re.sub(r"\D", "", name) or i), kind, name))
        for i, row in enumerate(self.paths):
            for j, path in enumerate(row):
                if i != j:
                    topology.add_directed_link(DeviceId(i), DeviceId(j), _link(path, bytes_per_s))
        return topology


def _rank(path: str) -> int:
    return _NEAREST.index("NV" if path.startswith("NV") else path)


def _link(path: str, bytes_per_s: Mapping[str, float]) -> Link:
    if path.startswith("NV"):
        lanes = int(path[2:])
        bandwidth = BytesPerSecond(bytes_per_s["NV"] * lanes)
        return Link(Interconnect.NVLINK, bandwidth, lanes=lanes)
    return Link(Interconnect.PCIE, BytesPerSecond(bytes_per_s[path]))


def parse_topo_matrix(text: str) -> NodeMatrix:
    """Read the output of `nvidia-smi topo -m`, of any driver version, tabs or spaces.

    Parameters
    ----------
    text : str
        The whole text, with or without legend and terminal colours.

    Returns
    -------
    NodeMatrix
        One row for every device that the text lists.

    Raises
    ------
    LayoutError
        If there is no matrix, a row is missing or too short, or a path class is unknown.
    """
    lines = [line for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines() if line.strip()]
    start = next((i for i, line in enumerate(lines) if line.split()[0] == "GPU0"), None)
    if start is None:
        raise LayoutError("no matrix found: a header line that starts with GPU0 is expected")
    names = tuple(re.split(r"\s+CPU Affinity", lines[start].strip())[0].split())
    rows = {line.split()[0]: line for line in lines[start + 1 :]}
    missing = [name for name in names if name not in rows]
    if missing:
        raise LayoutError(f"the header names {len(names)} devices, no row for {missing[0]}")
    cells = [_row(rows[name], len(names)) for name in names]
    aliases = dict(re.findall(r"^\s*(NIC\d+):\s*(\S+)", "\n".join(lines), re.M))
    return NodeMatrix(
        names,
        tuple(paths for paths, _, _ in cells),
        tuple(cpus for _, cpus, _ in cells),
        tuple(numa for _, _, numa in cells),
        aliases,
    )


def _row(line: str, n_devices: int) -> tuple[tuple[str, ...], str, int | None]:
    name, *words = line.split()
    paths = tuple(words[:n_devices])
    for path in paths:
        if path not in LEGEND and not re.fullmatch(r"NV\d+", path):
            raise LayoutError(f"row {name}: path class {path!r} is none of {', '.join(LEGEND)}")
    if len(paths) < n_devices:
        raise LayoutError(f"row {name} has {len(paths)} columns of the header's {n_devices}")
    cpus, numa = (*words[n_devices:], "", "")[:2]
    known = re.fullmatch(r"\d+", numa)
    return paths, "" if cpus == "N/A" else cpus, int(numa) if known else None


def draw_matrix(matrix: NodeMatrix) -> str:
    """The matrix as text with its legend; `parse_topo_matrix` reads it back.

    Parameters
    ----------
    matrix : NodeMatrix
        A node.

    Returns
    -------
    str
        One line a device.
    """
    table = [("", *matrix.names, "CPU Affinity", "NUMA Affinity")]
    for name, row, cpus, numa in zip(
        matrix.names, matrix.paths, matrix.cpus, matrix.numa, strict=True
    ):
        table.append((name, *row, cpus or "N/A", "N/A" if numa is None else str(numa)))
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in table]
    used = {re.sub(r"\d+", "#", path) for row in matrix.paths for path in row}
    lines += ["", "Legend:", *(f"  {key:5}= {LEGEND[key]}" for key in LEGEND if key in used)]
    if matrix.aliases:
        lines += ["", "NIC Legend:", *(f"  {k}: {v}" for k, v in matrix.aliases.items())]
    return "\n".join(lines) + "\n"


def matrix_of(topology: DeviceTopology) -> NodeMatrix:
    """Describe any topology by the driver's path classes, as far as they say it.

    Parameters
    ----------
    topology : DeviceTopology
        A node. Missing links are written as `SYS`, links that are not NVLink by the class whose
        assumed bandwidth is the nearest.

    Returns
    -------
    NodeMatrix
        Ready for `draw_matrix`.
    """
    ids = topology.device_ids()

    def path(a: DeviceId, b: DeviceId) -> str:
        link = topology.link(a, b)
        if a == b or link is None:
            return "X" if a == b else "SYS"
        if link.interconnect in (Interconnect.NVLINK, Interconnect.INFINITY_FABRIC):
            return f"NV{link.lanes}"
        return min(_NEAREST[1:], key=lambda c: abs(PATH_BYTES_PER_S[c] - link.width))

    is_gpu = {i: topology.device(i).kind not in (DeviceKind.OTHER, DeviceKind.CPU) for i in ids}
    names = tuple(
        f"GPU{topology.device(i).ordinal}" if is_gpu[i] else topology.device(i).name for i in ids
    )
    rows = tuple(tuple(path(a, b) for b in ids) for a in ids)
    return NodeMatrix(names, rows, ("",) * len(ids), (None,) * len(ids), {})
