"""A signal on one rank stops all ranks after the same step; the run goes on where it stopped."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpipar.comm import Communicator, ThreadWorld
from mpipar.train.recipe import Recipe, merge_recipe
from mpipar.train.run_folder import read_metrics
from mpipar.train.stop import STOPPED, StopRequest, clear_stopped, mark_stopped
from mpipar.train.trainer import Trainer

STEPS = 9


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


def recipe(folder: Path) -> Recipe:
    text = folder / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    return merge_recipe(
        Recipe(),
        {
            "model": {"n_layers": 1, "width": 16, "n_heads": 2, "sequence": 16},
            "train": {"steps": STEPS, "batch": 4, "warmup_steps": 2, "dtype": "float64"},
            "data": {"path": str(text)},
            "run": {"held_out_sequences": 4, "checkpoint_every": 0},
        },
    )


def test_the_signal_is_noted_and_any_rank_s_counts() -> None:
    requests = [StopRequest() for _ in range(3)]

    def agree(comm: Communicator) -> bool:
        return requests[comm.rank].is_agreed(comm)

    assert ThreadWorld(3).run(agree) == [False] * 3
    os.kill(os.getpid(), signal.SIGUSR1)  # the last handler has it
    assert [request.is_asked for request in requests] == [False, False, True]
    assert ThreadWorld(3).run(agree) == [True] * 3


class AskedAt(StopRequest):
    """Asked on one rank once its trainer has done some steps."""

    def __init__(self, trainer: Trainer, rank: int, step: int) -> None:
        super().__init__()
        self.trainer, self.rank, self.step = trainer, rank, step

    def is_agreed(self, comm: Communicator) -> bool:
        self.is_asked = comm.rank == self.rank and self.trainer.step >= self.step
        return super().is_agreed(comm)


@pytest.mark.parametrize("mesh", [{"dp": 2}, {"pp": 1, "dp": 1}])
def test_a_stopped_run_ends_with_the_loss_of_an_unbroken_one(
    tmp_path: Path, mesh: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    n = max(mesh.values())
    asked = merge_recipe(recipe(tmp_path), {"mesh": mesh})
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # ranks are threads here
    stopped, whole = tmp_path / "stopped", tmp_path / "whole"
    for folder in (stopped, whole):
        folder.mkdir()

    def until_asked(comm: Communicator) -> int:
        trainer = Trainer(comm, asked, stopped)
        trainer.run(stop=AskedAt(trainer, n - 1, 4))
        return trainer.step

    def to_the_end(comm: Communicator, folder: Path, resume: bool) -> int:
        trainer = Trainer(comm, asked, folder)
        first = trainer.resume() if resume else 0
        trainer.run(stop=AskedAt(trainer, 0, STEPS))  # at the last step there is nothing to stop
        return first

    assert ThreadWorld(n).run(until_asked) == [4] * n
    assert (stopped / STOPPED).read_text() == "after step 4\n"
    assert ThreadWorld(n).run(lambda comm: to_the_end(comm, stopped, True)) == [4] * n
    assert not (stopped / STOPPED).exists()
    ThreadWorld(n).run(lambda comm: to_the_end(comm, whole, False))
    losses = [[r["loss"] for r in read_metrics(folder)] for folder in (stopped, whole)]
    assert len(losses[0]) == STEPS
    assert losses[0] == losses[1]


def test_the_note_comes_and_goes(tmp_path: Path) -> None:
    clear_stopped(tmp_path)
    mark_stopped(tmp_path, 3)
    assert (tmp_path / STOPPED).exists()
    clear_stopped(tmp_path)
    assert not (tmp_path / STOPPED).exists()
