"""How fast the planner searches: configurations a second, on one core.

Run from the repository root: ``python benchmarks/planner_search.py``.
"""

from __future__ import annotations

import resource
import time

from mpipar.planner import MODELS, Pricing
from mpipar.planner.search import ALL
from mpipar.topology import PRESETS

CASES = (
    ("gpt-22b", "dgx-a100", 64, 256),
    ("gpt3-175b", "dgx-a100", 512, 1536),
    ("llama3-405b", "dgx-h100", 16384, 2048),
)


def main() -> None:
    for model, machine, n_devices, batch in CASES:
        pricing = Pricing(MODELS[model], PRESETS[machine].take(n_devices))
        wall, cpu = time.perf_counter(), time.process_time()
        found = pricing.search(batch, ALL)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(
            f"{model:12} on {n_devices:6d} {machine}: {found.n_evaluated:,} configurations "
            f"({found.n_fitting:,} fit and are timed) in {wall:.1f} s ({cpu:.1f} s of CPU), "
            f"{found.n_evaluated / cpu / 1e6:.2f} M a CPU second, peak {peak:.0f} MiB"
        )


if __name__ == "__main__":
    main()
