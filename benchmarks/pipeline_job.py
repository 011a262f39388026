"""Tokens per second of training on two stages under 1F1B against torch.distributed.pipelining.

As in `train_job.py`: both sides in the same processes, one thread a rank, in blocks that alternate;
same GPT, same schedule, same microbatches. Ours is the whole step of `mpipar train`.

    python benchmarks/pipeline_job.py
    python benchmarks/pipeline_job.py --profile
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from train_job import BATCH, RECIPE, compare, launch, our_step, peer_step, profile

from mpipar.comm import init
from mpipar.train.recipe import MeshRecipe


def main() -> int:
    """Start the ranks, or be one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=4, help="steps a round and side")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.port is None:
        return launch(a.ranks, a, __file__)
    comm = init()
    recipe = dataclasses.replace(
        RECIPE,
        mesh=MeshRecipe(pp=comm.size),
        train=dataclasses.replace(RECIPE.train, microbatches=a.microbatches, schedule="1f1b"),
    )
    if comm.rank == 0:
        print(f"pp={comm.size}, 1F1B, batch {BATCH} in {a.microbatches} microbatches")
    if a.profile:
        profile(comm, a.steps, recipe)
        return 0
    peer = peer_step(comm, a.port, "make_pipeline_step", a.microbatches)
    compare(comm, a.rounds, a.steps, {"mpipar": our_step(comm, recipe), **peer})
    return 0


if __name__ == "__main__":
    sys.exit(main())
