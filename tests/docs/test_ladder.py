"""Every rung runs on any number of ranks, and its question has the answer that it says."""

import importlib.util
import re
import subprocess
import sys
from itertools import product
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from mpipar import ThreadWorld
from mpipar.comm import Communicator
from tests.spy import Spy

LADDER = Path(__file__).parents[2] / "docs" / "ladder"
RUNGS = sorted(p.stem for p in LADDER.glob("[0-9]*.py"))


def rung(name: str) -> ModuleType:
    """A rung as a module; its helper is found beside it."""
    found = next(stem for stem in RUNGS if stem.startswith(name))
    sys.path.insert(0, str(LADDER))
    try:
        spec = importlib.util.spec_from_file_location(f"rung_{name}", LADDER / f"{found}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(LADDER))
    return module


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("name", RUNGS)
def test_a_rung_runs_on_any_ranks_and_shows_before_and_after(comm: Communicator, name):
    module, lines = rung(name), []
    if comm.rank == 0:  # the only one that prints
        sys.modules["ladder"].print = lines.append
    comm.barrier()
    module.rung(comm)
    if comm.rank == 0:
        assert sum("BEFORE" in line for line in lines) == 1
        assert any("AFTER" in line for line in lines)


@pytest.mark.parametrize("name", RUNGS)
def test_a_rung_is_short_and_answers_the_three_questions(name):
    text = (LADDER / f"{name}.py").read_text()
    assert len(text.splitlines()) < 80
    for words in ("Which global object is split?", "Which rank owns each local object?",
                  "Which traces may be published?"):  # fmt: skip
        assert text.count(words) == 1
    assert re.search(r"^QUESTION = ", text, re.M)


@pytest.mark.parametrize("words", [[], ["1"], ["3"]], ids=["default", "one", "three"])
def test_a_rung_starts_by_itself(words):
    command = [sys.executable, str(LADDER / "03_collective_all_reduce.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("rank 0:") == 2
    assert done.stdout.splitlines()[-1].startswith("QUESTION: ")


# -- the answers, by other ways than the rungs' ----------------------------------------------


def test_the_founding_outputs():
    assert rung("01").ANSWER == len(np.array_split(np.arange(128), 4)[0]) == 32
    assert rung("02").ANSWER == np.hsplit(np.empty((1, 1024)), 4)[0].shape[1] == 256
    assert ThreadWorld(2).run(rung("03").rung) == [10.0, 10.0]
    assert rung("03").ANSWER == 2 * 64 == 128


def test_the_slots_of_a_pipeline():
    done = {}
    for m, s in product(range(4), range(3)):  # each after its neighbours in stage and time
        done[s, m] = 1 + max(done.get((s - 1, m), 0), done.get((s, m - 1), 0))
    assert rung("04").ANSWER == done[2, 3] == 6
    assert ThreadWorld(3).run(rung("04").rung) == [6] * 3


def test_what_is_published():
    assert ThreadWorld(2).run(rung("05").rung) == [rung("05").ANSWER] * 2 == [1, 1]


def test_the_bytes_of_a_ring():
    def body(comm):
        spy = Spy(comm)
        part = rung("06").rung(spy)
        return part, spy.sent["send"]

    for part, sent in ThreadWorld(4).run(body):
        assert 4 * part == rung("06").ANSWER
        assert sent == 6 * (2 * 4 * 8) / 4  # six pieces of a quarter of eight float64


def test_the_all_reduces_of_a_tensor_parallel_mlp():
    def body(comm):
        spy = Spy(comm)
        rung("07").rung(spy)
        return spy.calls["all_reduce"]

    assert ThreadWorld(2).run(body) == [rung("07").ANSWER] * 2


def test_the_microbatches_in_flight():
    assert ThreadWorld(4).run(rung("08").rung) == [4, 3, 2, 1]
    assert rung("08").ANSWER == 4


def test_the_memory_of_training():
    assert rung("09").ANSWER == 7.5 * (2 + 2 + 4 + 4 + 4)
    assert ThreadWorld(1).run(rung("09").rung) == [rung("09").ANSWER]


def test_the_place_in_a_mesh():
    assert np.arange(8).reshape(2, 2, 2)[1, 0, 1] == rung("10").ANSWER
    found = dict(ThreadWorld(8).run(rung("10").rung))
    assert found[5] == {"pp": 1, "dp": 0, "tp": 1}


def test_the_prefix_on_another_rank():
    full_blocks = [b for b in np.array_split(np.arange(30), range(4, 30, 4)) if len(b) == 4]
    assert len(full_blocks) == rung("11").ANSWER
    assert ThreadWorld(3).run(rung("11").rung) == [rung("11").ANSWER] * 3


def test_the_operations_of_a_layer():
    x, w = (1024, 256), (256, 256)
    forward = 2 * x[0] * x[1] * w[1]
    assert pytest.approx(3 * forward / 1e9, abs=1e-12) == rung("12").ANSWER
    assert ThreadWorld(2).run(rung("12").rung) == [rung("12").ANSWER] * 2
