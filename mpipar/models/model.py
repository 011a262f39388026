"""What all models of blocks on a residual stream share: parameters, forward, backward, loss."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from mpipar.comm import Communicator
from mpipar.errors import EmptyInput, UnsupportedArray
from mpipar.models.config import ModelConfig
from mpipar.models.ends import Embedding, Head
from mpipar.models.layers import Block
from mpipar.models.parallel import TensorParallel
from mpipar.models.parts import Gradients, OnReady, Parameters, Residual, Saved, Streams
from mpipar.models.workspace import Workspace
from mpipar.nn.array import Array
from mpipar.nn.checks import check_shape
from mpipar.tensor_parallel.parameter import ShardedParameter, check_heads
from mpipar.tensor_parallel.random import draw_parameter


@dataclass
class Context:
    """Activations of one forward pass, used up by one backward pass.

    Attributes
    ----------
    embedding, head : Saved
        What the first and the last layer keep.
    blocks : list of list of Saved
        What both halves of each block keep.
    """

    embedding: Saved = field(default_factory=dict)
    blocks: list[list[Saved]] = field(default_factory=list)
    head: Saved = field(default_factory=dict)


class Model:
    """A model as plain functions of a parameter dict; a subclass names the halves of its blocks.

    Parameters
    ----------
    config : ModelConfig
        Its shape.
    tp : Communicator, optional
        The tensor-parallel group: each rank holds its part of every weight, and all methods that
        compute are collective. The heads, `width` and the hidden width must divide.
    sequence_parallel : bool
        Split what lies between the layers along the sequence; after a backward pass, `finish`.

    Attributes
    ----------
    halves : tuple of type
        Parts of a block, in forward order.
    shards : dict of str to ShardedParameter
        Which part of each parameter a rank holds, in forward order.
    workspace : Workspace
        Owns the activation buffers between steps.
    embedding, blocks, head
        The layers, each with ``forward``, ``backward_input`` and ``backward_weight``.
    """

    halves: tuple[type[Residual], ...] = ()

    def __init__(
        self,
        config: ModelConfig,
        tp: Communicator | None = None,
        sequence_parallel: bool = False,
    ) -> None:
        self.config = config
        self.workspace = Workspace()
        self.tp = TensorParallel(tp, sequence_parallel)
        check_heads(config.n_heads, config.kv_heads, self.tp.size)
        self.embedding = Embedding(config, self.workspace, tp=self.tp)
        self.blocks = [
            Block([half(config, self.workspace, f"blocks.{i}.", self.tp) for half in self.halves])
            for i in range(config.n_layers)
        ]
        self.head = Head(config, self.workspace, tp=self.tp)
        inner = [half for block in self.blocks for half in block.halves]
        parts = [self.embedding, *inner, self.head]
        self.shards = {name: shard for part in parts for name, shard in part.shards.items()}
        self._shapes = {name: shard.local_shape for name, shard in self.shards.items()}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of this rank's parameters by name, in forward order.

        Returns
        -------
        dict of str to tuple of int
            Shapes.
        """
        return dict(self._shapes)

    def stream_shape(self, n: int, sequence: int) -> tuple[int, int, int]:
        """Shape of this rank's residual stream.

        Parameters
        ----------
        n, sequence : int
            Rows of tokens, and tokens of a row.

        Returns
        -------
        tuple of int
            Rows, tokens and width.
        """
        return n, self.tp.n_rows(sequence), self.config.width

    def finish(self, gradients: Parameters) -> None:
        """Complete the gradients of all microbatches under sequence parallelism. Collective.

        Parameters
        ----------
        gradients : mapping of str to Array
            Those of norms and positions are summed over the ranks, in place.
        """
        names = (n for n in self.shards if n.split(".")[-2] in ("ln", "ln1", "ln2", "pos"))
        self.tp.finish(gradients, names)

    def init(
        self,
        seed: int,
        dtype: np.typing.DTypeLike = np.float32,
        names: Iterable[str] | None = None,
    ) -> dict[str, np.ndarray]:
        """Draw parameters; each depends on the seed and its own name only, whatever the degree.

        Embeddings are N(0, 0.02), weights have variance ``1 / (3 n_in)``, those that end a residual
        branch are divided by ``sqrt(2 n_layers)`` (GPT-2), biases are 0 and norm weights 1.

        Parameters
        ----------
        seed : int
            Any non-negative number.
        dtype : dtype
            Of the parameters.
        names : iterable of str, optional
            Draw these only, such as those of a stage; all by default.

        Returns
        -------
        dict of str to numpy.ndarray
            Parameters in forward order.
        """
        chosen = set(self.shards if names is None else names)
        return {n: self._draw(seed, n, s, dtype) for n, s in self.shards.items() if n in chosen}

    def _draw(
        self, seed: int, name: str, shard: ShardedParameter, dtype: np.typing.DTypeLike
    ) -> np.ndarray:
        shape = shard.shape
        if name.endswith("bias"):
            return np.zeros(shard.local_shape, dtype)
        if len(shape) == 1:
            return np.ones(shape, dtype)
        std = 0.02 if name in ("tok.weight", "pos.weight") else 1.0 / math.sqrt(3 * shape[1])
        if name.endswith(("proj.weight", "down.weight")):
            std /= math.sqrt(2 * self.config.n_layers)
        stream = np.random.SeedSequence([seed, zlib.crc32(name.encode())])
        generator = np.random.Generator(np.random.Philox(stream))
        return draw_parameter(lambda s: generator.normal(0.0, std, s), shard, self.tp.rank, dtype)

    @property
    def _name(self) -> str:
        return type(self).__name__

    def _check(self, parameters: Parameters, tokens: Array) -> None:
        missing = [name for name in self._shapes if name not in parameters]
        if missing:
            raise EmptyInput(self._name, f"parameters lack {', '.join(missing[:3])}")
        for name, shape in self._shapes.items():
            check_shape(self._name, name, parameters[name], shape)
        if tokens.ndim != 2 or tokens.shape[0] < 1:
            raise UnsupportedArray(
                f"{self._name} needs tokens of shape (batch, sequence), got {tuple(tokens.shape)}"
            )

    def forward(
        self,
        parameters: Parameters,
        tokens: Array,
        targets: Array,
        loss_scale: float = 1.0,
        generator: np.random.Generator | None = None,
    ) -> tuple[float, Context]:
        """Compute the loss and keep what backward needs.

        Parameters
        ----------
        parameters : mapping of str to Array
            As `init` draws them.
        tokens, targets : Array
            Integers of shape ``(batch, sequence)``.
        loss_scale : float
            Factor on the loss and so on all gradients.
        generator : numpy.random.Generator, optional
            Seeds the dropout masks of all layers; needed if the configuration has dropout.

        Returns
        -------
        loss : float
            `loss_scale` times the sum of the cross-entropies of all targets that count.
        context : Context
            Owns the activations.

        Raises
        ------
        UnsupportedArray
            If shapes or dtypes do not fit.
        OutOfRange
            If a token or target lies outside the vocabulary, or a row is too long.
        EmptyInput
            If parameters or a needed generator are missing.
        """
        self._check(parameters, tokens)
        check_shape(self._name, "targets", targets, tuple(tokens.shape))
        if self.config.dropout and generator is None:
            raise EmptyInput(
                f"{self._name}.forward",
                f"dropout={self.config.dropout} needs generator=; use loss() to evaluate without",
            )
        context = Context()
        streams = Streams(generator)
        x, context.embedding = self.embedding.forward(parameters, tokens, streams.layer(0))
        for i, block in enumerate(self.blocks):
            x, saved = block.forward(parameters, x, streams.layer(i + 1))
            context.blocks.append(saved)
        loss, context.head = self.head.forward(parameters, x, targets, float(loss_scale))
        return loss, context

    def backward(
        self,
        parameters: Parameters,
        context: Context,
        gradients: Parameters,
        accumulate: bool = False,
        on_ready: OnReady | None = None,
    ) -> None:
        """Write all gradients, last layer first, and free the activations on the way.

        Parameters
        ----------
        parameters : mapping of str to Array
            As given to `forward`.
        context : Context
            As `forward` returned it; used up.
        gradients : mapping of str to Array
            One array for each parameter, written in place; views are fine.
        accumulate : bool
            Add to the gradients instead of writing them.
        on_ready : callable, optional
            Called with each name once its gradient is final, in reverse of the forward order (a
            tied embedding comes last).

        Raises
        ------
        EmptyInput
            If the context was used up before, or a gradient is missing.
        UnsupportedArray
            If a gradient has a wrong shape.
        """
        if not context.head:
            raise EmptyInput(
                f"{self._name}.backward", "this context was used up; call forward again"
            )
        missing = [name for name in self._shapes if name not in gradients]
        if missing:
            raise EmptyInput(f"{self._name}.backward", f"gradients lack {', '.join(missing[:3])}")
        to = Gradients(gradients, accumulate, on_ready)
        grad = self.head.backward_input(parameters, context.head)
        self.head.backward_weight(context.head, to)
        for block in reversed(self.blocks):
            saved = context.blocks.pop()
            grad = block.backward_input(parameters, saved, grad)
            block.backward_weight(saved, to)
        self.embedding.backward_input(context.embedding, grad)
        self.embedding.backward_weight(context.embedding, to)

    def loss(self, parameters: Parameters, tokens: Array, targets: Array) -> float:
        """Evaluate: the sum of the cross-entropies, without dropout and without keeping anything.

        Parameters
        ----------
        parameters : mapping of str to Array
            As `init` draws them.
        tokens, targets : Array
            Integers of shape ``(batch, sequence)``.

        Returns
        -------
        float
            Sum over all targets that count, in nats.
        """
        x = self._stream(parameters, tokens)
        check_shape(self._name, "targets", targets, tuple(tokens.shape))
        loss, saved = self.head.forward(parameters, x, targets)
        self.head.release(saved)
        return loss

    def logits(self, parameters: Parameters, tokens: Array) -> Array:
        """Scores of the next token at every place, without keeping anything else.

        Parameters
        ----------
        parameters : mapping of str to Array
            As `init` draws them.
        tokens : Array
            Integers of shape ``(batch, sequence)``.

        Returns
        -------
        Array
            Shape ``(batch, sequence, vocabulary)``, before the softmax.
        """
        saved: Saved = {}
        logits = self.head.logits(parameters, self._stream(parameters, tokens), saved)
        self.head.release(saved)
        return self.head.joined(logits)

    def _stream(self, parameters: Parameters, tokens: Array) -> Array:
        """The residual stream after the last block."""
        self._check(parameters, tokens)
        x, saved = self.embedding.forward(parameters, tokens)
        self.embedding.release(saved)
        for half in (half for block in self.blocks for half in block.halves):
            x, saved = half.forward(parameters, x)
            half.release(saved)
        return x

    def n_flops(self, n_tokens: int) -> int:
        """Operations of forward and backward: ``6 n`` per weight and token, plus full attention.

        Parameters
        ----------
        n_tokens : int
            Tokens, in rows of the longest length.

        Returns
        -------
        int
            Floating-point operations, a multiply-add counted as two (Chowdhery et al. 2022).
        """
        c = self.config
        lookups = {"tok.weight", "pos.weight"} - ({"tok.weight"} if c.tied else set())
        weights = [s.shape for n, s in self.shards.items() if n not in lookups]
        n_weights = sum(math.prod(s) for s in weights if len(s) == 2)
        return n_tokens * (6 * n_weights + 12 * c.n_layers * c.width * c.sequence)
