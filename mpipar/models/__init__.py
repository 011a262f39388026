"""Models whose layers are parts with a forward, an input gradient and a weight gradient."""

from mpipar.models.config import GPTConfig
from mpipar.models.gpt import GPT, GPTContext

__all__ = ["GPT", "GPTConfig", "GPTContext"]
