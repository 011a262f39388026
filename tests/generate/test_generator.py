"""Generation over the paged cache against full forward passes of the model."""

import numpy as np
import pytest

from mpipar.comm import ThreadWorld
from mpipar.errors import CountOutOfRange, EmptyInput, OutOfRange, UnevenSplit
from mpipar.generate import Decoder, Generator, Sampling
from mpipar.models import GPTConfig, LlamaConfig, build_model

LLAMA = LlamaConfig(
    n_layers=3, width=36, n_heads=9, n_kv_heads=3, hidden=48, sequence=64, vocabulary=96
)
GPT = GPTConfig(n_layers=3, width=24, n_heads=3, sequence=64, vocabulary=96)
PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14, n] for n in range(20, 25)]


def parameters(model):
    """Larger than at the start of training: scores lie far apart, so rounding decides nothing."""
    return {n: (a * 4 if a.ndim == 2 else a) for n, a in model.init(3, np.float64).items()}


def uncached(config, prompt, n):
    """The whole text through the model for every token."""
    model = build_model(config)
    values, text = parameters(model), list(prompt)
    for _ in range(n):
        text.append(int(model.logits(values, np.array([text]))[0, -1].argmax()))
    return text[len(prompt) :]


def cached(config, tp=None, pp=None, n_blocks=64, sampling=None, **options):
    model = build_model(config, tp)
    values = {n: a.astype(np.float32) for n, a in parameters(model).items()}
    return Generator(Decoder(model, values, n_blocks, 4, pp), sampling, **options)


@pytest.mark.parametrize("config", [LLAMA, GPT], ids=["llama", "gpt"])
@pytest.mark.parametrize("shares", [True, False])
def test_a_batch_gives_what_full_forward_passes_give(config, shares):
    generator = cached(config, shares_prefixes=shares)
    expected = [uncached(config, prompt, 12) for prompt in PROMPTS]
    assert generator.generate(PROMPTS, 12) == expected
    # 11 tokens in blocks of 4: two full blocks, shared by all but the first.
    assert generator.figures.hit_blocks == (8 if shares else 0)
    assert generator.figures.skipped_tokens == (32 if shares else 0)
    generator.sequences.check()


@pytest.mark.parametrize("config", [LLAMA, GPT], ids=["llama", "gpt"])
@pytest.mark.parametrize(("axis", "n"), [("tp", 3), ("pp", 2), ("pp", 3)])
def test_degrees_do_not_change_the_text(config, axis, n):
    def body(comm):
        generator = cached(config, **{axis: comm})
        return generator.generate(PROMPTS, 8), generator.decoder.storage.n_bytes

    found = ThreadWorld(n).run(body)
    expected = [uncached(config, prompt, 8) for prompt in PROMPTS]
    assert [text for text, _ in found] == [expected] * n
    # keys and values x layers x heads x width x 64 blocks of 4 tokens x 4 bytes, over the ranks
    whole = 2 * 3 * config.kv_heads * config.head_width * 64 * 4 * 4
    assert sum(size for _, size in found) == whole


def test_a_full_cache_preempts_and_changes_nothing():
    generator = cached(LLAMA, n_blocks=9)
    assert generator.generate(PROMPTS, 12) == [uncached(LLAMA, p, 12) for p in PROMPTS]
    assert generator.figures.preemptions > 0
    assert generator.figures.peak_blocks <= 9
    assert not generator.sequences.live


def test_draws_depend_on_the_seed_and_not_on_the_degree():
    def body(comm):
        return cached(LLAMA, tp=comm, sampling=Sampling(1.0, seed=5)).generate(PROMPTS, 8)

    alone, together = ThreadWorld(1).run(body)[0], ThreadWorld(3).run(body)
    assert together == [alone] * 3
    assert cached(LLAMA, sampling=Sampling(1.0, seed=6)).generate(PROMPTS, 8) != alone


def test_a_stop_token_ends_a_text_and_tokens_come_at_once():
    whole, seen = uncached(LLAMA, PROMPTS[0], 8), []
    [text] = cached(LLAMA).generate(
        PROMPTS[:1], 8, whole[4], lambda number, token: seen.append((number, token))
    )
    assert text == whole[: whole.index(whole[4])]
    assert seen == [(0, token) for token in text]


def test_what_cannot_be_generated_is_refused():
    generator = cached(LLAMA)
    with pytest.raises(EmptyInput, match="prompt 1"):
        generator.generate([[1], []], 4)
    with pytest.raises(CountOutOfRange, match=r"11 and 60 new.*context"):
        generator.generate(PROMPTS, 60)
    with pytest.raises(OutOfRange, match="token of prompt 0"):
        generator.generate([[96]], 4)
    with pytest.raises(UnevenSplit, match="tp=1 or 3"):
        ThreadWorld(2).run(lambda comm: cached(LLAMA, tp=comm))


def test_top_k_and_top_p_draw_from_the_likeliest_only():
    logits = np.log(np.array([0.1, 0.5, 0.3, 0.1]))

    def drawn(**options):
        return {Sampling(1.0, **options).choose(logits, 0, i) for i in range(200)}

    assert drawn() == {0, 1, 2, 3}
    assert drawn(top_k=2) == {1, 2}
    assert drawn(top_p=0.4) == {1}
    assert drawn(top_p=0.7) == {1, 2}
