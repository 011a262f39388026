"""Devices of one process: where the shards of a group live, and how bytes reach them.

A device makes, fills and reads buffers, and runs kernels on them; nothing else touches a buffer.
`HostDevice` is an arena of host memory, `SealedDevice` a host-only double of a foreign device,
whose buffers refuse every access that does not go through it, `CupyDevice` a GPU.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np

from mpipar.comm.call import Array
from mpipar.errors import CountOutOfRange, LayoutError, UnsupportedArray

HOST = "host"
Buffer = Any


class HostDevice:
    """An arena of host memory that counts what it holds.

    Parameters
    ----------
    name : str
        Unique in a group; names the ends of links.
    capacity_bytes : int, optional
        More than this is refused; without it there is no limit.
    """

    vendor = HOST

    def __init__(self, name: str, capacity_bytes: int | None = None) -> None:
        if capacity_bytes is not None and capacity_bytes < 0:
            raise CountOutOfRange("device capacity in bytes", "0 or more", capacity_bytes)
        self.name = name
        self.capacity_bytes = capacity_bytes
        self.in_use_bytes = 0
        self.peak_bytes = 0
        self.n_copies = 0

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Buffer:
        """Make a C-contiguous buffer.

        Parameters
        ----------
        shape : tuple of int
            Its shape.
        dtype : dtype
            Its element type.

        Returns
        -------
        Buffer
            Unset; its bytes are given back when nothing refers to it any more.

        Raises
        ------
        LayoutError
            If it does not fit.
        """
        n_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if self.capacity_bytes is not None and self.in_use_bytes + n_bytes > self.capacity_bytes:
            raise LayoutError(
                f"{self.name}: {n_bytes} bytes more do not fit, {self.in_use_bytes} of "
                f"{self.capacity_bytes} are in use; trace() tells the peak before a run"
            )
        array = np.empty(shape, dtype)
        self.in_use_bytes += n_bytes
        self.peak_bytes = max(self.peak_bytes, self.in_use_bytes)
        weakref.finalize(array, self._give_back, n_bytes).atexit = False
        return self._sealed(array)

    def upload(self, values: Array) -> Buffer:
        """Copy a host array to this device.

        Parameters
        ----------
        values : ndarray
            Of any layout.

        Returns
        -------
        Buffer
            On this device.
        """
        buffer = self.empty(values.shape, values.dtype)
        self._array(buffer)[...] = values
        self.n_copies += 1
        return buffer

    def download(self, buffer: Buffer, out: Array) -> None:
        """Copy a buffer of this device into a host array.

        Parameters
        ----------
        buffer : Buffer
            Of this device.
        out : ndarray
            Of its shape and dtype.
        """
        out[...] = self._array(buffer)
        self.n_copies += 1

    def receive(self, buffer: Buffer, source: Device) -> Buffer:
        """Copy a buffer here from a device of the same vendor, past the host.

        Parameters
        ----------
        buffer : Buffer
            Of `source`.
        source : Device
            Where it lives.

        Returns
        -------
        Buffer
            On this device.
        """
        return self.upload(source._array(buffer))

    def call(self, kernel: Callable[..., None], out: Buffer, *buffers: Buffer) -> None:
        """Run a kernel.

        Parameters
        ----------
        kernel : callable
            ``kernel(array library, out, *arrays)`` writes its result into `out`.
        out, *buffers : Buffer
            All of this device.
        """
        kernel(np, self._array(out), *map(self._array, buffers))

    def view(self, buffer: Buffer, look: Callable[[Any], Any]) -> Buffer:
        """The same memory with another shape.

        Parameters
        ----------
        buffer : Buffer
            Of this device.
        look : callable
            From array to a view of it.

        Returns
        -------
        Buffer
            Shares the memory.
        """
        return self._sealed(look(self._array(buffer)))

    def _give_back(self, n_bytes: int) -> None:
        self.in_use_bytes -= n_bytes

    def _sealed(self, array: Any) -> Buffer:
        return array

    def _array(self, buffer: Buffer) -> Any:
        return buffer


Device = HostDevice
"""What a group asks of a device is what `HostDevice` offers."""


class SealedBuffer:
    """Memory of a `SealedDevice`: whoever looks at it from the host is refused.

    Parameters
    ----------
    array : ndarray
        What is hidden.
    owner : SealedDevice
        Who may look.
    """

    def __init__(self, array: Array, owner: SealedDevice) -> None:
        self._hidden = array
        self._owner = owner

    def opened(self, who: SealedDevice) -> Array:
        """The hidden array.

        Parameters
        ----------
        who : SealedDevice
            Who asks.

        Returns
        -------
        ndarray
            For its owner, and for devices of the same vendor.

        Raises
        ------
        UnsupportedArray
            For all others.
        """
        if who.vendor != self._owner.vendor:
            raise UnsupportedArray(f"a buffer of {self._owner.name} was touched by {who.name}")
        return self._hidden

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise UnsupportedArray(
            f"a buffer of {self._owner.name} lives on a foreign device: download it first"
        )

    def __getattr__(self, name: str) -> Any:
        raise UnsupportedArray(
            f"a buffer of {self._owner.name} has no {name} on the host: download it first"
        )

    __len__ = __iter__ = __getitem__ = __float__ = __array__


class SealedDevice(HostDevice):
    """A double of a foreign device: host memory behind a door that only it can open.

    Parameters
    ----------
    name : str
        As in `HostDevice`.
    vendor : str
        Devices of one vendor copy to each other; others through the host.
    capacity_bytes : int, optional
        As in `HostDevice`.
    """

    def __init__(self, name: str, vendor: str, capacity_bytes: int | None = None) -> None:
        super().__init__(name, capacity_bytes)
        self.vendor = vendor

    def _sealed(self, array: Any) -> Buffer:
        return SealedBuffer(array, self)

    def _array(self, buffer: Buffer) -> Any:
        if not isinstance(buffer, SealedBuffer):
            raise UnsupportedArray(f"{self.name} was given a {type(buffer).__name__}, not its own")
        return buffer.opened(self)


class CupyDevice(HostDevice):
    """A GPU through CuPy; no GPU run has shown it yet.

    Parameters
    ----------
    ordinal : int
        CUDA's or HIP's number of the device.
    """

    def __init__(self, ordinal: int) -> None:
        self._cupy: Any = import_module("cupy")
        is_hip = self._cupy.cuda.runtime.is_hip
        super().__init__(f"{'rocm' if is_hip else 'cuda'}:{ordinal}")
        self.vendor = "amd" if is_hip else "nvidia"
        self._device = self._cupy.cuda.Device(ordinal)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Buffer:
        """Make a buffer on the GPU; CuPy's pool counts its memory.

        Parameters
        ----------
        shape, dtype
            As in `HostDevice.empty`.

        Returns
        -------
        Buffer
            A CuPy array.
        """
        with self._device:
            return self._cupy.empty(shape, dtype)

    def upload(self, values: Array) -> Buffer:
        """Copy a host array to the GPU and wait for it.

        Parameters
        ----------
        values : ndarray
            Of any layout.

        Returns
        -------
        Buffer
            A CuPy array.
        """
        with self._device:
            buffer = self._cupy.asarray(np.ascontiguousarray(values))
            self._device.synchronize()
        self.n_copies += 1
        return buffer

    def download(self, buffer: Buffer, out: Array) -> None:
        """Copy a buffer into a host array once the kernels before it have ended.

        Parameters
        ----------
        buffer, out
            As in `HostDevice.download`.
        """
        with self._device:
            self._device.synchronize()
            out[...] = self._cupy.asnumpy(buffer)
        self.n_copies += 1

    def receive(self, buffer: Buffer, source: Device) -> Buffer:
        """Copy from another GPU; both are waited for, since each has a stream of its own.

        Parameters
        ----------
        buffer, source
            As in `HostDevice.receive`.

        Returns
        -------
        Buffer
            A CuPy array.
        """
        if isinstance(source, CupyDevice):
            source._device.synchronize()
        with self._device:
            copy = self._cupy.array(buffer)
            self._device.synchronize()
        self.n_copies += 1
        return copy

    def call(self, kernel: Callable[..., None], out: Buffer, *buffers: Buffer) -> None:
        """Run a kernel on the GPU's current stream.

        Parameters
        ----------
        kernel, out, *buffers
            As in `HostDevice.call`.
        """
        with self._device:
            kernel(self._cupy, out, *buffers)


def move(buffer: Buffer, shape: tuple[int, ...], dtype: np.dtype[Any], source: Device,
         target: Device) -> tuple[Buffer, tuple[tuple[str, str], ...]]:  # fmt: skip
    """Copy a buffer to another device.

    Parameters
    ----------
    buffer : Buffer
        Of `source`.
    shape : tuple of int
        Its shape.
    dtype : dtype
        Its element type.
    source, target : Device
        Two devices.

    Returns
    -------
    Buffer
        On `target`.
    tuple of (str, str)
        The hops it took, as in `hops`.
    """
    route = hops(source, target)
    if source.vendor == target.vendor:
        return target.receive(buffer, source), route
    if source.vendor == HOST:
        return target.upload(source._array(buffer)), route
    if target.vendor == HOST:
        there = target.empty(shape, dtype)
        source.download(buffer, target._array(there))
        return there, route
    stage = np.empty(shape, dtype)
    source.download(buffer, stage)
    return target.upload(stage), route


def hops(source: Device, target: Device) -> tuple[tuple[str, str], ...]:
    """The links on the way between two devices.

    Parameters
    ----------
    source, target : Device
        Two devices.

    Returns
    -------
    tuple of (str, str)
        One link, or two by way of ``"host"`` between foreign devices of two vendors.
    """
    if source.vendor == target.vendor or HOST in (source.vendor, target.vendor):
        return ((source.name, target.name),)
    return ((source.name, HOST), (HOST, target.name))
