"""A distributed cache of keys and values: paged, with shared prefixes, across ranks.

The global object is the tokens that requests have seen; a rank owns blocks of some of them, for
its layers and heads; point-to-point fetches bring blocks to the rank that needs them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mpipar.distributed_cache.directory import Batch, PrefixDirectory, PrefixLog
from mpipar.distributed_cache.eviction import LRU, EvictionPolicy
from mpipar.distributed_cache.hashing import Chain, chain_of, root_digest
from mpipar.distributed_cache.layout import (
    CacheLayout,
    Piece,
    cache_layouts,
    head_range,
    plan_transfer,
)
from mpipar.distributed_cache.pool import BlockPool
from mpipar.distributed_cache.prefix_index import Index, PrefixIndex
from mpipar.distributed_cache.radix import RadixIndex
from mpipar.distributed_cache.retention import Retention
from mpipar.distributed_cache.router import Router
from mpipar.distributed_cache.sequences import PagedSequences, Sequence
from mpipar.distributed_cache.status import BlockName

if TYPE_CHECKING:
    from mpipar.distributed_cache.engine import TransferEngine
    from mpipar.distributed_cache.founding import (
        CacheRoutingHint,
        CacheShardInfo,
        CacheSyncProtocol,
        EventKind,
        SyncEvent,
    )
    from mpipar.distributed_cache.holder import PoolHolder
    from mpipar.distributed_cache.plans import PlanStream
    from mpipar.distributed_cache.storage import CacheStorage
    from mpipar.distributed_cache.transfer import State, Transfer

__all__ = [
    "Batch",
    "BlockName",
    "BlockPool",
    "CacheLayout",
    "CacheRoutingHint",
    "CacheShardInfo",
    "CacheStorage",
    "CacheSyncProtocol",
    "Chain",
    "EventKind",
    "EvictionPolicy",
    "Index",
    "LRU",
    "PagedSequences",
    "Piece",
    "PlanStream",
    "PoolHolder",
    "PrefixDirectory",
    "PrefixIndex",
    "PrefixLog",
    "RadixIndex",
    "Retention",
    "Router",
    "Sequence",
    "State",
    "SyncEvent",
    "Transfer",
    "TransferEngine",
    "cache_layouts",
    "chain_of",
    "head_range",
    "plan_transfer",
    "root_digest",
]

_LAZY = {
    "CacheRoutingHint": "founding",
    "CacheShardInfo": "founding",
    "CacheStorage": "storage",
    "CacheSyncProtocol": "founding",
    "EventKind": "founding",
    "PlanStream": "plans",
    "PoolHolder": "holder",
    "State": "transfer",
    "SyncEvent": "founding",
    "Transfer": "transfer",
    "TransferEngine": "engine",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(f"mpipar.distributed_cache.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
