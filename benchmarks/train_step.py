"""Tokens per second of one training step against PyTorch, and where our time goes.

Both sides run in one process, one thread each, in alternating rounds on the same batch: forward,
backward and AdamW. Without PyTorch only our side runs.

    OPENBLAS_NUM_THREADS=1 python benchmarks/train_step.py --batch 16 8 --rounds 7
    OPENBLAS_NUM_THREADS=1 python benchmarks/train_step.py --batch 16 --profile
"""

from __future__ import annotations

import argparse
import collections
import functools
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from mpipar import nn
from mpipar.models import GPT, GPTConfig

Step = Callable[[], float]

GROUPS = {
    "matrix products": ("linear", "linear_backward_input", "linear_backward_weight"),
    "attention": ("causal_attention", "causal_attention_backward"),
    "GELU": ("gelu", "slope_backward"),
    "norms": ("layer_norm", "layer_norm_backward_input"),
    "biases and residuals": ("bias_backward", "add_residual"),
    "embedding": ("embedding", "embedding_backward"),
    "loss": ("cross_entropy", "cross_entropy_backward"),
    "update": ("adamw_update",),
}


def our_step(config: GPTConfig, tokens: np.ndarray, targets: np.ndarray) -> Step:
    """Make one training step of our model."""
    model = GPT(config)
    parameters = model.init(0)
    gradients, m, v = ({n: np.zeros_like(p) for n, p in parameters.items()} for _ in range(3))
    count = iter(range(1, sys.maxsize))

    def step() -> float:
        loss, context = model.forward(parameters, tokens, targets, 1.0 / targets.size)
        model.backward(parameters, context, gradients)
        number = next(count)
        for n, p in parameters.items():
            nn.adamw_update(p, gradients[n], m[n], v[n], number, 1e-3, weight_decay=0.01)
        return loss

    return step


def torch_step(config: GPTConfig, tokens: np.ndarray, targets: np.ndarray) -> Step:
    """Make one training step of the PyTorch model."""
    import torch

    sys.path.insert(0, str(Path(__file__).parent))
    from torch_gpt import TorchGPT

    torch.set_num_threads(1)
    model = TorchGPT(config)
    for name, p in GPT(config).init(0).items():
        model.get_parameter(name).data = torch.from_numpy(p)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.01)
    x, y = torch.from_numpy(tokens), torch.from_numpy(targets).reshape(-1)

    def step() -> float:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x).reshape(-1, config.vocabulary), y)
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def seconds(step: Step, n_steps: int) -> float:
    """Median time of a step."""
    times = []
    for _ in range(n_steps):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def spread(values: list[float], form: str) -> str:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:{form}} ({low:{form}} .. {high:{form}})"


def compare(steps: dict[str, Step], n_tokens: int, n_rounds: int, n_steps: int) -> None:
    """Alternate the sides, the order turned every round, and print tokens/s and ratios."""
    for name, step in steps.items():
        losses = [step() for _ in range(3)]
        print(f"  {name:7} loss {losses[0]:.5f} -> {losses[-1]:.5f} in 3 steps")
    rates: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(n_rounds):
        for name in sorted(steps, reverse=bool(turn % 2)):
            rates[name].append(n_tokens / seconds(steps[name], n_steps))
    for name, values in rates.items():
        print(f"  {name:7} tokens/s {spread(values, '.0f')}")
    if "torch" in rates:
        ratios = [a / b for a, b in zip(rates["mpipar"], rates["torch"], strict=True)]
        print(f"  ratio mpipar/torch {spread(ratios, '.2f')} over {n_rounds} rounds")


def timed(
    spent: collections.Counter[str], group: str, function: Callable[..., object]
) -> Callable[..., object]:
    """Make a function that adds its seconds to a group."""

    @functools.wraps(function)
    def call(*args: object, **keywords: object) -> object:
        start = time.perf_counter()
        result = function(*args, **keywords)
        spent[group] += time.perf_counter() - start
        return result

    return call


def watch_nn(spent: collections.Counter[str]) -> None:
    """Time the functions of `nn` by group."""
    for group, names in GROUPS.items():
        for name in names:
            setattr(nn, name, timed(spent, group, getattr(nn, name)))


def profile(config: GPTConfig, tokens: np.ndarray, targets: np.ndarray, n_steps: int) -> None:
    """Time the functions of `nn` inside whole steps and print shares."""
    spent: collections.Counter[str] = collections.Counter()
    watch_nn(spent)
    step = our_step(config, tokens, targets)
    faults = [resource.getrusage(resource.RUSAGE_SELF).ru_minflt]
    for _ in range(2):
        step()
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
    spent.clear()
    start = time.perf_counter()
    for _ in range(n_steps):
        step()
    total = time.perf_counter() - start
    later = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults[-1]
    spent["rest"] = total - sum(spent.values())
    for group, value in spent.most_common():
        print(f"  {group:21} {value / n_steps * 1e3:7.2f} ms {value / total:6.1%}")
    rate = GPT(config).n_flops(tokens.size) * n_steps / total / 1e9
    print(f"  {'step':21} {total / n_steps * 1e3:7.2f} ms, {rate:.0f} Gflop/s")
    print(f"  page faults: first step {faults[1] - faults[0]}, later {later / n_steps:.1f} a step")


def main() -> None:
    """Run the comparison or the profile."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in {"dim": 256, "layers": 4, "heads": 4, "seq": 128}.items():
        parser.add_argument("--" + name, type=int, default=value)
    parser.add_argument("--batch", type=int, nargs="+", default=[16, 8])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=5, help="steps a round and side")
    parser.add_argument("--profile", action="store_true")
    a = parser.parse_args()
    config = GPTConfig(n_layers=a.layers, width=a.dim, n_heads=a.heads, sequence=a.seq)
    generator = np.random.default_rng(0)
    for batch in a.batch:
        tokens, targets = generator.integers(0, 256, (2, batch, a.seq))
        print(f"batch {batch}: {a.layers} layers, width {a.dim}, {a.heads} heads, {a.seq} tokens")
        if a.profile:
            profile(config, tokens, targets, a.steps)
            continue
        steps = {"mpipar": our_step(config, tokens, targets)}
        try:
            steps["torch"] = torch_step(config, tokens, targets)
        except ImportError:
            print("  PyTorch is not installed: our side alone")
        compare(steps, batch * a.seq, a.rounds, a.steps)


if __name__ == "__main__":
    main()
