"""The type checker sees the result of every operation, and every wrong combination."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

CASES = Path(__file__).with_name("typed_cases.py")
ROOT = CASES.parents[2]
# Two mistakes that the checker has to report: a wrong result type, and an excuse without need.
PLANTED = """\
from typing import assert_type
from mpipar.units import GlobalBatchSize, ShardWidth, WorldSize
assert_type(GlobalBatchSize(128) / WorldSize(4), ShardWidth)
good = GlobalBatchSize(128) / WorldSize(4)  # type: ignore[operator]
"""


def test_result_types_are_inferred_and_wrong_combinations_refused(tmp_path, pytestconfig):
    planted = tmp_path / "planted.py"
    planted.write_text(PLANTED)
    cache = pytestconfig.cache.mkdir("mypy")
    command = [sys.executable, "-m", "mypy", "--strict", "--explicit-package-bases"]
    command += ["--ignore-missing-imports"]
    command += ["--config-file=", f"--cache-dir={cache}", str(CASES), str(planted)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    errors = [line for line in done.stdout.splitlines() if ": error: " in line]
    places = [re.findall(r"(\w+\.py):(\d+): error: .*\[([\w-]+)\]", line) for line in errors]
    assert places == [
        [("planted.py", "3", "assert-type")],
        [("planted.py", "4", "unused-ignore")],
    ], done.stdout + done.stderr
