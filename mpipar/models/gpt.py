"""A GPT over any vocabulary: pre-norm, learned positions, tanh GELU."""

from __future__ import annotations

from mpipar.comm import Communicator
from mpipar.models.config import GPTConfig
from mpipar.models.layers import Attention, FeedForward
from mpipar.models.model import Model


class GPT(Model):
    """A GPT as plain functions of a parameter dict.

    Between forward and backward it holds 16 widths per token and layer with ``hidden_factor=4`` and
    full heads: two norms with two each, q, k and v, the attended values, and slope and value of the
    hidden layer.

    Parameters
    ----------
    config : GPTConfig
        Its shape.
    tp : Communicator, optional
        As in `Model`.
    sequence_parallel : bool
        As in `Model`.
    """

    halves = (Attention, FeedForward)
    config: GPTConfig

    def __init__(
        self,
        config: GPTConfig,
        tp: Communicator | None = None,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__(config, tp, sequence_parallel)
