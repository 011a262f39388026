"""What a device is, and what joins two of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from mpipar.errors import CountOutOfRange, NonFiniteValue
from mpipar.units import Bytes, BytesPerSecond, Seconds

MIB = 2**20
NO_TIME = Seconds(0)


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
        """The same device with its memory given, in bytes.

        Parameters
        ----------
        memory_bytes : int
            Memory; 0 means unknown.

        Returns
        -------
        DeviceInfo
            A new value.
        """
        return replace(self, memory_bytes=memory_bytes)

    def with_gflops(self, gflops: float) -> DeviceInfo:
        """The same device with its peak given, in 10^9 operations a second.

        Parameters
        ----------
        gflops : float
            Peak; 0 means unknown.

        Returns
        -------
        DeviceInfo
            A new value.
        """
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
        """A link from its bandwidth in 2**20 bytes a second (0: unknown) and latency in us.

        Parameters
        ----------
        interconnect : Interconnect
            What it is made of.
        mb_s : float
            Bandwidth; 0 means unknown.
        latency_us : float
            Latency.

        Returns
        -------
        Link
            Of one lane.
        """
        bandwidth = BytesPerSecond(mb_s * MIB) if mb_s else None
        return cls(interconnect, bandwidth, Seconds(latency_us * 1e-6))

    def with_latency(self, latency: Seconds) -> Link:
        """The same link with its latency given.

        Parameters
        ----------
        latency : Seconds
            Time before the first byte arrives.

        Returns
        -------
        Link
            A new value.
        """
        return replace(self, latency=latency)

    def transfer_time(self, n_bytes: Bytes | int) -> Seconds | None:
        """Time to move `n_bytes`: latency + bytes / bandwidth; None if the bandwidth is unknown.

        Parameters
        ----------
        n_bytes : Bytes or int
            What is moved.

        Returns
        -------
        Seconds or None
            None if the bandwidth is unknown.
        """
        return self.latency + Bytes(n_bytes) / self.bandwidth if self.bandwidth else None

    @property
    def width(self) -> float:
        """Bandwidth in bytes a second for comparisons, 0 when unknown."""
        return float(self.bandwidth) if self.bandwidth else 0.0
