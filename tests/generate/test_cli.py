"""`mpipar generate` on models of this library's own, and its refusals."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mpipar import checkpoint
from mpipar.comm import IdentityCommunicator
from mpipar.generate import open_source
from mpipar.models import GPTConfig, LlamaConfig, build_model
from mpipar.train import Recipe
from mpipar.train.recipe import dump_recipe
from mpipar.train.run_folder import RECIPE

SHAPE = {"n_layers": 4, "width": 48, "sequence": 64, "vocabulary": 256}
MODELS = {
    "gpt": GPTConfig(**SHAPE, n_heads=6),
    "llama": LlamaConfig(**SHAPE, n_heads=6, n_kv_heads=3, hidden=36),
}
PROMPTS = ["the same start: a", "the same start: b", "another"]


def run_folder(place: Path, name: str) -> Path:
    """A run that has drawn its weights and stopped."""
    config = MODELS[name]
    place.mkdir()
    (place / RECIPE).write_text(dump_recipe(Recipe(model=config)))
    weights = {n: w * (4 if w.ndim == 2 else 1) for n, w in build_model(config).init(3).items()}
    checkpoint.save(IdentityCommunicator(), place / "checkpoints", 1, weights, {"step": 1})
    return place


def generate(n: int, *words: object) -> subprocess.CompletedProcess[str]:
    start = ["run", "-n", n, "generate"] if n > 1 else ["generate"]
    command = [sys.executable, "-m", "mpipar", *start, *words]
    command = [word if isinstance(word, bytes) else str(word) for word in command]
    return subprocess.run(command, capture_output=True, timeout=120,
                          text=True, errors="replace")  # fmt: skip


def expected(name: str, prompt: str, n: int) -> str:
    """Without a cache, the whole text for every token."""
    model = build_model(MODELS[name])
    weights = {n: w * (4 if w.ndim == 2 else 1) for n, w in model.init(3).items()}
    tokens = list(prompt.encode())
    for _ in range(n):
        tokens.append(int(model.logits(weights, np.array([tokens]))[0, -1].argmax()))
    return bytes(tokens).decode(errors="replace")


def texts(output: str) -> str:
    return output[: output.rindex("-" * 48)]


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_prompts_of_a_file_are_continued_and_share_their_start(tmp_path, name):
    folder, file = run_folder(tmp_path / "run", name), tmp_path / "prompts.txt"
    file.write_text("\n".join(PROMPTS) + "\n")
    words = ["--model", folder, "--prompts", file, "--max-tokens", 9, "--block-size", 4]
    done = generate(1, *words)
    assert done.returncode == 0, done.stderr
    for number, prompt in enumerate(PROMPTS):
        assert f"--- {number}\n{expected(name, prompt, 9)}" in done.stdout
    # 17, 17 and 7 tokens in blocks of 4: nine full ones; the first four of the second are hit.
    assert re.search(r"prompt blocks +9, 4 of them hit", done.stdout)
    assert re.search(r"prompt tokens +41, 16 of them skipped", done.stdout)


@pytest.mark.kill
@pytest.mark.parametrize(
    ("n", "degrees"),
    [(3, ["--tp", 3]), (2, ["--pp", 2]), (2, []),
     pytest.param(6, ["--tp", 3, "--pp", 2], marks=pytest.mark.slow)],
)  # fmt: skip
def test_ranks_of_a_job_write_the_same_text(tmp_path, n, degrees):
    folder = run_folder(tmp_path / "run", "llama")
    words = ["--model", folder, "--max-tokens", 9, "--temperature", 0.7, "--seed", 5]
    words += [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    alone, together = generate(1, *words), generate(n, *words, *degrees)
    assert alone.returncode == together.returncode == 0, alone.stderr + together.stderr
    if degrees:  # replicas number their requests anew, so their draws differ
        assert texts(together.stdout) == texts(alone.stdout)
    assert together.stdout.count("--- ") == 3


@pytest.mark.kill
def test_replicas_write_what_one_rank_writes_and_may_be_more_than_prompts(tmp_path):
    folder = run_folder(tmp_path / "run", "llama")
    words = ["--model", folder, "--max-tokens", 9, "--block-size", 4]
    words += [word for prompt in PROMPTS[:2] for word in ("--prompt", prompt)]
    alone, together = generate(1, *words), generate(3, *words)
    assert together.returncode == 0, together.stderr
    assert texts(together.stdout) == texts(alone.stdout)
    assert "fetched from other ranks" in together.stdout


def test_a_single_prompt_comes_as_it_is_made(tmp_path):
    folder = run_folder(tmp_path / "run", "gpt")
    done = generate(1, "--model", folder, "--prompt", "abc", "--max-tokens", 9)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(expected("gpt", "abc", 9).rstrip("\ufffd"))


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--prompt", "a", "--tp", "2"], 3, "2"),
        (["--prompt", "a" * 60], 1, "context must be in range 1..64 (at most 4 new), got 124"),
        (["--prompt", b"a\xff"], 1, "prompt 0 is no UTF-8 text from its character 1 on"),
        (["--prompts", "binary.txt"], 1, "binary.txt is no UTF-8"),
        ([], 1, "no prompt"),
        (["--prompt", ""], 1, "at least one token"),
        (["--prompt", "a", "--temperature", "-1"], 1, "temperature"),
        (["--prompts", "nowhere.txt"], 1, "nowhere.txt"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, words, code, says):
    folder = run_folder(tmp_path / "run", "llama")
    (tmp_path / "binary.txt").write_bytes(b"a\xff\n")
    words = [tmp_path / w if w == "binary.txt" else w for w in words]
    done = generate(1, "--model", folder, *words)
    assert done.returncode == code, done.stderr
    assert says in done.stderr
    assert done.stdout == ""


def test_a_model_that_is_not_there_or_has_no_tokenizer_is_named(tmp_path):
    done = generate(1, "--model", tmp_path / "none", "--prompt", "a")
    assert (done.returncode, "does not exist" in done.stderr) == (1, True)
    config = dataclasses.replace(MODELS["llama"], vocabulary=300)
    checkpoint.export_hf(tmp_path / "hf", config, build_model(config).init(0))
    done = generate(1, "--model", tmp_path / "hf", "--prompt", "a")
    assert (done.returncode, "tokenizer.json is missing" in done.stderr) == (1, True)


def test_an_exported_model_of_bytes_needs_no_tokenizer(tmp_path):
    folder = run_folder(tmp_path / "run", "gpt")
    export = [sys.executable, "-m", "mpipar", "export", folder, tmp_path / "hf"]
    subprocess.run(export, check=True, timeout=60)
    done = generate(1, "--model", tmp_path / "hf", "--prompt", "abc", "--max-tokens", 9)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(expected("gpt", "abc", 9).rstrip("\ufffd"))
    before = (tmp_path / "hf" / "config.json").read_text()
    again = subprocess.run([*export, "--dtype", "float16"], capture_output=True, timeout=60)
    assert again.returncode == 1
    assert b"holds config.json already; --overwrite replaces it" in again.stderr
    assert (tmp_path / "hf" / "config.json").read_text() == before
    subprocess.run([*export, "--dtype", "float16", "--overwrite"], check=True, timeout=60)


def test_a_tokenizer_beside_the_weights_is_used(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    checkpoint.export_hf(tmp_path, MODELS["llama"], build_model(MODELS["llama"]).init(0))
    letters = {letter: number for number, letter in enumerate("abc<")}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(letters, []))
    inner.save(str(tmp_path / "tokenizer.json"))
    found = open_source(tmp_path).tokenizer
    assert found.encode("cab") == [2, 0, 1]
    assert found.decode([0, 2]).replace(" ", "") == "ac"
