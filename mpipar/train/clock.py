"""Timing of a training run: throughput, share of communication, time left, peak memory."""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from mpipar.train.trainer import StepResult, Trainer


class Clock:
    """Throughput, share of communication and time left; evaluation and saving do not count.

    Parameters
    ----------
    trainer : Trainer
        Whose steps are timed.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._start = self._mark = time.perf_counter()
        self._first = self._mark_step = trainer.step
        self._communicated = trainer.engine.communication_s
        self._start_communicated = trainer.engine.communication_s
        self._paused = 0.0
        self._mark_paused = 0.0

    def pause(self, function: Callable[[], Any]) -> Any:
        """Call a function outside the timing.

        Parameters
        ----------
        function : callable
            Such as an evaluation.

        Returns
        -------
        object
            What it returns.
        """
        begin = time.perf_counter()
        before = self._trainer.engine.communication_s
        value = function()
        self._paused += time.perf_counter() - begin
        self._trainer.dp.communication_s -= self._trainer.engine.communication_s - before
        return value

    def _rate(self, seconds: float, steps: int) -> float:
        recipe = self._trainer.recipe
        return steps * recipe.train.batch * recipe.model.sequence / max(seconds, 1e-9)

    def figures(self) -> dict[str, Any]:
        """Throughput and share of communication since the start, peak memory of this rank.

        Returns
        -------
        dict
            For the metrics.
        """
        seconds = time.perf_counter() - self._start - self._paused
        rate = self._rate(seconds, self._trainer.step - self._first)
        spent = self._trainer.engine.communication_s - self._start_communicated
        return {
            "tokens_per_s": round(rate, 1),
            "communication_share": round(spent / max(seconds, 1e-9), 4),
            "peak_bytes": peak_bytes(),
        }

    def line(self, result: StepResult) -> str:
        """The line of a step, with figures since the last line.

        Parameters
        ----------
        result : StepResult
            Of that step.

        Returns
        -------
        str
            Without a newline.
        """
        trainer, now = self._trainer, time.perf_counter()
        seconds = now - self._mark - (self._paused - self._mark_paused)
        rate = self._rate(seconds, trainer.step - self._mark_step)
        share = (trainer.engine.communication_s - self._communicated) / max(seconds, 1e-9)
        done = trainer.step - self._first
        left = (
            (now - self._start - self._paused) / done * (trainer.recipe.train.steps - trainer.step)
        )
        self._mark, self._mark_step, self._mark_paused = now, trainer.step, self._paused
        self._communicated = trainer.engine.communication_s
        steps = trainer.recipe.train.steps
        return (
            f"step {result.step:{len(str(steps))}d}/{steps} | loss {result.loss:.4f} | "
            f"{rate / 1e3:.2f}k tok/s | {rate / 1e3 / trainer.comm.size:.2f}k tok/s/rank | "
            f"comm {share:.0%} | peak {peak_bytes() / 2**30:.2f} GiB | left {_minutes(left)}"
        )

    def summary(self, result: StepResult | None) -> dict[str, Any]:
        """Figures for the table at the end. Collective.

        Parameters
        ----------
        result : StepResult or None
            Of the last step.

        Returns
        -------
        dict
            By name.
        """
        trainer = self._trainer
        peak = trainer.comm.all_gather(np.array([peak_bytes()], np.int64))
        timed = time.perf_counter() - self._start - self._paused
        return {
            "steps": trainer.step,
            "ranks": trainer.comm.size,
            "parameters": trainer.n_parameters,
            "training loss": result.loss if result else math.nan,
            "bigram entropy": trainer.corpus.bigram_entropy,
            "largest peak GiB": float(peak.max()) / 2**30,
            "seconds": time.perf_counter() - self._start,
            "step s": timed / max(trainer.step - self._first, 1),
            "predicted step s": trainer.recipe.plan.step_s,
            **self.figures(),
        }


def _minutes(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"


def peak_bytes() -> int:
    """Largest resident memory of this process so far.

    Returns
    -------
    int
        In bytes.
    """
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
