"""A rank that is killed while a job saves never costs the last good checkpoint."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from mpipar import checkpoint
from mpipar.comm import IdentityCommunicator

pytestmark = pytest.mark.kill
ONE = IdentityCommunicator()

PROGRAM = """
import os, signal, sys
from pathlib import Path
import numpy as np
import mpipar
from mpipar import checkpoint

folder, victim, nth, background = Path(sys.argv[1]), *map(int, sys.argv[2:5])
comm = mpipar.init()
arrays = lambda value: {f"w{comm.rank}": np.full(200_000, value, np.float64)}
checkpoint.save(comm, folder, 1, arrays(1), {"step": 1}, 1, is_writer=True)
seen = 0

def audit(event, arguments):
    global seen
    if event in ("open", "os.rename", "os.mkdir", "os.remove") and str(folder) in str(arguments[0]):
        seen += 1
        if seen == nth:
            os.kill(os.getpid(), signal.SIGKILL)

if comm.rank == victim:
    sys.addaudithook(audit)
if background:
    saver = checkpoint.Saver(comm)
    saver.begin(folder, 2, arrays(2), {"step": 2}, 1, is_writer=True)
    saver.close()
else:
    checkpoint.save(comm, folder, 2, arrays(2), {"step": 2}, 1, is_writer=True)
"""
FEW = [(0, 2), (0, 6), (1, 1), (1, 2)]
MANY = [(victim, nth) for victim in (0, 1, 2) for nth in range(1, 16)]


def points():
    """Who is killed, and at which of its looks at the file system."""
    for victim, nth in MANY:
        marks = () if (victim, nth) in FEW else (pytest.mark.slow,)
        yield pytest.param(victim, nth, marks=marks, id=f"rank{victim}-{nth}")


@pytest.mark.parametrize("background", [0, 1], ids=["at once", "background"])
@pytest.mark.parametrize(("victim", "nth"), list(points()))
def test_a_killed_rank(tmp_path: Path, victim: int, nth: int, background: int):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    root = str(Path(__file__).parents[2])
    words = [str(tmp_path / "saves"), victim, nth, background]
    command = [sys.executable, "-m", "mpipar", "run", "-n", "3", "--", program, *words]
    start = time.monotonic()
    done = subprocess.run(
        list(map(str, command)), env={**os.environ, "PYTHONPATH": root}, capture_output=True,
        text=True, timeout=120,
    )  # fmt: skip
    place = checkpoint.newest(ONE, tmp_path / "saves")
    assert place is not None
    loaded, state = checkpoint.load(place)
    assert sorted(loaded) == ["w0", "w1", "w2"]
    assert all((array == state["step"]).all() for array in loaded.values())
    if done.returncode == 0:  # the rank had nothing more to do
        assert state == {"step": 2}
    else:
        assert time.monotonic() - start < 60
        assert "signal 9" in done.stdout + done.stderr or str(-signal.SIGKILL) in done.stderr
    checkpoint.save(ONE, tmp_path / "saves", 3, {"w": np.zeros(1)}, {}, 1)
    assert [p.name for p in (tmp_path / "saves").iterdir()] == ["step-000000003"]
