"""How one step is computed: on a replica of the whole model, or on a pipeline of stages.

Both give the same numbers: gradients summed over data-parallel ranks, the loss of the global
batch, and its gradient norm.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mpipar.comm.device.arrays import to_device
from mpipar.comm.traced import Tracer
from mpipar.data_parallel.data_parallel import DataParallel
from mpipar.errors import RecipeError
from mpipar.mesh.mesh import Mesh
from mpipar.models import Model, build_model
from mpipar.models.parts import Streams
from mpipar.models.stage import ModelStage
from mpipar.pipeline_parallel import Schedule, Timeline, format_schedule, parse_schedule
from mpipar.pipeline_parallel.executor import PipelineExecutor
from mpipar.train.pipeline_plan import check_name, choose_schedule, stage_layers
from mpipar.train.recipe import Recipe
from mpipar.train.tracing import span, trace_timeline

Array = NDArray[Any]
Rows = NDArray[np.int64]
Noise = Sequence["np.random.Generator | None"]
_TIED_TAG = 2**15 - 1


class Engine(Protocol):
    """What the trainer asks for; every method is collective over the mesh."""

    dp: DataParallel
    model: Model
    tracer: Tracer | None

    @property
    def communication_s(self) -> float:
        """Seconds spent in communication so far."""

    def run(self, rows: Sequence[Rows], noise: Noise, scale: float) -> float:
        """Forward and backward of this rank's microbatches; sums gradients; this rank's loss."""

    def gradient_norm(self) -> float:
        """Norm over all parameters of the model, each once."""

    def evaluate(self, rows: Rows) -> float:
        """Summed loss of some rows; 0 on ranks that do not compute it."""

    def timeline(self) -> Timeline | None:
        """When the actions of the last step ran, on every rank of its pipeline; None without."""


def build_engine(mesh: Mesh, recipe: Recipe, dtype: np.dtype[Any]) -> Engine:
    """The engine of a mesh. Collective.

    Parameters
    ----------
    mesh : Mesh
        Degrees dp, pp and tp.
    recipe : Recipe
        Model, schedule and numbers.
    dtype : dtype
        Of the parameters.

    Returns
    -------
    Engine
        Parameters drawn from the seed, equal for every mesh.
    """
    tp = mesh.comm("tp")
    tp.deterministic = recipe.train.deterministic
    model = build_model(recipe.model, tp, recipe.train.sequence_parallel)
    if mesh.degree("pp") > 1 and recipe.train.device:
        raise RecipeError(
            f"train.device={recipe.train.device!r}: stages of a pipeline stay on the host so far; "
            f"mesh.pp=1 would do, not {mesh.degree('pp')}"
        )
    if mesh.degree("pp") > 1:
        return PipelineEngine(mesh, model, recipe, dtype)
    check_name(recipe)
    return ReplicaEngine(mesh, model, recipe, dtype)


class _Base:
    """What both engines share: data parallelism over this rank's parameters."""

    def __init__(
        self, mesh: Mesh, model: Model, parameters: dict[str, Array], recipe: Recipe
    ) -> None:
        group = mesh.comm("dp")
        group.deterministic = recipe.train.deterministic
        self.mesh, self.model = mesh, model
        self.dp = DataParallel(group, parameters, allow_empty=True)
        self._other_s = 0.0
        self.tracer: Tracer | None = None
        self._parts = mesh.comm("pp", "tp")
        # Gradients that are counted by another rank of `_parts`.
        self._counted_elsewhere = [
            n for n in parameters if model.tp.rank and model.shards[n].dim is None
        ]

    @property
    def communication_s(self) -> float:
        """Seconds spent in communication so far."""
        return self.dp.communication_s + self.model.tp.communication_s + self._other_s

    def gradient_norm(self) -> float:
        """Norm over all parameters of the model, each once, whoever holds it.

        Returns
        -------
        float
            Equal on every rank.
        """
        norm = self.dp.gradient_norm()
        if self._parts.size == 1:
            return norm
        squares = norm**2
        for name in self._counted_elsewhere:
            again = self.dp.gradients[name].astype(np.float64).reshape(-1)
            squares -= float(np.dot(again, again))
        return float(np.sqrt(self._parts.all_reduce(np.array(squares), deterministic=True)))


class ReplicaEngine(_Base):
    """Every rank holds the whole model.

    Parameters
    ----------
    mesh : Mesh
        With pp = 1.
    model : Model
        The model.
    recipe : Recipe
        Seed and switches.
    dtype : dtype
        Of the parameters.
    """

    def __init__(self, mesh: Mesh, model: Model, recipe: Recipe, dtype: np.dtype[Any]) -> None:
        self._device = recipe.train.device
        drawn = model.init(recipe.train.seed, dtype)
        parameters = {name: to_device(self._device, p) for name, p in drawn.items()}
        super().__init__(mesh, model, parameters, recipe)

    def run(self, rows: Sequence[Rows], noise: Noise, scale: float) -> float:
        """Forward and backward, one microbatch after the other; sums gradients over dp.

        Parameters
        ----------
        rows : sequence of ndarray
            Microbatches of this rank.
        noise : sequence of numpy.random.Generator or None
            Dropout of each.
        scale : float
            Factor on the summed loss.

        Returns
        -------
        float
            Scaled loss of this rank.
        """
        dp, loss = self.dp, 0.0
        for i, part in enumerate(rows):
            tokens, targets = self._pairs(part)
            with span(self.tracer, "forward"):
                value, context = self.model.forward(dp.parameters, tokens, targets, scale, noise[i])
            loss += value
            on_ready = dp.ready if i == len(rows) - 1 else None
            with span(self.tracer, "backward"):
                self.model.backward(dp.parameters, context, dp.gradients, i > 0, on_ready)
        dp.finish()
        self.model.finish(dp.gradients)
        return loss

    def evaluate(self, rows: Rows) -> float:
        """Summed loss of some rows.

        Parameters
        ----------
        rows : ndarray
            Tokens and one more.

        Returns
        -------
        float
            In nats.
        """
        return self.model.loss(self.dp.parameters, *self._pairs(rows))

    def _pairs(self, rows: Rows) -> tuple[Rows, Rows]:
        """Tokens and targets, where the parameters lie."""
        return to_device(self._device, rows[:, :-1]), to_device(self._device, rows[:, 1:])

    def timeline(self) -> None:
        """There is no pipeline."""
        return None


class PipelineEngine(_Base):
    """Every rank holds the layers of its stages and runs a schedule.

    Parameters
    ----------
    mesh : Mesh
        With pp above 1.
    model : Model
        The model.
    recipe : Recipe
        ``train.schedule`` and ``train.microbatches`` decide the schedule.
    dtype : dtype
        Of the parameters.
    """

    def __init__(self, mesh: Mesh, model: Model, recipe: Recipe, dtype: np.dtype[Any]) -> None:
        self.pp = mesh.comm("pp")
        schedule = _agreed_schedule(mesh, recipe)
        n = schedule.n_stages
        layers = stage_layers(recipe, n)
        self.stages = {
            s: ModelStage(
                model, layers[s], s == 0, s == n - 1, dtype, recipe.train.recompute and s < n - 1
            )
            for s in schedule.stages_of(self.pp.rank)
        }
        names = [name for stage in self.stages.values() for name in stage.names()]
        super().__init__(mesh, model, model.init(recipe.train.seed, dtype, names), recipe)
        self.executor = PipelineExecutor(
            self.pp, schedule, self.stages, self._ready, model.workspace
        )
        self._last: Timeline | None = None
        self._dtype = dtype
        self._owners = schedule.stage_to_rank.tolist()
        ends = {self._owners[0], self._owners[-1]}
        self._shares_tied = model.config.tied and len(ends) > 1 and self.pp.rank in ends
        if self._shares_tied and self.pp.rank == self._owners[0]:
            self._counted_elsewhere.append("tok.weight")

    def _ready(self, stage: int) -> None:
        """The gradients of a stage are done: their data-parallel sum may start."""
        shared = "tok.weight" if self.model.config.tied else ""  # two stages add to it
        for name in reversed(self.stages[stage].names()):
            if name != shared:
                self.dp.ready(name)

    def run(self, rows: Sequence[Rows], noise: Noise, scale: float) -> float:
        """Run the schedule over the microbatches; sums gradients over dp.

        Parameters
        ----------
        rows, noise, scale
            As in `ReplicaEngine.run`; the same rows on every stage.

        Returns
        -------
        float
            Scaled loss on the rank of the last stage, 0 elsewhere.
        """
        streams = [Streams(generator) for generator in noise]
        for stage in self.stages.values():
            stage.begin(self.dp.parameters, self.dp.gradients, rows, scale, streams)
        before = self.executor.communication_s
        self._last = self.executor.step()
        if self.tracer is not None:
            trace_timeline(self.tracer, self.executor, self._last)
        self._other_s += self.executor.communication_s - before
        if self._shares_tied:
            self._sum_tied()
        self.dp.finish()
        self.model.finish(self.dp.gradients)
        return sum(stage.loss for stage in self.stages.values())

    def _sum_tied(self) -> None:
        """Add the gradients of the two copies of a tied embedding: the same sum on both ranks."""
        start = time.perf_counter()
        mine = self.dp.gradients["tok.weight"]
        peer = next(r for r in (self._owners[0], self._owners[-1]) if r != self.pp.rank)
        other = self.model.workspace.take(mine, mine.shape)
        request = self.pp.begin_send(mine, peer, _TIED_TAG)
        self.pp.recv(other, peer, _TIED_TAG)
        request.wait()
        np.add(mine, other, out=mine)
        self.model.workspace.give(other)
        self._other_s += time.perf_counter() - start

    def evaluate(self, rows: Rows) -> float:
        """Summed loss of some rows, stage after stage.

        Parameters
        ----------
        rows : ndarray
            Tokens and one more; the same on every stage.

        Returns
        -------
        float
            0 but on the rank of the last stage.
        """
        workspace, loss = self.model.workspace, 0.0
        x: Array | None = None
        for number, owner in enumerate(self._owners):
            stage = self.stages.get(number)
            if stage is None:
                continue
            before = self._owners[number - 1] if number else owner
            if before != owner:
                shape = self.model.stream_shape(rows.shape[0], rows.shape[1] - 1)
                buffer = workspace.take(np.empty(0, self._dtype), shape)
                x = self.pp.recv(buffer, before, 2 * number)
            x, loss = stage.evaluate(self.dp.parameters, rows, x)
            if x is not None and self._owners[number + 1] != owner:
                self.pp.send(x, self._owners[number + 1], 2 * (number + 1))
                workspace.give(x)
                x = None
        return loss

    def timeline(self) -> Timeline | None:
        """When the actions of the last step ran. Collective over the pipeline.

        Returns
        -------
        Timeline or None
            Of all ranks of this rank's pipeline; None before the first step.
        """
        return self._last and self.executor.gather_timeline(self._last)


def _agreed_schedule(mesh: Mesh, recipe: Recipe) -> Schedule:
    """What rank 0 builds or reads, or its error, on every rank."""
    return parse_schedule(
        mesh.world.made_by_root(lambda: format_schedule(choose_schedule(recipe, mesh.degree("pp"))))
    )
