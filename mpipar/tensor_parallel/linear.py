"""Column-parallel and row-parallel linear maps (Shoeybi et al. 2019), with sequence parallelism.

A column-parallel map splits its outputs, a row-parallel one its inputs. One after the other they
need one collective forward and one backward. With ``sequence_parallel`` (Korthikanti et al. 2022)
what lies outside the pair is split along the sequence, dim -2: the bytes are the same.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from mpipar import nn
from mpipar.comm import Communicator, IdentityCommunicator
from mpipar.errors import CountOutOfRange, LayoutError
from mpipar.tensor_parallel.layer import ParallelLayer, Parameters, Saved
from mpipar.tensor_parallel.operators import Array, GatherSplit, SplitGather
from mpipar.tensor_parallel.overlap import gather_product, product_reduce, product_scatter
from mpipar.tensor_parallel.parameter import ShardedParameter, check_heads


class _Linear(ParallelLayer):
    """A linear map of which one side is split."""

    def __init__(
        self, comm: Communicator, prefix: str, sequence_parallel: bool, n_chunks: int
    ) -> None:
        super().__init__(comm, prefix)
        if n_chunks < 1:
            raise CountOutOfRange("chunks of a product", "1 or more", n_chunks)
        self.sequence_parallel = sequence_parallel
        self.n_chunks = n_chunks

    def _weight(self, p: Parameters) -> Array:
        return p[self.prefix + "weight"]

    def _add_bias(self, p: Parameters, y: Array) -> Array:
        bias = p[self.prefix + "bias"] if self.prefix + "bias" in self.parameters else None
        return y if bias is None else np.add(y, bias, out=y)

    def _reduced(self, x: Array, product: Any) -> Array:
        run = product_scatter if self.sequence_parallel else product_reduce
        return run(self.comm, x, product, self.n_chunks)

    def backward_weight(self, saved: Saved, gradients: Any) -> None:
        """Write the weight gradients and release what was saved.

        Parameters
        ----------
        saved : Saved
            As `backward_input` left it.
        gradients : mapping of str to ndarray, or a model's ``Gradients``
            Where they go; a name that a plain dict lacks is added.
        """
        x, grad = saved["x"], saved["grad"]
        if saved.get("regather"):
            x = self.comm.all_gather(x, dim=-2)
        if self.prefix + "bias" in self.parameters:
            self._put(gradients, "bias", nn.bias_backward, grad)
        self._put(gradients, "weight", nn.linear_backward_weight, x, grad)
        saved.clear()


class ColumnParallel(_Linear):
    """``y = x @ weight.T + bias`` with the outputs split over the ranks.

    Parameters
    ----------
    comm : Communicator
        The tensor-parallel group of n ranks.
    n_in, n_out : int
        Sizes of the whole map.
    bias : bool
        Whether it has a bias, split like the outputs.
    prefix : str
        Start of the names ``weight`` and ``bias``.
    segments : tuple of int
        Sizes of fused outputs that are split each for itself, such as gate and up.
    padded : bool
        Pad the outputs with zeros to equal shares, as a head does over a vocabulary; else outputs
        that do not divide are refused.
    gather_output : bool
        Give every rank the whole output.
    sequence_parallel : bool
        The input is split along dim -2: all-gather forward, reduce-scatter backward.
    keep_gathered : bool
        Keep the gathered input for the weight gradient; else gather it again there.
    n_chunks : int
        Pieces in which the collective overlaps with the product.

    Raises
    ------
    UnevenSplit
        If the outputs do not divide; names the nearest degrees that would do.

    Notes
    -----
    Cost: an all-reduce of the input gradient; with `sequence_parallel` an all-gather of the input
    and a reduce-scatter of its gradient.
    """

    def __init__(
        self,
        comm: Communicator,
        n_in: int,
        n_out: int,
        *,
        bias: bool = False,
        prefix: str = "",
        segments: tuple[int, ...] = (),
        padded: bool = False,
        gather_output: bool = False,
        sequence_parallel: bool = False,
        keep_gathered: bool = True,
        n_chunks: int = 1,
    ) -> None:
        super().__init__(comm, prefix, sequence_parallel, n_chunks)
        if gather_output and (len(segments) > 1 or padded):
            raise LayoutError("padded outputs, or those of several segments, are not gathered")
        self.keep_gathered = keep_gathered
        self._output = GatherSplit(comm) if gather_output else None
        shapes = {"weight": (n_out, n_in)} | ({"bias": (n_out,)} if bias else {})
        self.parameters = {
            prefix + name: ShardedParameter(shape, comm.size, 0, segments, padded)
            for name, shape in shapes.items()
        }

    @classmethod
    def qkv(
        cls,
        comm: Communicator,
        width: int,
        n_heads: int,
        kv_heads: int | None = None,
        head_width: int | None = None,
        **options: Any,
    ) -> ColumnParallel:
        """The fused query, key and value map; each rank gets whole heads of all three.

        Parameters
        ----------
        comm : Communicator
            The tensor-parallel group.
        width : int
            Of the input.
        n_heads, kv_heads : int
            Query heads, and key and value heads (as many by default).
        head_width : int, optional
            ``width // n_heads`` by default.
        **options
            As in `ColumnParallel`.

        Returns
        -------
        ColumnParallel
            Its local output is queries, keys and values of this rank's heads.
        """
        kv_heads = n_heads if kv_heads is None else kv_heads
        head_width = width // n_heads if head_width is None else head_width
        check_heads(n_heads, kv_heads, comm.size)
        segments = tuple(n * head_width for n in (n_heads, kv_heads, kv_heads))
        return cls(comm, width, sum(segments), segments=segments, **options)

    def forward(self, p: Parameters, x: Array) -> tuple[Array, Saved]:
        """Apply the map.

        Parameters
        ----------
        p : mapping of str to ndarray
            This rank's parameters.
        x : ndarray
            Shape ``(..., n_in)``; the same on every rank, or this rank's part of the sequence.

        Returns
        -------
        tuple of ndarray and Saved
            Outputs of this rank, ``(..., n_out / n)``, or all of them.
        """
        weight, saved = self._weight(p), Saved(x=x)
        product = partial(nn.linear, weight=weight)
        if self.sequence_parallel and self.comm.size > 1:
            y, joined = gather_product(
                self.comm, x, product, weight.shape[0], self.n_chunks, self.keep_gathered
            )
            saved = Saved(x=x, regather=True) if joined is None else Saved(x=joined)
        else:
            y = product(x)
        y = self._add_bias(p, y)
        return (y if self._output is None else self._output.forward(y)), saved

    def backward_input(self, p: Parameters, saved: Saved, grad: Array) -> Array:
        """Gradient of the input.

        Parameters
        ----------
        p : mapping of str to ndarray
            This rank's parameters.
        saved : Saved
            As `forward` returned it.
        grad : ndarray
            Gradient of the output.

        Returns
        -------
        ndarray
            Of the shape of the input.
        """
        grad = saved["grad"] = grad if self._output is None else self._output.backward(grad)
        return self._reduced(grad, partial(nn.linear_backward_input, weight=self._weight(p)))


class Linear(ColumnParallel):
    """The whole linear map on one rank, to compare with.

    Parameters
    ----------
    n_in, n_out : int
        Its sizes.
    bias : bool
        Whether it has a bias.
    prefix : str
        Start of the names ``weight`` and ``bias``.
    """

    def __init__(self, n_in: int, n_out: int, *, bias: bool = False, prefix: str = "") -> None:
        super().__init__(IdentityCommunicator(), n_in, n_out, bias=bias, prefix=prefix)


class RowParallel(_Linear):
    """``y = x @ weight.T + bias`` with the inputs split over the ranks; the bias is added once.

    Parameters
    ----------
    comm : Communicator
        The tensor-parallel group of n ranks.
    n_in, n_out : int
        Sizes of the whole map.
    bias : bool
        Whether it has a bias, held by every rank.
    prefix : str
        Start of the names ``weight`` and ``bias``.
    split_input : bool
        The input is the same on every rank, which takes its part of it.
    sequence_parallel : bool
        The output is split along dim -2: reduce-scatter forward, all-gather backward.
    n_chunks : int
        Pieces in which the collective overlaps with the product.

    Raises
    ------
    UnevenSplit
        If the inputs do not divide; names the nearest degrees that would do.

    Notes
    -----
    Cost: an all-reduce of the output; with `sequence_parallel` a reduce-scatter of the output and
    an all-gather of its gradient, from which every rank computes the whole bias gradient.
    """

    def __init__(
        self,
        comm: Communicator,
        n_in: int,
        n_out: int,
        *,
        bias: bool = False,
        prefix: str = "",
        split_input: bool = False,
        sequence_parallel: bool = False,
        n_chunks: int = 1,
    ) -> None:
        super().__init__(comm, prefix, sequence_parallel, n_chunks)
        self._input = SplitGather(comm) if split_input else None
        self.parameters[prefix + "weight"] = ShardedParameter((n_out, n_in), comm.size, 1)
        if bias:
            self.parameters[prefix + "bias"] = ShardedParameter((n_out,), comm.size)

    def forward(self, p: Parameters, x: Array) -> tuple[Array, Saved]:
        """Apply the map.

        Parameters
        ----------
        p : mapping of str to ndarray
            This rank's parameters.
        x : ndarray
            This rank's inputs, ``(..., n_in / n)``, or all of them.

        Returns
        -------
        tuple of ndarray and Saved
            Shape ``(..., n_out)``: the same on every rank, or this rank's part of the sequence.
        """
        x = x if self._input is None else self._input.forward(x)
        y = self._reduced(x, partial(nn.linear, weight=self._weight(p)))
        return self._add_bias(p, y), Saved(x=x)

    def backward_input(self, p: Parameters, saved: Saved, grad: Array) -> Array:
        """Gradient of the input.

        Parameters
        ----------
        p : mapping of str to ndarray
            This rank's parameters.
        saved : Saved
            As `forward` returned it.
        grad : ndarray
            Gradient of the output.

        Returns
        -------
        ndarray
            Of the shape of the input.
        """
        weight = self._weight(p)
        product = partial(nn.linear_backward_input, weight=weight)
        if self.sequence_parallel and self.comm.size > 1:
            width = weight.shape[1]
            to, saved["grad"] = gather_product(self.comm, grad, product, width, self.n_chunks, True)
        else:
            saved["grad"] = grad
            to = product(grad)
        return to if self._input is None else self._input.backward(to)
