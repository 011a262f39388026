"""A device whose arrays calculate, but with each other only, as those of CuPy do.

NumPy's own functions work on them through NumPy's protocols, and the array-API standard through
their namespace; an array of the host among the arguments fails the test.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpipar.comm.device.arrays import register

_ATTRIBUTES = ("shape", "strides", "dtype", "ndim", "size", "nbytes", "itemsize", "flags")


class MathArray(np.lib.mixins.NDArrayOperatorsMixin):
    """Memory that only functions of this module touch."""

    device = "cpu"

    def __init__(self, data: np.ndarray) -> None:
        self._data = data

    def __getattr__(self, name: str) -> Any:
        if name in _ATTRIBUTES:
            return getattr(self._data, name)
        if name in ("reshape", "copy", "astype", "view", "sum", "max", "any", "all", "transpose"):
            method = getattr(self._data, name)
            return lambda *args, **words: wrapped(method(*opened(args), **opened(words)))
        raise AttributeError(name)

    def __array__(self, *_: object, **__: object) -> Any:
        raise AssertionError("the host has touched memory of the device")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **words: Any) -> Any:
        return wrapped(getattr(ufunc, method)(*opened(inputs), **opened(words)), words.get("out"))

    def __array_function__(self, function: Any, _: Any, args: Any, words: Any) -> Any:
        return wrapped(function(*opened(args), **opened(words)), words.get("out"))

    def __array_namespace__(self, **_: Any) -> Any:
        return SPACE

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {**self._data.__array_interface__, "version": 3}

    @property
    def T(self) -> MathArray:
        return MathArray(self._data.T)

    def __getitem__(self, index: Any) -> MathArray:
        return MathArray(np.asarray(self._data[opened(index)]))

    def __setitem__(self, index: Any, value: Any) -> None:
        self._data[opened(index)] = opened(value)

    def __len__(self) -> int:
        return len(self._data)

    def __iter__(self) -> Any:
        return (MathArray(np.asarray(row)) for row in self._data)

    def __float__(self) -> float:
        return float(self._data)

    def __int__(self) -> int:
        return int(self._data)

    def __bool__(self) -> bool:
        return bool(self._data)


MathArray.__module__ = "device_math.arrays"  # a package of its own among the libraries


def opened(value: Any) -> Any:
    """What NumPy can work on; arrays of the host are not let in."""
    if isinstance(value, MathArray):
        return value._data
    if isinstance(value, np.ndarray):
        assert value.ndim == 0, "an array of the host among those of the device"
    if isinstance(value, tuple | list):
        return type(value)(opened(each) for each in value)
    return {k: opened(v) for k, v in value.items()} if isinstance(value, dict) else value


def wrapped(value: Any, out: Any = None) -> Any:
    """A result on the device; `out` itself where that took it."""
    if out is not None:
        return out[0] if isinstance(out, tuple) else out
    if isinstance(value, np.ndarray | np.generic):
        return MathArray(np.asarray(value))
    if isinstance(value, tuple | list):
        return type(value)(wrapped(each) for each in value)
    return value


class _Space:
    """NumPy as the standard's namespace of these arrays."""

    __name__ = "device_math"

    def __getattr__(self, name: str) -> Any:
        found = getattr(np, name)
        if not callable(found) or isinstance(found, type):
            return found
        return lambda *args, **words: wrapped(found(*opened(args), **opened(words)))

    def asarray(self, values: Any, **words: Any) -> MathArray:
        host = values._data if isinstance(values, MathArray) else values
        return MathArray(np.asarray(host, **words))


SPACE = _Space()


class MathDevice:
    """What the seam needs; the stream is never late here."""

    nccl: Any = None

    def array(self, x: Any) -> Any:
        return x

    def empty(self, shape: Any, dtype: Any) -> MathArray:
        return MathArray(np.empty(shape, dtype))

    def pinned(self, n_bytes: int) -> np.ndarray:
        return np.empty(n_bytes, np.uint8)

    def begin_read(self, x: MathArray, host: np.ndarray, after: Any = None) -> MathDevice:
        host[...] = x._data
        return self

    def begin_write(self, host: np.ndarray, x: MathArray) -> MathDevice:
        x._data[...] = host
        return self

    def fence(self) -> MathDevice:
        return self

    done = True

    def synchronize(self) -> None:
        """Nothing is late."""

    def stream(self) -> int:
        return 0

    def names(self) -> tuple[str, str]:
        return "math", "one"


register("device_math", MathDevice)
