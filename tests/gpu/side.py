"""CuPy's side of the contract's test bodies: the same layouts, on a real device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

cupy = pytest.importorskip("cupy", exc_type=Exception)


def has_device() -> bool:
    """Whether there is one that works."""
    try:
        return float(cupy.arange(4).sum()) == 6.0
    except Exception:
        return False


class CupySide:
    """Arrays of CuPy whose memory looks like that of the given NumPy array."""

    def __init__(self) -> None:
        from mpipar.comm.device.arrays import library

        self.device = library("cupy")

    def taker(self, x: np.ndarray) -> Any:
        if not x.size:
            return cupy.empty(x.shape, x.dtype)
        low, high = np.lib.array_utils.byte_bounds(x)
        raw = cupy.zeros(high - low, np.uint8)
        start = raw.data + (x.__array_interface__["data"][0] - low)
        return cupy.ndarray(x.shape, x.dtype, memptr=start, strides=x.strides)

    def given(self, x: np.ndarray) -> Any:
        made = self.taker(x)
        made[...] = cupy.asarray(np.ascontiguousarray(x).reshape(x.shape))
        return made

    def landed(self, x: Any) -> np.ndarray:
        return np.asarray(cupy.asnumpy(x))
