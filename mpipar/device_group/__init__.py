"""One process, N devices: lazy arrays, and collectives over a list of shards."""

from mpipar.device_group.device import CupyDevice, HostDevice, SealedDevice
from mpipar.device_group.group import DeviceGroup
from mpipar.device_group.join import concatenate
from mpipar.device_group.lazy import Graph, LazyArray
from mpipar.device_group.run import Trace, realize, trace

__all__ = [
    "CupyDevice",
    "DeviceGroup",
    "Graph",
    "HostDevice",
    "LazyArray",
    "SealedDevice",
    "Trace",
    "concatenate",
    "realize",
    "trace",
]
