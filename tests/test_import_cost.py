"""Start-up is paid on every rank: `import mpipar` is light and loads nothing heavy."""

import resource
import statistics
import subprocess
import sys

HEAVY = "numpy mpi4py matplotlib networkx safetensors ml_dtypes cupy torch argparse difflib"


def cpu_seconds(statement: str) -> float:
    """Process time of a new interpreter that runs one statement."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", statement], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_importing_costs_at_most_half_of_numpy() -> None:
    statements = ("pass", "import mpipar", "import numpy")
    for statement in statements:  # fill the file caches
        cpu_seconds(statement)
    rounds = [[cpu_seconds(statement) for statement in statements] for _ in range(9)]
    bare, ours, numpy = (statistics.median(times) for times in zip(*rounds, strict=True))
    assert ours - bare <= 0.5 * (numpy - bare), f"bare {bare}, mpipar {ours}, numpy {numpy}"


def test_nothing_heavy_is_loaded() -> None:
    code = f"import sys, mpipar; sys.exit(' '.join(set('{HEAVY}'.split()) & set(sys.modules)) or 0)"
    child = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert child.returncode == 0, child.stderr
    # the check itself can fail
    child = subprocess.run(
        [sys.executable, "-c", "import numpy; " + code], capture_output=True, check=False
    )
    assert child.returncode == 1
