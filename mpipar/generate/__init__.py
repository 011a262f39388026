"""Text from a model: decoding over a paged cache, many requests at once.

The global object is the set of requests; a rank owns its layers' and heads' keys and values of all
of them. Every rank takes the same decisions; the last stage's choice of tokens is broadcast.
"""

from mpipar.generate.decoder import Decoder, Span
from mpipar.generate.generator import Figures, Generator
from mpipar.generate.load import Source, build_decoder, open_source
from mpipar.generate.sampling import Sampling

__all__ = [
    "Decoder",
    "Figures",
    "Generator",
    "Sampling",
    "Source",
    "Span",
    "build_decoder",
    "open_source",
]
