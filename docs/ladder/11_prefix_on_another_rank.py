"""Rung 11: a prompt that another rank has computed is fetched, not computed again.

Keys and values are kept in blocks of some tokens. The name of a block is a hash over its tokens and
all before it, the same on every rank, so that one rank can ask another for the blocks of a prompt.

Which global object is split?     The cache of keys and values, into blocks of tokens.
Which rank owns each local object? The rank that computed a block; others may hold copies.
Which traces may be published?    Counts of blocks and bytes. Never tokens, never hashes of them.

    python 11_prefix_on_another_rank.py
    mpipar run -n 3 -- 11_prefix_on_another_rank.py
"""

import numpy as np
from ladder import say, show, start

from mpipar.distributed_cache import (
    BlockPool,
    CacheLayout,
    CacheStorage,
    PagedSequences,
    PoolHolder,
    PrefixIndex,
    TransferEngine,
    chain_of,
    root_digest,
)

QUESTION = "A prompt of 30 tokens in blocks of 4: how many blocks can another rank use?"
ANSWER = 7  # the last two tokens fill no block


def until(engine, done):
    """Answer peers until something holds; no thread does it for us."""
    while not done():
        engine.progress()


def rung(comm):
    layout = CacheLayout(layers=(0, 2), heads=(0, 2), head_dim=3, block_size=4)
    storage = CacheStorage(layout, 16)
    engine = TransferEngine(comm, storage)
    pool = BlockPool(16)
    index = PrefixIndex(pool)
    sequences = PagedSequences(pool, layout.block_size, index=index)
    engine.serve(PoolHolder(pool, index, engine.log))
    prompt = list(range(100, 130))
    chain = chain_of(prompt, layout.block_size, root_digest())

    if comm.rank == 0:  # "compute" the keys and values: here each block holds its number
        sequence = sequences.start(prompt)
        for i, block in enumerate(sequence.table[: len(chain)]):
            storage.data[block] = i
        sequences.commit(sequence)
        sequences.finish(sequence)
    show(comm, "BEFORE: blocks of the prompt on each rank", len(index.match(chain)))

    n_bytes = 0
    if comm.rank > 0:
        transfer = engine.fetch([0], chain)
        until(engine, lambda: transfer.is_over)
        n_bytes = transfer.n_bytes
    arrived = comm.begin_all_reduce(np.array(1))  # rank 0 answers until all have theirs
    until(engine, arrived.test)
    found = index.match(chain)
    assert [int(storage.data[b].max()) for b in found] == list(range(len(found)))
    show(comm, "AFTER: blocks, and bytes fetched", f"{len(found)}, {n_bytes}")
    skipped = sequences.start([*prompt, 7]).n_hit_tokens
    say(comm, f"the next request with this prompt skips {skipped} tokens on every rank")
    engine.close()
    return len(found)


if __name__ == "__main__":
    start(rung, QUESTION)
