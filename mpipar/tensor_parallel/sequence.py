"""What lies between the parallel maps under sequence parallelism: norms on a part of the tokens.

Their parameters are held by every rank, but each rank sees its own tokens only: gradients must be
summed over the group once a step, by `sum_replicated`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from mpipar import nn
from mpipar.comm import Communicator
from mpipar.errors import EmptyInput
from mpipar.tensor_parallel.layer import ParallelLayer, Parameters, Saved
from mpipar.tensor_parallel.operators import Array
from mpipar.tensor_parallel.parameter import ShardedParameter


class SequenceParallelNorm(ParallelLayer):
    """Layer norm or RMS norm over this rank's tokens; its gradients are terms of a sum.

    Parameters
    ----------
    comm : Communicator
        The tensor-parallel group.
    width : int
        Last size of the input.
    rms : bool
        RMS norm, without a bias.
    eps : float
        Added to the variance.
    prefix : str
        Start of the names ``weight`` and ``bias``.
    """

    def __init__(
        self,
        comm: Communicator,
        width: int,
        *,
        rms: bool = False,
        eps: float = 1e-5,
        prefix: str = "",
    ) -> None:
        super().__init__(comm, prefix)
        self.rms, self.eps = rms, eps
        for name in ("weight",) if rms else ("weight", "bias"):
            self.parameters[prefix + name] = ShardedParameter((width,), comm.size)

    def forward(self, p: Parameters, x: Array) -> tuple[Array, Saved]:
        """Normalise each token.

        Parameters
        ----------
        p : mapping of str to ndarray
            Parameters.
        x : ndarray
            Shape ``(..., width)``, this rank's tokens.

        Returns
        -------
        tuple of ndarray and Saved
            Shape of `x`, and what backward needs.
        """
        weight = p[self.prefix + "weight"]
        if self.rms:
            y, normalized, rstd = nn.rms_norm(x, weight, self.eps)
        else:
            y, normalized, rstd = nn.layer_norm(x, weight, p[self.prefix + "bias"], self.eps)
        return y, Saved(normalized=normalized, rstd=rstd)

    def backward_input(self, p: Parameters, saved: Saved, grad: Array) -> Array:
        """Gradient of the input.

        Parameters
        ----------
        p : mapping of str to ndarray
            Parameters.
        saved : Saved
            As `forward` returned it.
        grad : ndarray
            Gradient of the output.

        Returns
        -------
        ndarray
            Shape of `grad`.
        """
        saved["grad"] = grad
        backward = nn.rms_norm_backward_input if self.rms else nn.layer_norm_backward_input
        to: Array = backward(grad, p[self.prefix + "weight"], saved["normalized"], saved["rstd"])
        return to

    def backward_weight(self, saved: Saved, gradients: Any) -> None:
        """Write this rank's terms of the weight gradients and release what was saved.

        Parameters
        ----------
        saved : Saved
            As `backward_input` left it.
        gradients : mapping of str to ndarray, or a model's ``Gradients``
            Where they go; to be summed by `sum_replicated` before the update.
        """
        if not self.rms:
            self._put(gradients, "bias", nn.bias_backward, saved["grad"])
        self._put(gradients, "weight", nn.norm_backward_weight, saved["grad"], saved["normalized"])
        saved.clear()


def sum_replicated(
    comm: Communicator, gradients: Mapping[str, Array], names: Iterable[str]
) -> None:
    """Sum gradients of parameters that every rank holds, in place. Collective.

    Parameters
    ----------
    comm : Communicator
        The tensor-parallel group.
    gradients : mapping of str to ndarray
        This rank's terms.
    names : iterable of str
        Which of them, in the same order on every rank; such as all norms under sequence
        parallelism.

    Raises
    ------
    EmptyInput
        If a name has no gradient.

    Notes
    -----
    Cost: one all-reduce for each dtype among them.
    """
    chosen = list(names)
    missing = [name for name in chosen if name not in gradients]
    if missing:
        raise EmptyInput("sum_replicated", f"no gradients of {', '.join(missing[:3])}")
    by_dtype: dict[Any, list[Array]] = {}
    for name in chosen:
        by_dtype.setdefault(gradients[name].dtype, []).append(gradients[name])
    for arrays in by_dtype.values():
        flat = np.concatenate([array.reshape(-1) for array in arrays])
        comm.all_reduce(flat, out=flat)
        stops = np.cumsum([array.size for array in arrays])[:-1].tolist()
        for array, part in zip(arrays, np.split(flat, stops), strict=True):
            array[...] = part.reshape(array.shape)
