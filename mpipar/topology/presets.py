"""Well-known machines, each figure with its source. `published` is the maker's or site's figure."""

from __future__ import annotations

from mpipar.topology.cluster import Cluster, Figure, NodeClass, Origin, Tier
from mpipar.topology.link import DeviceKind


def _published(value: float, source: str) -> Figure:
    return Figure(value, Origin.PUBLISHED, source)


def _assumed(value: float, source: str = "") -> Figure:
    return Figure(value, Origin.ASSUMED, source)


_A100 = "NVIDIA A100 data sheet"
_H100 = "NVIDIA H100 data sheet"
_MI250X = "AMD Instinct MI250X data sheet, half of a module"
_NODE_LATENCY = _published(0.7, "TACCL, arXiv 2111.04867, measured alpha inside a node")
_NETWORK_LATENCY = _published(2.6, "TACCL, arXiv 2111.04867, measured alpha between nodes")
_NVSWITCH = Figure(0.765, Origin.MEASURED, "230 of 300 GB/s all-reduce bus bandwidth, 8 GPUs")


def _a100(name: str, n_nodes: int, n_devices: int, memory_gib: int) -> NodeClass:
    gb_s = {40: 1555, 80: 2039}[memory_gib]
    return NodeClass(
        name,
        n_nodes,
        n_devices,
        f"A100-{memory_gib}GB",
        DeviceKind.CUDA,
        _published(memory_gib, _A100),
        _published(312, _A100),
        _published(gb_s, _A100),
    )


def _mi250x(name: str, n_nodes: int) -> NodeClass:
    memory, peak, bandwidth = (_published(x, _MI250X) for x in (64, 191.5, 1638))
    return NodeClass(name, n_nodes, 8, "MI250X GCD", DeviceKind.ROCM, memory, peak, bandwidth)


def _network(name: str, n_devices: int, gb_s: Figure, efficiency: float = 0.9) -> Tier:
    return Tier(name, n_devices, gb_s, _NETWORK_LATENCY, _assumed(efficiency))


def _node(n_devices: int, gb_s: Figure, efficiency: Figure) -> Tier:
    return Tier("node", n_devices, gb_s, _NODE_LATENCY, efficiency)


def _dragonfly(local: Tier, nic: Figure, n_group: int, n_all: int) -> tuple[Tier, ...]:
    group = _network("group", n_group, nic)
    return local, group, _network("machine", n_all, nic, 0.7)


_H100_NODE = NodeClass(
    "dgx-h100",
    4096,
    8,
    "H100-80GB",
    DeviceKind.CUDA,
    *(_published(x, _H100) for x in (80, 989, 3352)),
)
_CPU_NODE = NodeClass(
    "laptop",
    1,
    4,
    "CPU core",
    DeviceKind.CPU,
    _assumed(4, "a quarter of 16 GiB"),
    _assumed(0.03, "one core, AVX2, single precision"),
    _assumed(8),
)
_DGX_A100_FABRIC = Tier(
    "fat tree",
    4480,
    _published(25, "8 x 200 Gb/s, DGX A100 data sheet"),
    _NETWORK_LATENCY,
    _published(0.96, "192 of 200 GB/s bus bandwidth, nccl issue 812"),
)
_DGX_H100_RAILS = Tier(
    "rails",
    32768,
    _published(50, "8 x 400 Gb/s, DGX H100 data sheet"),
    _NETWORK_LATENCY,
    Figure(0.94, Origin.MEASURED, "46 to 48 GB/s a network card"),
)
_H100_RINGS = Figure(0.82, Origin.MEASURED, "370 of 450 GB/s ring bus bandwidth, 8 GPUs")
_INFINITY = Tier(
    "node",
    8,
    _published(50, "narrowest link between neighbours, Frontier user guide"),
    _assumed(1.5),
    _assumed(0.75),
)
_SLINGSHOT = _published(25, "4 Slingshot 11 cards of 200 Gb/s, NERSC documentation")
_HDR = _published(25, "4 x HDR200, Juelich Supercomputing Centre documentation")
_HALF_CARD = _published(12.5, "4 x 200 Gb/s over 8 GCDs, Frontier and LUMI user guides")

PRESETS: dict[str, Cluster] = {
    cluster.name: cluster
    for cluster in (
        Cluster(
            "dgx-a100",
            (_a100("dgx-a100", 560, 8, 80),),
            (_node(8, _published(300, _A100), _NVSWITCH), _DGX_A100_FABRIC),
        ),
        Cluster(
            "dgx-h100",
            (_H100_NODE,),
            (_node(8, _published(450, _H100), _H100_RINGS), _DGX_H100_RAILS),
        ),
        Cluster(
            "perlmutter",
            (_a100("gpu 40 GB", 1536, 4, 40), _a100("gpu 80 GB", 256, 4, 80)),
            _dragonfly(
                _node(4, _published(300, "4 lanes to each peer, NERSC"), _assumed(0.75)),
                _SLINGSHOT,
                512,
                7168,
            ),
        ),
        Cluster(
            "juwels-booster",
            (_a100("booster", 936, 4, 40),),
            _dragonfly(_node(4, _published(300, _A100), _assumed(0.75)), _HDR, 192, 3840),
        ),
        Cluster(
            "frontier", (_mi250x("frontier", 9408),), _dragonfly(_INFINITY, _HALF_CARD, 1024, 75776)
        ),
        Cluster("lumi", (_mi250x("lumi-g", 2978),), _dragonfly(_INFINITY, _HALF_CARD, 992, 24800)),
        Cluster(
            "laptop", (_CPU_NODE,), (Tier("node", 4, _assumed(5), _assumed(2.0), _assumed(0.7)),)
        ),
    )
}
"""Machines by name."""
