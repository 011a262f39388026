"""Prefixes fetched from another replica: the text stays that of full forward passes."""

import itertools

import pytest

from mpipar.comm import IdentityCommunicator, ThreadWorld
from mpipar.distributed_cache import Batch, CacheStorage, TransferEngine, chain_of, root_digest
from mpipar.distributed_cache.holder import digest_bytes
from mpipar.errors import CacheError
from mpipar.generate import Decoder, Generator, Sampling
from mpipar.models import build_model

from .test_generator import GPT, LLAMA, PROMPTS, parameters, uncached

SENDS = pytest.mark.parametrize("synchronous", [False, True], ids=["", "synchronous"])


def replica(comm, config=LLAMA, n_blocks=64, sampling=None, **options):
    """A generator of this rank alone; its cache is one of all ranks' caches."""
    model = build_model(config)
    decoder = Decoder(model, {n: a.astype("f4") for n, a in parameters(model).items()}, n_blocks, 4)
    engine = TransferEngine(comm, decoder.storage, small_bytes=512, large_bytes=1024, **options)
    return Generator(decoder, sampling, engine=engine), engine


def ended(generator, engine):
    """What remains when all is over: no pin, no leak."""
    engine.close()
    assert engine.n_pinned == 0
    generator.sequences.check()
    generator.sequences.index.check()


@SENDS
@pytest.mark.parametrize("config", [LLAMA, GPT], ids=["llama", "gpt"])
def test_a_prompt_that_another_rank_computed_is_fetched(config, synchronous):
    def body(comm):
        generator, engine = replica(comm, config)
        first = generator.generate(PROMPTS[:1] if comm.rank == 0 else [], 12)
        again = generator.generate(PROMPTS if comm.rank == 1 else [], 12)
        figures = generator.figures
        ended(generator, engine)
        return first + again, figures, engine.storage.n_bytes

    (first, _, n_bytes), (again, figures, _) = ThreadWorld(2, synchronous_sends=synchronous).run(
        body
    )
    assert first == [uncached(config, PROMPTS[0], 12)]
    assert again == [uncached(config, prompt, 12) for prompt in PROMPTS]
    # 11 tokens in blocks of 4: two full blocks, fetched once and hit by all five prompts.
    assert (figures.fetched_blocks, figures.failed_fetches) == (2, 0)
    assert (figures.hit_blocks, figures.skipped_tokens) == (10, 40)
    assert figures.fetched_bytes == 2 * n_bytes // 64


@SENDS
def test_a_conversation_goes_on_at_another_rank_with_drawn_tokens(synchronous):
    sampling = Sampling(1.0, seed=5)
    alone, _ = replica(IdentityCommunicator(), sampling=sampling)
    [answer] = alone.generate(PROMPTS[:1], 12)
    longer = [*PROMPTS[0], *answer]
    expected = alone.generate([longer], 12)

    def body(comm):
        generator, engine = replica(comm, sampling=sampling)
        generator.generate(PROMPTS[:1] if comm.rank == 0 else [], 12)
        found = generator.generate([longer] if comm.rank == 1 else [], 12)
        figures = generator.figures
        ended(generator, engine)
        return found, figures.fetched_blocks

    # 22 of 23 tokens were computed: five full blocks
    assert ThreadWorld(2, synchronous_sends=synchronous).run(body)[1] == (expected, 5)


@SENDS
def test_fewer_blocks_than_the_directory_says_are_completed_by_computing(synchronous):
    longer = [*PROMPTS[0], *range(40, 60)]
    digests = digest_bytes(chain_of(longer, 4, root_digest()).digests)

    def body(comm):
        generator, engine = replica(comm)
        generator.generate(PROMPTS[:1] if comm.rank == 0 else [], 1)
        if comm.rank == 1:  # a rumour: rank 0 has only the first two
            events = tuple((True, digest) for digest in digests)
            engine.progress()
            epoch, at = engine.directory.position(0)
            engine.directory.apply(Batch(0, epoch, at, at + len(events), 0, 0, events))
        found = generator.generate([longer] if comm.rank == 1 else [], 12)
        figures = generator.figures
        ended(generator, engine)
        return found, figures.fetched_blocks, figures.hit_blocks

    found = ThreadWorld(2, synchronous_sends=synchronous).run(body)[1]
    assert found == ([uncached(LLAMA, longer, 12)], 2, 2)


def test_a_silent_holder_costs_its_time_limit_and_no_text():
    def body(comm):
        # rank 1's clock goes on by a second each time that it looks: no answer is in time
        late = {"limit_s": 0.5, "clock": itertools.count().__next__} if comm.rank == 1 else {}
        generator, engine = replica(comm, **late)
        generator.generate(PROMPTS[:1] if comm.rank == 0 else [], 1)
        found = generator.generate(PROMPTS[:1] if comm.rank == 1 else [], 12)
        figures = generator.figures
        ended(generator, engine)
        return found, figures.fetched_blocks, figures.failed_fetches, figures.hit_blocks

    assert ThreadWorld(2).run(body)[1] == ([uncached(LLAMA, PROMPTS[0], 12)], 0, 1, 0)


@SENDS
@pytest.mark.parametrize("n_blocks", [7, 9, 64])
def test_three_ranks_at_once_in_full_caches(n_blocks, synchronous):
    def body(comm):
        generator, engine = replica(comm, n_blocks=n_blocks)
        found, fetched = [], 0
        for turn in range(3):
            mine = PROMPTS[(comm.rank + turn) % 3 :][:3]
            found.append((mine, generator.generate(mine, 12)))
            fetched += generator.figures.fetched_blocks
            assert generator.figures.peak_blocks <= n_blocks
        ended(generator, engine)
        return found, fetched

    texts = {tuple(p): uncached(LLAMA, p, 12) for p in PROMPTS}
    ranks = ThreadWorld(3, synchronous_sends=synchronous).run(body)
    assert sum(fetched for _, fetched in ranks) > 0
    for found, _ in ranks:
        for prompts, answers in found:
            assert answers == [texts[tuple(p)] for p in prompts]


def test_wrong_uses_are_refused():
    generator, engine = replica(IdentityCommunicator())
    other = TransferEngine(IdentityCommunicator(), CacheStorage(engine.storage.layout, 64))
    with pytest.raises(CacheError, match="another storage"):
        Generator(generator.decoder, engine=other)

    def body(comm):
        decoder = Decoder(build_model(LLAMA, comm), {}, 8, 4)
        with pytest.raises(CacheError, match="tp=3, pp=1"):
            Generator(decoder, engine=TransferEngine(comm, decoder.storage))

    ThreadWorld(3).run(body)


@pytest.mark.ranks(2, 3)
def test_all_other_ranks_fetch_what_rank_0_computed(comm):
    generator, engine = replica(comm)
    first = generator.generate(PROMPTS[:1] if comm.rank == 0 else [], 12)
    # 22 of 23 tokens were computed: five full blocks; news may come late on real ranks
    generator.fetcher.until(lambda: engine.directory.position(0) == (0, 5))
    found = generator.generate(PROMPTS, 12)
    figures = generator.figures
    ended(generator, engine)
    expected = [uncached(LLAMA, prompt, 12) for prompt in PROMPTS]
    assert found == expected
    assert first == (expected[:1] if comm.rank == 0 else [])
    assert figures.fetched_blocks == (2 if comm.rank else 0)
    assert figures.hit_blocks == 10
