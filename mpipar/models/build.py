"""From a shape to its model."""

from __future__ import annotations

from mpipar.comm import Communicator
from mpipar.errors import UnsupportedArray
from mpipar.models.config import GPTConfig, LlamaConfig, ModelConfig
from mpipar.models.gpt import GPT
from mpipar.models.llama import Llama
from mpipar.models.model import Model


def build_model(
    config: ModelConfig, tp: Communicator | None = None, sequence_parallel: bool = False
) -> Model:
    """Make the model whose shape this is.

    Parameters
    ----------
    config : ModelConfig
        A `GPTConfig` or a `LlamaConfig`.
    tp : Communicator, optional
        As in `Model`.
    sequence_parallel : bool
        As in `Model`.

    Returns
    -------
    Model
        A `GPT` or a `Llama`.
    """
    if isinstance(config, LlamaConfig):
        return Llama(config, tp, sequence_parallel)
    if isinstance(config, GPTConfig):
        return GPT(config, tp, sequence_parallel)
    raise UnsupportedArray(f"{type(config).__name__} is neither a GPTConfig nor a LlamaConfig")
