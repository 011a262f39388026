"""What parallel layers share: names, shards, and where gradients go."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpipar.comm import Communicator
from mpipar.tensor_parallel.operators import Array
from mpipar.tensor_parallel.parameter import ShardedParameter

Saved = dict[str, Any]
"""What a layer keeps between forward and the end of its backward."""
Parameters = Mapping[str, Array]
"""This rank's arrays by full name."""


class ParallelLayer:
    """What all layers share: names, shards, and where gradients go.

    Parameters
    ----------
    comm : Communicator
        The tensor-parallel group.
    prefix : str
        Start of the parameter names.

    Attributes
    ----------
    parameters : dict of str to ShardedParameter
        Which part of each parameter a rank holds, by full name.
    """

    def __init__(self, comm: Communicator, prefix: str = "") -> None:
        self.comm = comm
        self.prefix = prefix
        self.parameters: dict[str, ShardedParameter] = {}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of this rank's arrays.

        Returns
        -------
        dict of str to tuple of int
            By full name.
        """
        return {name: shard.local_shape for name, shard in self.parameters.items()}

    def shard(self, whole: Parameters) -> dict[str, Array]:
        """Cut this rank's arrays out of whole parameters.

        Parameters
        ----------
        whole : mapping of str to ndarray
            By full name; other names are left alone.

        Returns
        -------
        dict of str to ndarray
            Copies, by full name.
        """
        return {n: shard.cut(whole[n], self.comm.rank) for n, shard in self.parameters.items()}

    def unshard(self, local: Parameters) -> dict[str, Array]:
        """Whole parameters (or gradients) from those of all ranks. Collective.

        Parameters
        ----------
        local : mapping of str to ndarray
            This rank's arrays.

        Returns
        -------
        dict of str to ndarray
            By full name, on every rank.
        """
        return {
            name: shard.join(self.comm.all_gather(local[name][None]))
            for name, shard in self.parameters.items()
        }

    def _put(self, gradients: Any, name: str, compute: Any, *args: Array, **how: bool) -> None:
        """Into a model's sink of gradients, or a plain mapping of arrays."""
        full = self.prefix + name
        if hasattr(gradients, "put"):
            gradients.put(full, compute, *args, **how)
        elif full in gradients:
            compute(*args, out=gradients[full], accumulate=how.get("add", False))
        else:
            gradients[full] = compute(*args)
