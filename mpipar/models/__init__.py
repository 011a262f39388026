"""Models whose layers are parts with a forward, an input gradient and a weight gradient."""

from mpipar.models.build import build_model
from mpipar.models.config import GPTConfig, LlamaConfig, ModelConfig
from mpipar.models.gpt import GPT
from mpipar.models.llama import Llama
from mpipar.models.model import Context, Model

__all__ = [
    "Context",
    "GPT",
    "GPTConfig",
    "Llama",
    "LlamaConfig",
    "Model",
    "ModelConfig",
    "build_model",
]
