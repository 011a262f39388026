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

from mpipar.data_parallel.data_parallel import DataParallel
from mpipar.errors import RecipeError
from mpipar.mesh.mesh import Mesh
from mpipar.models import GPT
from mpipar.models.stage import GPTStage
from mpipar.pipeline_parallel import StageAssignment, Timeline, build_schedule, read_schedule
from mpipar.pipeline_parallel.executor import PipelineExecutor
from mpipar.pipeline_parallel.generate import SCHEDULE_NAMES, chunks_per_rank
from mpipar.train.recipe import Recipe

Array = NDArray[Any]
Rows = NDArray[np.int64]
Noise = Sequence["np.random.Generator | None"]
_TIED_TAG = 2**15 - 1


class Engine(Protocol):
    """What the trainer asks for; every method is collective over the mesh."""

    dp: DataParallel

    @property
    def communication_s(self) -> float:
        """Seconds spent in communication so far."""

    def run(self, rows: Sequence[Rows], noise: Noise, scale: float) -> float:
        """Forward and backward of this rank's microbatches; sums gradients; this rank's loss."""

    def gradient_norm(self) -> float:
        """Norm over all parameters of the model, each once."""

    def evaluate(self, rows: Rows) -> float:
        """Summed loss of some rows; 0 on ranks that do not compute it."""


def build_engine(mesh: Mesh, recipe: Recipe, dtype: np.dtype[Any]) -> Engine:
    """The engine of a mesh. Collective.

    Parameters
    ----------
    mesh : Mesh
        Degrees dp and pp.
    recipe : Recipe
        Model, schedule and numbers.
    dtype : dtype
        Of the parameters.

    Returns
    -------
    Engine
        Parameters drawn from the seed, equal for every mesh.
    """
    model = GPT(recipe.model)
    if mesh.degree("pp") > 1:
        return PipelineEngine(mesh, model, recipe, dtype)
    return ReplicaEngine(mesh, model, recipe, dtype)


class _Base:
    """What both engines share: data parallelism over this rank's parameters."""

    def __init__(self, mesh: Mesh, parameters: dict[str, Array], recipe: Recipe) -> None:
        group = mesh.comm("dp")
        group.deterministic = recipe.train.deterministic
        self.mesh = mesh
        self.dp = DataParallel(group, parameters)
        self._other_s = 0.0

    @property
    def communication_s(self) -> float:
        """Seconds spent in communication so far."""
        return self.dp.communication_s + self._other_s


class ReplicaEngine(_Base):
    """Every rank holds the whole model.

    Parameters
    ----------
    mesh : Mesh
        With pp = 1.
    model : GPT
        The model.
    recipe : Recipe
        Seed and switches.
    dtype : dtype
        Of the parameters.
    """

    def __init__(self, mesh: Mesh, model: GPT, recipe: Recipe, dtype: np.dtype[Any]) -> None:
        super().__init__(mesh, model.init(recipe.train.seed, dtype), recipe)
        self.model = model

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
            tokens, targets = part[:, :-1], part[:, 1:]
            value, context = self.model.forward(dp.parameters, tokens, targets, scale, noise[i])
            loss += value
            on_ready = dp.ready if i == len(rows) - 1 else None
            self.model.backward(dp.parameters, context, dp.gradients, i > 0, on_ready)
        dp.finish()
        return loss

    def gradient_norm(self) -> float:
        """Norm over all parameters.

        Returns
        -------
        float
            Equal on every rank.
        """
        return self.dp.gradient_norm()

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
        return self.model.loss(self.dp.parameters, rows[:, :-1], rows[:, 1:])


class PipelineEngine(_Base):
    """Every rank holds the layers of its stages and runs a schedule.

    Parameters
    ----------
    mesh : Mesh
        With pp above 1.
    model : GPT
        The model.
    recipe : Recipe
        ``train.schedule`` and ``train.microbatches`` decide the schedule.
    dtype : dtype
        Of the parameters.
    """

    def __init__(self, mesh: Mesh, model: GPT, recipe: Recipe, dtype: np.dtype[Any]) -> None:
        self.pp = mesh.comm("pp")
        name, n_ranks = recipe.train.schedule, mesh.degree("pp")
        if name.lower().replace("_", "-") in SCHEDULE_NAMES:
            schedule = build_schedule(name, n_ranks, recipe.train.microbatches)
        else:
            schedule = read_schedule(name)
        if schedule.n_microbatches != recipe.train.microbatches:
            raise RecipeError(
                f"schedule {name} is for {schedule.n_microbatches} microbatches, "
                f"train.microbatches={recipe.train.microbatches}"
            )
        n_stages = schedule.n_stages
        n_layers = model.config.n_layers
        if n_layers < n_stages:
            raise RecipeError(
                f"model.n_layers={n_layers} cannot fill {n_stages} stages (mesh.pp={n_ranks} with "
                f"{chunks_per_rank(name)} a rank); n_layers={n_stages} would do"
            )
        cut = StageAssignment.uniform(n_layers, n_stages)
        bounds = np.searchsorted(cut.assignments, np.arange(n_stages + 1)).tolist()
        self.stages = {
            s: GPTStage(model, range(bounds[s], bounds[s + 1]), s == 0, s == n_stages - 1)
            for s in schedule.stages_of(self.pp.rank)
        }
        names = [n for stage in self.stages.values() for n in stage.names()]
        super().__init__(mesh, model.init(recipe.train.seed, dtype, names), recipe)
        self.executor = PipelineExecutor(self.pp, schedule, self.stages, self._ready)
        self.timeline: Timeline | None = None
        self._owners = schedule.stage_to_rank.tolist()
        ends = {self._owners[0], self._owners[-1]}
        self._shares_tied = model.config.tied and len(ends) > 1 and self.pp.rank in ends

    def _ready(self, stage: int) -> None:
        """The gradients of a stage are done: their data-parallel sum may start."""
        others = [s for k, s in self.stages.items() if k != stage]
        shared = {"tok.weight"} if self.stages[stage].model.config.tied else set()
        for name in reversed(self.stages[stage].names()):
            if name not in shared and not any(name in s.names() for s in others):
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
        for stage in self.stages.values():
            stage.begin(self.dp.parameters, self.dp.gradients, rows, scale, noise)
        before = self.executor.communication_s
        self.timeline = self.executor.step()
        self._other_s += self.executor.communication_s - before
        if self._shares_tied:
            self._sum_tied()
        self.dp.finish()
        return sum(stage.loss for stage in self.stages.values())

    def _sum_tied(self) -> None:
        """Add the gradients of the two copies of a tied embedding, in the same order on both."""
        start = time.perf_counter()
        mine = self.dp.gradients["tok.weight"]
        peer = next(r for r in (self._owners[0], self._owners[-1]) if r != self.pp.rank)
        other = np.empty_like(mine)
        request = self.pp.begin_send(mine, peer, _TIED_TAG)
        self.pp.recv(other, peer, _TIED_TAG)
        request.wait()
        pair = (mine, other) if self.pp.rank == self._owners[-1] else (other, mine)
        np.add(*pair, out=mine)
        self._other_s += time.perf_counter() - start

    def gradient_norm(self) -> float:
        """Norm over the parameters of all stages, a tied embedding once.

        Returns
        -------
        float
            Equal on every rank.
        """
        squares = self.dp.gradient_norm() ** 2
        if self._shares_tied and self.pp.rank == self._owners[0]:
            tied = self.dp.gradients["tok.weight"].astype(np.float64).reshape(-1)
            squares -= float(np.dot(tied, tied))
        return float(np.sqrt(self.pp.all_reduce(np.array(squares), deterministic=True)))

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
        x: Array | float | None = None
        for number, owner in enumerate(self._owners):
            stage = self.stages.get(number)
            if stage is None:
                continue
            before = self._owners[number - 1] if number else owner
            if before != owner:
                width = stage.model.config.width
                shape = (rows.shape[0], rows.shape[1] - 1, width)
                buffer = np.empty(shape, next(iter(self.dp.parameters.values())).dtype)
                x = self.pp.recv(buffer, before, 2 * number)
            stage.bind(self.dp.parameters)
            x = stage.evaluate(rows, x if isinstance(x, np.ndarray) else None)
            if not stage.is_last and self._owners[number + 1] != owner:
                self.pp.send(x, self._owners[number + 1], 2 * (number + 1))
        return x if isinstance(x, float) else 0.0
