"""The array layer for devices: what the seam needs of a GPU library, and its form on CuPy.

Nothing outside asks which library an array is of. Arrays of other libraries that offer
``__cuda_array_interface__`` or DLPack are taken over by CuPy where they lie.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import numpy as np

from mpipar.comm.call import Array
from mpipar.errors import UnsupportedArray


class Event(Protocol):
    """A point in a stream."""

    @property
    def done(self) -> bool:
        """Whether the stream has passed it."""

    def synchronize(self) -> None:
        """Wait on the host until the stream has passed it."""


class Device(Protocol):
    """What the seam needs of a device library; its current device and stream are meant.

    Parameters
    ----------
    nccl : module or None
        As ``cupy.cuda.nccl``; None where it is not there.
    """

    nccl: Any

    def array(self, x: Any) -> Any:
        """The library's own array over the same memory."""

    def empty(self, shape: int | tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """A C-ordered array, not initialised."""

    def pinned(self, n_bytes: int) -> Array:
        """Host memory that copies reach without a detour: bytes."""

    def begin_read(self, x: Any, host: Array, after: Event | None = None) -> Event:
        """Copy a flat array to the host, after what the stream holds or after that event."""

    def begin_write(self, host: Array, x: Any) -> Event:
        """Copy to a flat array; what the stream gets later waits for it."""

    def fence(self) -> Event:
        """An event after what the stream holds."""

    def stream(self) -> int:
        """Address of the stream."""

    def names(self) -> tuple[str, str]:
        """Model of the device, and an id that no other device of the node has."""


class CupyDevice:
    """CuPy as a `Device`. Copies run on two streams of their own, one a direction."""

    def __init__(self) -> None:
        import cupy

        self._cupy = cupy
        self._lanes: dict[tuple[int, str], Any] = {}
        self.nccl: Any = None
        with suppress(ImportError, AttributeError), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns where the library is not installed
            from cupy.cuda import nccl

            self.nccl = nccl if nccl.available else None

    def array(self, x: Any) -> Any:
        """A CuPy array over the memory of `x`.

        Parameters
        ----------
        x : array
            With the CUDA array interface or DLPack.

        Returns
        -------
        cupy.ndarray
            Not a copy.

        Raises
        ------
        UnsupportedArray
            If it lies on another device than the current one.
        """
        if not isinstance(x, self._cupy.ndarray):
            is_cuda = hasattr(x, "__cuda_array_interface__")
            x = self._cupy.asarray(x) if is_cuda else self._cupy.from_dlpack(x)
        current = self._cupy.cuda.runtime.getDevice()
        if x.device.id != current:
            raise UnsupportedArray(
                f"the array lies on device {x.device.id}, the current one is {current}: call "
                f"inside `with cupy.cuda.Device({x.device.id})`"
            )
        return x

    def empty(self, shape: int | tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """A C-ordered array, not initialised."""
        return self._cupy.empty(shape, dtype)

    def pinned(self, n_bytes: int) -> Array:
        """Host memory of CuPy's pool of pinned memory: bytes."""
        memory = self._cupy.cuda.alloc_pinned_memory(max(1, n_bytes))
        return np.frombuffer(memory, np.uint8, n_bytes)

    def begin_read(self, x: Any, host: Array, after: Event | None = None) -> Event:
        """Copy a flat array to the host, after what the stream holds or after that event."""
        lane = self._lane("read")
        lane.wait_event(self.fence() if after is None else after)
        x.data.copy_to_host_async(host.ctypes.data, host.nbytes, lane)
        return self._mark(lane)

    def begin_write(self, host: Array, x: Any) -> Event:
        """Copy to a flat array; what the stream gets later waits for it."""
        lane = self._lane("write")
        lane.wait_event(self.fence())
        x.data.copy_from_host_async(host.ctypes.data, host.nbytes, lane)
        event = self._mark(lane)
        self._cupy.cuda.get_current_stream().wait_event(event)
        return event

    def fence(self) -> Event:
        """An event after what the stream holds."""
        return self._mark(self._cupy.cuda.get_current_stream())

    def stream(self) -> int:
        """Address of the stream."""
        return int(self._cupy.cuda.get_current_stream().ptr)

    def names(self) -> tuple[str, str]:
        """Model of the device, and its PCI bus id."""
        runtime = self._cupy.cuda.runtime
        index = runtime.getDevice()
        model = runtime.getDeviceProperties(index)["name"]
        text = model.decode() if isinstance(model, bytes) else str(model)
        return text, str(runtime.deviceGetPCIBusId(index))

    def _lane(self, name: str) -> Any:
        key = self._cupy.cuda.runtime.getDevice(), name
        if key not in self._lanes:
            self._lanes[key] = self._cupy.cuda.Stream(non_blocking=True)
        return self._lanes[key]

    def _mark(self, stream: Any) -> Event:
        event = self._cupy.cuda.Event(disable_timing=True)
        event.record(stream)
        return event  # type: ignore[no-any-return]


_makers: dict[str, Callable[[], Device]] = {"cupy": CupyDevice}
_made: dict[str, Device] = {}


def register(package: str, make: Callable[[], Device]) -> None:
    """Make a device library known by the package of its arrays.

    Parameters
    ----------
    package : str
        First word of the module in which the type of the arrays is defined.
    make : callable
        Makes the library when it is first needed.
    """
    _makers[package] = make
    _made.pop(package, None)


def on_device(x: Any) -> bool:
    """Whether `x` is an array in the memory of a device."""
    return hasattr(x, "__cuda_array_interface__")


def address(x: Any) -> int:
    """First byte of an array, on the host or on a device."""
    side = "__array_interface__" if isinstance(x, np.ndarray) else "__cuda_array_interface__"
    return int(getattr(x, side)["data"][0])


def package_of(x: Any) -> str:
    """Under which name the library of an array is known; foreign arrays are CuPy's."""
    package = type(x).__module__.partition(".")[0]
    return package if package in _makers else "cupy"


def library(package: str) -> Device:
    """The library of that name.

    Parameters
    ----------
    package : str
        From `package_of`.

    Returns
    -------
    Device
        One a process.

    Raises
    ------
    UnsupportedArray
        If it is not installed.
    """
    if package not in _made:
        try:
            _made[package] = _makers[package]()
        except ImportError as error:
            raise UnsupportedArray(
                f"arrays on a device need {package}, which does not load ({error}): "
                "pip install 'mpipar[cuda12]'"
            ) from None
    return _made[package]


def to_device(package: str, values: Array) -> Any:
    """An array of the host, copied to the current device.

    Parameters
    ----------
    package : str
        Name of a library; "" leaves the array where it is.
    values : ndarray
        On the host.

    Returns
    -------
    array
        C-ordered, of that library.
    """
    if not package:
        return values
    device, host = library(package), np.asarray(values, order="C")
    made = device.empty(host.shape, host.dtype)
    if host.size:
        device.begin_write(host.reshape(-1), made.reshape(-1)).synchronize()
    return made


def to_host(x: Any) -> Array:
    """An array on the host: itself, or a copy from its device."""
    if isinstance(x, np.ndarray):
        return x
    host = np.empty(x.shape, x.dtype)
    if host.size:
        flat = x.copy("C").reshape(-1)
        library(package_of(x)).begin_read(flat, host.reshape(-1)).synchronize()
    return host


def write(values: Array, target: Any) -> None:
    """Copy an array of the host into one that lies anywhere."""
    is_host = isinstance(target, np.ndarray)
    target[...] = values if is_host else to_device(package_of(target), values)


def use_device(index: int) -> None:
    """Make a device the current one, before MPI starts: network libraries look at it.

    Parameters
    ----------
    index : int
        Position among the visible devices; nothing happens without CuPy.
    """
    with suppress(Exception):
        import cupy

        cupy.cuda.Device(index).use()
