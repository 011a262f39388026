"""Models whose layers are parts with a forward, an input gradient and a weight gradient."""

from mpipar.models.gpt import GPT, GPTConfig, GPTContext

__all__ = ["GPT", "GPTConfig", "GPTContext"]
