"""A paged key and value cache: blocks, prefixes and running sequences."""

from mpipar.distributed_cache.eviction import LRU, EvictionPolicy
from mpipar.distributed_cache.hashing import Chain, chain_of, root_digest
from mpipar.distributed_cache.pool import BlockName, BlockPool
from mpipar.distributed_cache.prefix_index import Index, PrefixIndex
from mpipar.distributed_cache.sequences import PagedSequences, Sequence

__all__ = [
    "BlockName",
    "BlockPool",
    "Chain",
    "EvictionPolicy",
    "Index",
    "LRU",
    "PagedSequences",
    "PrefixIndex",
    "Sequence",
    "chain_of",
    "root_digest",
]
