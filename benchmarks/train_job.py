"""Tokens per second of the training job against PyTorch DDP on gloo, at 1 and 2 ranks.

One command starts the ranks; both sides train in the same processes, one thread a rank, in blocks
that alternate and whose order turns every round. Ours is the whole step of `mpipar train`, with its
sampler, gradient norm, clipping and the sum of the loss; the peer's is forward, backward with its
all-reduce, and AdamW.

    python benchmarks/train_job.py
    python benchmarks/train_job.py --profile --ranks 2
    python benchmarks/train_job.py --private --ranks 2

``--private`` takes a third side into the turns: ours with gradient buckets in private memory
instead of the node's, which is what the shared ones are measured against.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1]))

from mpipar.comm import Communicator, init
from mpipar.comm.node.arena import private_empty
from mpipar.comm.node.storage import NodeStorage
from mpipar.models import GPTConfig
from mpipar.train import Recipe, Trainer
from mpipar.train.recipe import TrainRecipe

CONFIG = GPTConfig(n_layers=4, width=256, n_heads=4, sequence=128)
BATCH = 16
RECIPE = Recipe(
    model=CONFIG,
    train=TrainRecipe(
        batch=BATCH, learning_rate=1e-3, final_learning_rate=1e-3, warmup_steps=0, steps=1_000_000,
        weight_decay=0.01, beta2=0.999,
    ),
)  # fmt: skip
Step = Callable[[], float]


def our_step(comm: Communicator, recipe: Recipe = RECIPE) -> Step:
    """The trainer's step, after a barrier."""
    trainer = Trainer(comm, recipe)

    def step() -> float:
        comm.barrier()
        start = time.perf_counter()
        trainer.train_step()
        return time.perf_counter() - start

    return step


def private_step(comm: Communicator) -> Step:
    """The trainer's step with gradient buckets in private memory."""
    with mock.patch.object(NodeStorage, "empty", lambda self, *shape: private_empty(*shape)):
        return our_step(comm)


def spread(values: list[float], form: str) -> str:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:{form}} ({low:{form}} .. {high:{form}})"


def peer_step(comm: Communicator, port: int, maker: str, *arguments: int) -> dict[str, Step]:
    """The peer's step, made by a function of `torch_peer`; nothing where PyTorch is missing."""
    try:
        import torch_peer
    except ImportError:
        return {}
    torch_peer.join(comm.rank, comm.size, port)
    return {"torch": getattr(torch_peer, maker)(torch_peer.CONFIG, BATCH, *arguments, 1e-3)}


def compare(comm: Communicator, n_rounds: int, n_steps: int, steps: dict[str, Step]) -> None:
    """Alternate the sides; rank 0 prints rates and their ratio by round."""
    rates: dict[str, list[float]] = {name: [] for name in steps}
    fastest = dict.fromkeys(steps, float("inf"))
    for turn in range(-1, n_rounds):  # the first round warms both up
        for name in sorted(steps, reverse=bool(turn % 2)):
            seconds = [steps[name]() for _ in range(n_steps)]
            if turn >= 0:
                fastest[name] = min(fastest[name], *seconds)
                rates[name].append(BATCH * CONFIG.sequence / statistics.median(seconds))
    if comm.rank == 0:
        for name, values in rates.items():
            best = BATCH * CONFIG.sequence / fastest[name]
            print(f"  {name:7} tokens/s {spread(values, '.0f')}, fastest step {best:.0f}")
        for other in sorted(set(rates) - {"mpipar"}):
            pairs = zip(rates["mpipar"], rates[other], strict=True)
            ratios = spread([a / b for a, b in pairs], ".3g")
            print(f"  ratio mpipar/{other} {ratios} over {n_rounds} rounds of {n_steps} steps")
        if "torch" not in rates:
            print("  PyTorch is not installed")


def profile(comm: Communicator, n_steps: int, recipe: Recipe = RECIPE) -> None:
    """Where the time of a step goes on rank 0."""
    from train_step import timed, watch_nn

    spent: collections.Counter[str] = collections.Counter()
    watch_nn(spent)
    trainer = Trainer(comm, recipe)
    for owner, name, group in (
        (trainer.optimizer, "step", "optimizer"),
        (trainer.sampler, "rows", "sampler"),
        (trainer.engine, "gradient_norm", "gradient norm"),
    ):
        setattr(owner, name, timed(spent, group, getattr(owner, name)))
    for _ in range(3):
        trainer.train_step()
    spent.clear()
    before, start = trainer.engine.communication_s, time.perf_counter()
    for _ in range(n_steps):
        trainer.train_step()
    total = time.perf_counter() - start
    spent["communication"] = trainer.engine.communication_s - before
    spent["rest"] = total - sum(spent.values())
    if comm.rank == 0:
        for group, seconds in spent.most_common():
            print(f"  {group:21} {seconds / n_steps * 1e3:7.2f} ms {seconds / total:6.1%}")
        print(f"  {'step':21} {total / n_steps * 1e3:7.2f} ms")


def launch(n_ranks: int, arguments: argparse.Namespace, file: str = __file__) -> int:
    """Start a benchmark on `n_ranks` ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    names = [k for k in ("rounds", "steps", "microbatches") if k in vars(arguments)]
    words = [f"--{k}={getattr(arguments, k)}" for k in names] + [f"--port={port}"]
    words += [f"--{k}" for k in ("profile", "private") if getattr(arguments, k, False)]
    root = str(Path(__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.getenv("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "mpipar", "run", "-n", str(n_ranks), "--", file, *words]
    return subprocess.run(command, env=environment).returncode


def main() -> int:
    """Start the ranks, or be one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=5, help="steps a round and side")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--private", action="store_true")
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.port is None:
        codes = [launch(n, arguments) for n in arguments.ranks]
        return max(codes)
    comm = init()
    if comm.rank == 0:
        shape = dataclasses.asdict(CONFIG)
        print(f"{comm.size} ranks, batch {BATCH}: " + ", ".join(
            f"{k} {shape[k]}" for k in ("n_layers", "width", "n_heads", "sequence")))  # fmt: skip
    if arguments.profile:
        profile(comm, arguments.steps)
    else:
        steps = {"mpipar": our_step(comm), **peer_step(comm, arguments.port, "make_step")}
        if arguments.private:
            steps["private"] = private_step(comm)
        compare(comm, arguments.rounds, arguments.steps, steps)
    return 0


if __name__ == "__main__":
    sys.exit(main())
