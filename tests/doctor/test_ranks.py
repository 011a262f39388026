"""The collective half: on threads, on real ranks, and links against what they should reach."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mpipar.comm import Communicator, ThreadWorld
from mpipar.doctor import ranks as module
from mpipar.doctor.check import Check, Status
from mpipar.doctor.ranks import (
    ETHERNET,
    IN_NODE,
    LinkExpectation,
    card_rate,
    check_ranks,
    expectation,
    judge_link,
)
from mpipar.launch.place import Place


def run(n: int, folder: Path, monkeypatch: pytest.MonkeyPatch, n_nodes: int) -> list[list[Check]]:
    """The checks of every rank of a world of threads that stands on some nodes."""

    def stand(comm: Communicator) -> tuple[Place, ...]:
        return tuple(Place(r, f"n{r * n_nodes // n}", (r,), (r,), (0,)) for r in range(n))

    monkeypatch.setattr(module, "places", stand)
    return ThreadWorld(n).run(lambda comm: check_ranks(comm, folder))


@pytest.mark.parametrize(("n", "n_nodes"), [(1, 1), (2, 1), (2, 2), (5, 2)])
def test_all_ranks_come_to_the_same_findings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n: int, n_nodes: int
) -> None:
    every = run(n, tmp_path, monkeypatch, n_nodes)
    assert all(checks == every[0] for checks in every)
    found = {check.name: check for check in every[0]}
    assert found["all-reduce"].reason == f"right over {n_nodes} nodes"
    assert found["shared folder"].status is Status.OK
    assert (found["link between nodes"].status is Status.NOT_APPLICABLE) == (n_nodes == 1)
    assert (found["link in a node"].status is Status.NOT_APPLICABLE) == (n == n_nodes)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_one_node_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {c.name: c for c in run(2, tmp_path / "gone", monkeypatch, 1)[0]}["shared folder"]
    assert found.status is Status.FAIL
    (tmp_path / "here").mkdir()
    monkeypatch.setattr(Path, "exists", lambda self: "doctor" not in self.name)
    found = {c.name: c for c in run(2, tmp_path / "here", monkeypatch, 1)[0]}["shared folder"]
    assert "is not that of ranks 0, 1" in found.reason


def test_versions_that_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = iter(range(100))
    monkeypatch.setattr(module, "version", lambda name: str(next(numbers)))
    found = {c.name: c for c in run(3, tmp_path, monkeypatch, 1)[0]}["same versions"]
    assert found.status is Status.FAIL
    assert "2 ranks differ from rank 0" in found.reason


def test_a_clock_that_is_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    real = time.time
    off = {"mpipar rank 1"}

    def skewed() -> float:
        return real() + 5 * (threading.current_thread().name in off)

    names = ThreadWorld(2).run(lambda _: threading.current_thread().name)
    off.add(names[1])
    monkeypatch.setattr(module.time, "time", skewed)
    found = {c.name: c for c in run(2, tmp_path, monkeypatch, 1)[0]}["clocks"]
    assert found.status is Status.WARN
    assert found.facts["largest_offset_s"] == pytest.approx(5, abs=0.5)


@pytest.mark.parametrize(
    ("latency_s", "bytes_per_s", "status"),
    [(5e-6, 4e9, Status.OK), (90e-6, 4e9, Status.WARN), (5e-6, 1e8, Status.WARN)],
)
def test_links_are_judged(latency_s: float, bytes_per_s: float, status: Status) -> None:
    assert judge_link("link", latency_s, bytes_per_s, IN_NODE).status is status


def test_what_a_link_should_reach(tmp_path: Path) -> None:
    assert expectation(True, 2e11) == IN_NODE
    assert card_rate(tmp_path) == 0
    assert expectation(False, 0.0) == ETHERNET
    for i, (state, rate) in enumerate([("4: ACTIVE", "100 Gb/sec (4X EDR)"),
                                       ("1: DOWN", "400 Gb/sec (4X NDR)")]):  # fmt: skip
        port = tmp_path / f"class/infiniband/mlx5_{i}/ports/1"
        port.mkdir(parents=True)
        (port / "state").write_text(state)
        (port / "rate").write_text(rate)
    assert card_rate(tmp_path) == 1e11
    assert expectation(False, 1e11) == LinkExpectation(20e-6, 6.25e9)  # half of 12.5 GB/s


def doctor(*words: str, program: str = "") -> subprocess.CompletedProcess[str]:
    """`mpipar doctor --ranks` on two real ranks."""
    ranks = [sys.executable, "-m", "mpipar", "run", "-n", "2", "--deadline", "60"]
    action = ["--", "python", "-c", program] if program else ["doctor", "--ranks", *words]
    return subprocess.run([*ranks, *action], capture_output=True, text=True, check=False)


def test_two_real_ranks(tmp_path: Path) -> None:
    done = doctor("--json", "--folder", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    found = {check["name"]: check for check in json.loads(done.stdout)}
    assert found["world size"]["facts"] == {"size": 2, "announced": 2}
    assert found["link in a node"]["facts"]["gb_per_s"] > 0
    assert found["run folder"]["status"] == found["shared folder"]["status"] == "ok"


@pytest.mark.kill
def test_a_rank_that_never_comes_ends_at_the_deadline() -> None:
    program = (
        "import sys, time, os; from mpipar.cli.main import main\n"
        "if os.environ.get('OMPI_COMM_WORLD_RANK', os.environ.get('PMI_RANK')) == '1':\n"
        "    import mpipar; mpipar.init(); time.sleep(50)\n"
        "sys.exit(main(['doctor', '--ranks', '--deadline', '4']))"
    )
    start = time.monotonic()
    done = doctor(program=program)
    assert done.returncode in (1, 4), done.stdout + done.stderr
    assert "not done within 4 s" in done.stderr or "has waited" in done.stderr
    assert time.monotonic() - start < 25
