"""The peer of `train_job.py` and `pipeline_job.py`: the same GPT in PyTorch over gloo.

DistributedDataParallel, or the 1F1B schedule of torch.distributed.pipelining.

    torchrun --nproc-per-node 2 benchmarks/torch_peer.py --steps 12

Float32, AdamW, one thread a rank. Prints tokens/s of the median step.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import distributed

sys.path.insert(0, str(Path(__file__).parents[1]))

from torch_gpt import TorchGPT

from mpipar.models import GPTConfig

CONFIG = GPTConfig(n_layers=4, width=256, n_heads=4, sequence=128)
BATCH = 16


def make_step(config: GPTConfig, batch: int, lr: float) -> Callable[[], float]:
    """One training step on this rank's share of a batch; the process group stands already.

    The batch is drawn outside the step and barriers come before it, so the peer is not charged for
    its data or for waiting.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank, n_ranks = distributed.get_rank(), distributed.get_world_size()
    model = torch.nn.parallel.DistributedDataParallel(TorchGPT(config))
    optimizer = torch.optim.AdamW(model.parameters(), lr)
    draw = sampler(config, batch // n_ranks, 1 + rank)

    def step() -> float:
        x, y = draw()
        distributed.barrier()
        start = time.perf_counter()
        optimizer.zero_grad()
        logits = model(x)
        loss = torch.nn.functional.cross_entropy(
            logits.reshape(-1, config.vocabulary), y.reshape(-1)
        )
        loss.backward()
        optimizer.step()
        return time.perf_counter() - start

    return step


def sampler(config: GPTConfig, n_rows: int, seed: int) -> Callable[[], list[torch.Tensor]]:
    """Rows of a text, and the bytes that follow each place."""
    source = Path(torch.__file__).parent / "functional.py"
    text = torch.frombuffer(bytearray(source.read_bytes()), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(seed)

    def draw() -> list[torch.Tensor]:
        places = torch.randint(len(text) - config.sequence - 1, (n_rows,), generator=generator)
        rows = torch.stack([text[i : i + config.sequence + 1] for i in places])
        return [rows[:, :-1], rows[:, 1:]]

    return draw


class TorchStage(torch.nn.Module):
    """An equal share of the blocks, the embeddings before the first, the head after the last."""

    def __init__(self, config: GPTConfig, rank: int, n_ranks: int) -> None:
        super().__init__()
        whole, n = TorchGPT(config), config.n_layers // n_ranks
        self.blocks = whole.blocks[rank * n : (rank + 1) * n]
        self.tok, self.pos = (whole.tok, whole.pos) if rank == 0 else (None, None)
        self.ln, self.head = (whole.ln, whole.head) if rank == n_ranks - 1 else (None, None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.tok is not None and self.pos is not None:
            x = self.tok(x) + self.pos(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(self.ln(x))


def make_pipeline_step(
    config: GPTConfig, batch: int, n_microbatches: int, lr: float
) -> Callable[[], float]:
    """One training step of this rank's stage under 1F1B."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank, n_ranks = distributed.get_rank(), distributed.get_world_size()
    model = TorchStage(config, rank, n_ranks)

    def loss(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        flat = logits.reshape(-1, config.vocabulary)
        return torch.nn.functional.cross_entropy(flat, y.reshape(-1))

    stage = PipelineStage(model, rank, n_ranks, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches, loss_fn=loss)
    optimizer = torch.optim.AdamW(model.parameters(), lr)
    draw = sampler(config, batch, 1)

    def step() -> float:
        x, y = draw()
        distributed.barrier()
        start = time.perf_counter()
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(x)
        elif rank == n_ranks - 1:
            schedule.step(target=y, losses=[])
        else:
            schedule.step()
        optimizer.step()
        return time.perf_counter() - start

    return step


def join(rank: int, n_ranks: int, port: int) -> None:
    """Start gloo on this machine."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(port))
    distributed.init_process_group("gloo", rank=rank, world_size=n_ranks)


def main() -> None:
    """Run under torchrun."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=12)
    steps = parser.parse_args().steps
    distributed.init_process_group("gloo")
    step = make_step(CONFIG, BATCH, 1e-3)
    seconds = statistics.median([step() for _ in range(steps)][2:])
    if distributed.get_rank() == 0:
        n = distributed.get_world_size()
        print(f"torch ddp n={n} {BATCH * CONFIG.sequence / seconds:.0f} tokens/s", flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
