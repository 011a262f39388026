"""The training job: a GPT or a Llama over the ranks of a mesh, with its checkpoints."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from mpipar import checkpoint
from mpipar.comm import Communicator
from mpipar.comm.device.arrays import to_host, write
from mpipar.comm.traced import TracedCommunicator, Tracer
from mpipar.errors import CheckpointError, RecipeError
from mpipar.mesh.mesh import Mesh
from mpipar.models import build_model
from mpipar.pipeline_parallel import compare_timelines, save_measured
from mpipar.train.clock import Clock
from mpipar.train.engine import build_engine
from mpipar.train.initial import take_weights
from mpipar.train.optimizer import AdamW
from mpipar.train.recipe import Recipe, dump_recipe
from mpipar.train.run_folder import RECIPE, TIMELINE, Metrics, write_environment
from mpipar.train.stop import StopRequest, clear_stopped, mark_stopped
from mpipar.train.text import Corpus, Sampler, share_text
from mpipar.train.tracing import span, write_trace
from mpipar.units.remainder import exact_size, spread_range

_log = logging.getLogger("mpipar")


@dataclasses.dataclass
class StepResult:
    """What one step gave, equal on every rank.

    Attributes
    ----------
    step : int
        From 1.
    loss : float
        Mean over the tokens of the global batch, in nats.
    gradient_norm, learning_rate : float
        Before clipping; as used.
    """

    step: int
    loss: float
    gradient_norm: float
    learning_rate: float


class Trainer:
    """Trains the model of a recipe. Collective to make and to call.

    Parameters
    ----------
    comm : Communicator
        All ranks.
    recipe : Recipe
        What to do.
    folder : Path, optional
        Run folder; without one nothing is written.
    """

    def __init__(self, comm: Communicator, recipe: Recipe, folder: Path | None = None) -> None:
        self.comm = comm
        self.tracer = Tracer(comm.rank) if recipe.run.trace else None
        traced = comm if self.tracer is None else TracedCommunicator(comm, self.tracer)
        self.mesh = _mesh(traced, recipe)
        if self.tracer is not None:
            self.tracer.coordinate = {a: self.mesh.coordinate[a] for a in self.mesh.layout.axes}
        self.folder = folder
        path = str(Path(recipe.data.path).absolute()) if recipe.data.path else ""
        text = share_text(comm, path)
        self.corpus = Corpus.cut(text, recipe.data.held_out)
        if recipe.data.digest not in ("", self.corpus.digest):
            raise RecipeError(
                f"the text has hash {self.corpus.digest}, the recipe asks for "
                f"{recipe.data.digest}; it has changed: set data.digest='' to train on it all the "
                "same"
            )
        if (largest := int(text.max())) >= recipe.model.vocabulary:
            raise RecipeError(
                f"the text has a token {largest}, beyond model.vocabulary="
                f"{recipe.model.vocabulary}; model.vocabulary={largest + 1} would do"
            )
        self.recipe = dataclasses.replace(
            recipe,
            data=dataclasses.replace(recipe.data, path=path, digest=self.corpus.digest),
            run=dataclasses.replace(
                recipe.run, folder=""
            ),  # it stands there; a repeat gets its own
        )
        train = recipe.train
        dp = self.mesh.degree("dp")
        self.n_local = exact_size(train.batch, dp, "train.batch", "dp")
        if not 1 <= train.microbatches <= self.n_local:
            raise RecipeError(
                f"train.microbatches={train.microbatches} must lie in 1..{self.n_local}, the "
                f"sequences of a rank (train.batch={train.batch} over dp={dp})"
            )
        self.sampler = Sampler(self.corpus.train, recipe.model.sequence, train.seed)
        self.held_out = Sampler(self.corpus.held_out, recipe.model.sequence, 0)
        self.engine = build_engine(self.mesh, recipe, _dtype(train.dtype))
        self.engine.tracer = self.tracer
        self.dp = self.engine.dp
        shapes = build_model(recipe.model).shapes().values()
        self.n_parameters = sum(math.prod(shape) for shape in shapes)
        self.optimizer = AdamW(self.dp.parameters, self.dp.trainable, train)
        self.step = 0
        self.n_rows_seen = 0
        self._saver: checkpoint.Saver | None = None

    # -- one step ---------------------------------------------------------------------------

    def train_step(self) -> StepResult:
        """One optimizer step. Collective.

        Returns
        -------
        StepResult
            Equal on every rank.
        """
        train = self.recipe.train
        self.step += 1
        start = (self.step - 1) * train.batch + self.mesh.coordinate["dp"] * self.n_local
        cuts = [
            spread_range(self.n_local, train.microbatches, i) for i in range(train.microbatches)
        ]
        if self.tracer is not None:
            self.tracer.step = self.step
        with span(self.tracer, "data"):
            rows = [self.sampler.rows(start + low, start + high) for low, high in cuts]
        noise = [self._noise(start + low) for low, _ in cuts]
        self.n_rows_seen += self.n_local
        scale = 1.0 / (train.batch * self.recipe.model.sequence)
        loss = self._sum(self.engine.run(rows, noise, scale))
        norm = self.engine.gradient_norm()
        clipped = min(1.0, train.clip_norm / norm) if train.clip_norm > 0 and norm > 0 else 1.0
        with span(self.tracer, "optimizer"):
            rate = self.optimizer.step(self.dp.gradients, self.step, clipped)
        return StepResult(self.step, loss, norm, rate)

    def _noise(self, row: int) -> np.random.Generator | None:
        """Random stream of dropout, fixed by the first row of a microbatch."""
        if not self.recipe.model.dropout:
            return None
        return np.random.Generator(np.random.Philox([self.recipe.train.seed, row]))

    def _sum(self, value: float) -> float:
        start = time.perf_counter()
        total = float(self.mesh.comm("pp", "dp").all_reduce(np.array(value, np.float64)))
        self.dp.communication_s += time.perf_counter() - start
        return total

    def held_out_loss(self) -> float:
        """Mean loss over the first held-out sequences. Collective.

        Returns
        -------
        float
            In nats per byte, equal on every rank.
        """
        n = self.recipe.model.sequence
        n_rows = min(self.recipe.run.held_out_sequences, self.held_out.n_rows)
        low, high = spread_range(n_rows, self.mesh.degree("dp"), self.mesh.coordinate["dp"])
        total = 0.0
        for start in range(low, high, 8):
            rows = self.held_out.rows(start, min(start + 8, high))
            total += self.engine.evaluate(rows)
        return self._sum(total) / (n_rows * n)

    # -- the whole run ----------------------------------------------------------------------

    def run(
        self, report: Callable[[str], None] = lambda _: None, stop: StopRequest | None = None
    ) -> dict[str, Any]:
        """Train to the last step. Collective.

        Parameters
        ----------
        report : callable
            Gets whole lines, on rank 0 only.
        stop : StopRequest, optional
            Ends the run early, with a checkpoint, once it is agreed.

        Returns
        -------
        dict
            Figures for the table at the end.
        """
        say = report if self.comm.rank == 0 else lambda _: None
        if self.step == 0 and self.recipe.train.init:
            take_weights(self.comm, self.recipe, self.dp.parameters, self.engine.model)
        recipe, run = self.recipe, self.recipe.run
        metrics = None
        if self.folder is not None:
            metrics = Metrics(self.folder, self.comm.rank == 0, self.step)
            if self.comm.rank == 0:
                clear_stopped(self.folder)
                write_environment(self.folder, self.comm.size)
                (self.folder / RECIPE).write_text(dump_recipe(recipe), encoding="utf-8")
        clock = Clock(self)
        result: StepResult | None = None
        held: dict[str, float] = {}
        while self.step < recipe.train.steps:
            result = self.train_step()
            if self._saver is not None:
                self._saver.poll()
            last = self.step == recipe.train.steps
            if last or (run.log_every and self.step % run.log_every == 0) or self.step == 1:
                say(clock.line(result))
            held = {}
            if last or (run.evaluate_every and self.step % run.evaluate_every == 0):
                held = {"held_out_loss": clock.pause(self.held_out_loss)}
                say(f"step {self.step}/{recipe.train.steps} | held-out loss "
                    f"{held['held_out_loss']:.4f}")  # fmt: skip
            if metrics is not None:
                metrics.write({**dataclasses.asdict(result), **held, **clock.figures()})
            stops = not last and stop is not None and stop.is_agreed(self.comm)
            if last or stops or (run.checkpoint_every and self.step % run.checkpoint_every == 0):
                clock.pause(self.save)
            if stops:
                clock.pause(self.finish_saves)
                if self.folder is not None and self.comm.rank == 0:
                    mark_stopped(self.folder, self.step)
                say(f"stopped by a signal after step {self.step}/{recipe.train.steps}")
                break
        clock.pause(self.finish_saves)
        if self.tracer is not None and self.folder is not None:
            say(f"trace: {write_trace(self.comm, self.tracer, self.folder)}")
        self._show_timeline(say)
        return {**clock.summary(result), **held}

    def _show_timeline(self, say: Callable[[str], None]) -> None:
        """The last step of a pipeline beside its simulation, told and written if asked for."""
        timeline = self.engine.timeline() if self.recipe.run.timeline else None
        if timeline is not None:
            say(compare_timelines(timeline))
        if timeline is not None and self.folder is not None and self.comm.rank == 0:
            save_measured(timeline, self.folder / TIMELINE)

    # -- checkpoints ------------------------------------------------------------------------

    def save(self) -> None:
        """Write a checkpoint into the run folder, if there is one. Collective.

        With ``run.background_saves`` it is begun: `finish_saves` waits until it is whole.
        """
        if self.folder is None:
            return
        arrays = {**self.dp.parameters, **self.optimizer.state()}
        arrays = {name: to_host(array) for name, array in arrays.items()}
        position = {"step": self.step, "rows_seen": self.step * self.recipe.train.batch}
        where = self.folder / "checkpoints"
        extents, writes = self._extents(arrays), self.mesh.coordinate["dp"] == 0
        if self.mesh.coordinate["tp"]:  # the first of them writes what all of them hold
            arrays = {name: array for name, array in arrays.items() if name in extents}
        keep = self.recipe.run.keep
        job = (where, self.step, arrays, position, keep, writes, extents)
        if not self.recipe.run.background_saves:
            checkpoint.save(self.comm, *job)
            return
        if self._saver is None:
            self._saver = checkpoint.Saver(self.comm)
        self._saver.begin(*job)

    def finish_saves(self) -> None:
        """Wait for a checkpoint that is being written in the background. Collective.

        Raises
        ------
        CheckpointError
            On every rank, if it could not be written.
        """
        if self._saver is not None:
            self._saver.finish()

    def _extents(self, names: Iterable[str]) -> dict[str, checkpoint.Extent]:
        """What this rank holds of arrays that are split; moments are split as their parameters."""
        model = self.engine.model
        found = {}
        for name in names:
            shard = model.shards[name.removeprefix("adam.m.").removeprefix("adam.v.")]
            if (extent := checkpoint.Extent.of(shard, model.tp.rank)) is not None:
                found[name] = extent
        return found

    def resume(self) -> int:
        """Go on from the newest sound checkpoint; damaged newer ones are named. Collective.

        Returns
        -------
        int
            The step from which the run goes on.

        Raises
        ------
        CheckpointError
            If there is none, or it does not fit the model.
        """
        if self.folder is None:
            raise CheckpointError("a trainer without a run folder has no checkpoints")
        targets = {**self.dp.parameters, **self.optimizer.state()}
        extents = self._extents(targets)
        place, arrays, state, passed_over = checkpoint.load_newest(
            self.comm, self.folder / "checkpoints", targets, extents
        )
        for text in passed_over if self.comm.rank == 0 else ():
            _log.warning("note: passed over: %s", text)
        for name, extent in extents.items():
            targets[name] = targets[name][extent.at()]  # without padding, which stays zero
        problem = None
        for name, target in targets.items():
            found = arrays[name]
            if (found.shape, found.dtype) != (target.shape, target.dtype):
                problem = problem or CheckpointError(
                    f"{place}: {name} is {found.dtype} of shape {found.shape}, the model needs "
                    f"{target.dtype} of shape {target.shape}"
                )
        if state["rows_seen"] != state["step"] * self.recipe.train.batch:
            problem = CheckpointError(
                f"{place} was written after {state['rows_seen']} sequences in {state['step']} "
                f"steps; train.batch={self.recipe.train.batch} would leave its place in the data"
            )
        self.comm.all_gather_json(problem)  # raised on all ranks
        for name, target in targets.items():
            write(arrays[name], target)
        self.step = int(state["step"])
        return self.step


def _mesh(comm: Communicator, recipe: Recipe) -> Mesh:
    m = recipe.mesh
    if m.cp > 1:
        raise RecipeError(
            f"mesh.cp={m.cp}: train has no context parallelism so far; mesh.cp=1 would do"
        )
    return Mesh(comm, dp=m.dp or None, pp=m.pp or None, tp=m.tp or None, cp=m.cp or None,
                order=m.order)  # fmt: skip


def _dtype(name: str) -> np.dtype[Any]:
    if name not in ("float32", "float64"):
        raise RecipeError(f"train.dtype={name!r}: float32 or float64")
    return np.dtype(name)
