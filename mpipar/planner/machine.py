"""How fast one device computes: peaks, efficiency curves, and what every kernel costs to start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """Efficiency over the size of an operation.

    Parameters
    ----------
    sizes : tuple of float
        Rising sizes, from 0.
    values : tuple of float
        Efficiency from each size on.
    steps : bool
        Constant from one size to the next (as Calculon does); else straight in the logarithm.
    """

    sizes: tuple[float, ...]
    values: tuple[float, ...]
    steps: bool = True

    def at(self, size: Any) -> Floats:
        """Efficiency of operations of these sizes."""
        sizes, values = np.asarray(self.sizes), np.asarray(self.values)
        if self.steps:
            return np.asarray(values[np.searchsorted(sizes, size, side="right") - 1])
        logs = np.log(np.maximum(size, 1.0)), np.log(np.maximum(sizes, 1.0))
        return np.asarray(np.interp(*logs, values))


@dataclass(frozen=True)
class Machine:
    """A device.

    Parameters
    ----------
    matrix_flops_per_s, vector_flops_per_s, memory_bytes_per_s : float
        Peaks in 16 bits.
    matrix, vector, memory : Curve
        Efficiency by FLOPs of an operation, and by bytes.
    launch_s : float
        Time that the host needs to start one forward pass of a layer; kernels run beside it, so a
        pass takes the longer of the two.
    overlap : bool
        Roofline: the longer of computing and moving counts (Williams et al. 2009); else their sum.
    head : bool
        The head and its loss are counted (Calculon leaves them out).
    """

    matrix_flops_per_s: float
    vector_flops_per_s: float
    memory_bytes_per_s: float
    matrix: Curve
    vector: Curve
    memory: Curve
    launch_s: float = 0.0
    overlap: bool = True
    head: bool = True

    def busy(self, is_matrix: bool, flops: Any, n_bytes: Any) -> Floats:
        """Seconds of one kernel with so many FLOPs that moves so many bytes."""
        peak = self.matrix_flops_per_s if is_matrix else self.vector_flops_per_s
        curve = self.matrix if is_matrix else self.vector
        computing = flops / (peak * curve.at(flops))
        moving = n_bytes / (self.memory_bytes_per_s * self.memory.at(n_bytes))
        return np.asarray(np.maximum(computing, moving) if self.overlap else computing + moving)

    def waiting(self, busy_s: Any, passes: Any) -> Floats:
        """Seconds that a layer's device waits for its host over forward passes and their like."""
        return np.asarray(np.maximum(0.0, passes * self.launch_s - busy_s))
