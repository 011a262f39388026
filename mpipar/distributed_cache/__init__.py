"""A distributed cache of keys and values: paged, with shared prefixes, across ranks.

The global object is the tokens that requests have seen; a rank owns blocks of some of them, for
its layers and heads; point-to-point fetches bring blocks to the rank that needs them.
"""

from mpipar.distributed_cache.layout import (
    CacheLayout,
    Piece,
    cache_layouts,
    head_range,
    plan_transfer,
)
from mpipar.distributed_cache.storage import CacheStorage

__all__ = [
    "CacheLayout",
    "CacheStorage",
    "Piece",
    "cache_layouts",
    "head_range",
    "plan_transfer",
]
