"""Recipes: defaults < TOML file < ``--set section.key=value``, and back to TOML exactly."""

from __future__ import annotations

import dataclasses
import difflib
import math
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mpipar.errors import CountOutOfRange, OutOfRange, ParallelismError, RecipeError
from mpipar.models.config import GPTConfig, LlamaConfig, ModelConfig


def _at_least(recipe: Any, least: int, *names: str) -> None:
    for name in names:
        value = getattr(recipe, name)
        if not least <= value < math.inf:
            kind = CountOutOfRange if isinstance(value, int) else OutOfRange
            raise kind(name, f"{least} or more", value)


@dataclass(frozen=True)
class DataRecipe:
    """What is read.

    Parameters
    ----------
    path : str
        File or folder; empty means the sources of Python's standard library.
    digest : str
        Hash of the text; written by a run, checked where it is not empty.
    held_out : float
        Share of the text that is kept for evaluation.
    """

    path: str = ""
    digest: str = ""
    held_out: float = 0.05

    def __post_init__(self) -> None:
        """Refuse a share that leaves nothing."""
        if not 0 < self.held_out < 1:
            raise OutOfRange("held_out", "above 0 and below 1", self.held_out)


@dataclass(frozen=True)
class TrainRecipe:
    """How it is trained.

    Parameters
    ----------
    steps : int
        Optimizer steps.
    batch : int
        Sequences of one step over all ranks.
    microbatches : int
        Parts into which a rank cuts its share of the batch.
    schedule : str
        Of the pipeline, where mesh.pp is above 1: a name, or a file in text or CSV form.
    stages : str
        Layers of its stages: ``uniform``, ``balanced`` (by cost, with the head), or numbers.
    recompute : bool
        Keep only the inputs of its stages (but the last), and run forward again before backward.
    sequence_parallel : bool
        With mesh.tp above 1, split what lies between the layers along the sequence.
    learning_rate, final_learning_rate : float
        Peak, and end of the cosine.
    warmup_steps : int
        Steps of linear warm-up.
    weight_decay, beta1, beta2, eps : float
        AdamW; decay is decoupled and spares vectors (biases, norms).
    clip_norm : float
        Largest global norm of the gradients; 0 leaves them alone.
    init : str
        Hugging Face folder or GGUF file whose weights the run starts from; empty draws them.
    seed : int
        Of parameters, shuffling and dropout.
    dtype : str
        ``float32`` or ``float64``.
    device : str
        Library of the arrays on a device, such as ``cupy``; empty keeps them on the host.
    deterministic : bool
        Sum gradients in rank order.
    """

    steps: int = 600
    batch: int = 16
    microbatches: int = 1
    schedule: str = "1f1b"
    stages: str = "uniform"
    recompute: bool = False
    sequence_parallel: bool = False
    learning_rate: float = 2e-3
    final_learning_rate: float = 2e-4
    warmup_steps: int = 40
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.98
    eps: float = 1e-8
    clip_norm: float = 1.0
    init: str = ""
    seed: int = 0
    dtype: str = "float32"
    device: str = ""
    deterministic: bool = False

    def __post_init__(self) -> None:
        """Refuse numbers with which no run can end well."""
        _at_least(self, 1, "steps", "batch", "microbatches")
        _at_least(self, 0, "learning_rate", "final_learning_rate", "warmup_steps", "weight_decay")
        _at_least(self, 0, "eps", "clip_norm", "seed")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise OutOfRange(name, "[0, 1)", getattr(self, name))


@dataclass(frozen=True)
class MeshRecipe:
    """Degrees of the mesh; 0 (for one of them) means what remains.

    Parameters
    ----------
    dp, pp, tp, cp : int
        Degrees.
    order : str
        Axes from outermost to innermost.
    """

    dp: int = 0
    pp: int = 1
    tp: int = 1
    cp: int = 1
    order: str = "pp dp cp tp"


@dataclass(frozen=True)
class RunRecipe:
    """What is written, and how often.

    Parameters
    ----------
    folder : str
        Run folder; empty means a new one under ``runs``.
    log_every, evaluate_every, checkpoint_every : int
        In steps; 0 means at the end only.
    held_out_sequences : int
        Sequences of one evaluation.
    keep : int
        How many checkpoints stay; 0 for all.
    background_saves : bool
        Write checkpoints while the training goes on, from a copy of the arrays.
    trace : bool
        Record every call and every part of a step, and write ``trace.jsonl`` into the folder.
    timeline : bool
        Show the last step of a pipeline beside its simulation, and write both into the folder.
    """

    folder: str = ""
    log_every: int = 20
    evaluate_every: int = 0
    checkpoint_every: int = 200
    held_out_sequences: int = 512
    keep: int = 2
    background_saves: bool = False
    trace: bool = False
    timeline: bool = False

    def __post_init__(self) -> None:
        """Refuse numbers that mean nothing."""
        _at_least(self, 0, "log_every", "evaluate_every", "checkpoint_every", "keep")
        _at_least(self, 1, "held_out_sequences")


@dataclass(frozen=True)
class PlanRecipe:
    """What `mpipar plan` foretold; shown beside what the run measures, and changes nothing.

    Parameters
    ----------
    step_s : float
        Predicted seconds of a step; 0 means that nothing was predicted.
    cluster : str
        Machine that was planned for.
    """

    step_s: float = 0.0
    cluster: str = ""

    def __post_init__(self) -> None:
        """Refuse what is no time."""
        _at_least(self, 0, "step_s")


def _gpt() -> ModelConfig:
    return GPTConfig(n_layers=4, width=128, n_heads=4, sequence=128)


def _llama() -> ModelConfig:
    return LlamaConfig(n_layers=4, width=128, n_heads=4, sequence=128, hidden=352)


_MODELS = {"gpt": _gpt, "llama": _llama}


@dataclass(frozen=True)
class Recipe:
    """Everything that decides a training run.

    Parameters
    ----------
    model : ModelConfig
        Shape of the model; its kind decides which other keys there are.
    data, train, mesh, run, plan
        The other sections.
    """

    model: ModelConfig = field(default_factory=_gpt)
    data: DataRecipe = DataRecipe()
    train: TrainRecipe = TrainRecipe()
    mesh: MeshRecipe = MeshRecipe()
    run: RunRecipe = RunRecipe()
    plan: PlanRecipe = PlanRecipe()


def load_recipe(
    path: str | Path | None = None,
    settings: Iterable[str] = (),
    model: ModelConfig | None = None,
) -> Recipe:
    """Defaults, a file over them, single settings over both.

    Parameters
    ----------
    path : str or Path, optional
        TOML file.
    settings : iterable of str
        Each ``section.key=value``; the value in TOML, or a bare word.
    model : ModelConfig, optional
        Takes the place of what defaults and file say of the model.

    Returns
    -------
    Recipe
        Checked.

    Raises
    ------
    RecipeError
        For an unknown key (the nearest one is named) or a value of the wrong kind.
    """
    values: dict[str, dict[str, Any]] = {}
    if path is not None:
        try:
            with Path(path).open("rb") as file:
                values = tomllib.load(file)
        except OSError as error:
            raise RecipeError(f"recipe {path} cannot be read: {error.strerror}") from None
        except tomllib.TOMLDecodeError as error:
            raise RecipeError(f"recipe {path} is no TOML: {error}") from None
    recipe = merge_recipe(Recipe(), values)
    if model is not None:
        recipe = dataclasses.replace(recipe, model=model)
    for setting in settings:
        key, equals, text = setting.partition("=")
        section, dot, name = key.strip().partition(".")
        if not equals or not dot:
            raise RecipeError(f"--set {setting!r} must read section.key=value, e.g. train.steps=10")
        recipe = merge_recipe(recipe, {section: {name: _value(text.strip())}})
    return recipe


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        return text


def merge_recipe(recipe: Recipe, values: Mapping[str, Any]) -> Recipe:
    """Change some keys of a recipe.

    Parameters
    ----------
    recipe : Recipe
        Stays as it is.
    values : mapping of str to mapping
        Keys and values by section.

    Returns
    -------
    Recipe
        Checked.

    Raises
    ------
    RecipeError
        As in `load_recipe`.
    """
    sections = {f.name: getattr(recipe, f.name) for f in dataclasses.fields(recipe)}
    for name, table in values.items():
        if name not in sections:
            raise RecipeError(f"no section [{name}] in a recipe{_nearest(name, sections)}")
        if not isinstance(table, Mapping):
            raise RecipeError(f"{name} is a section: write [{name}] and its keys below")
        if name == "model":
            sections[name] = _of_kind(sections[name], table.get("kind", sections[name].kind))
        hints = typing.get_type_hints(type(sections[name]))
        kinds = {f.name: hints[f.name] for f in dataclasses.fields(sections[name])}
        changed = {}
        for key, value in table.items():
            if key not in kinds:
                raise RecipeError(f"no key {name}.{key} in a recipe{_nearest(key, kinds)}")
            changed[key] = _checked(f"{name}.{key}", value, kinds[key])
        try:
            sections[name] = dataclasses.replace(sections[name], **changed)
        except ParallelismError as error:
            raise RecipeError(f"section [{name}]: {error}") from None
    return Recipe(**sections)


def _of_kind(model: ModelConfig, kind: Any) -> ModelConfig:
    """The model, or the default of another kind."""
    if kind == model.kind:
        return model
    if kind not in _MODELS:
        raise RecipeError(f"model.kind={kind!r}: {' or '.join(_MODELS)} would do")
    return _MODELS[kind]()


def _nearest(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(known), 1, 0.5)
    return f"; did you mean {near[0]}?" if near else f"; known: {', '.join(known)}"


def _checked(name: str, value: Any, kind: Any) -> Any:
    kinds = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    if float in kinds and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) not in kinds:
        words = " or ".join(k.__name__ for k in kinds if k is not type(None))
        raise RecipeError(f"{name} must be {words}, got {value!r}")
    return value


def dump_recipe(recipe: Recipe) -> str:
    """The recipe as TOML; `load_recipe` of it gives an equal one.

    Parameters
    ----------
    recipe : Recipe
        Any.

    Returns
    -------
    str
        Every key, so that later defaults do not change a run.
    """
    lines: list[str] = []
    for section in dataclasses.fields(recipe):
        lines += ["" if lines else "# mpipar recipe", f"[{section.name}]"]
        for key, value in dataclasses.asdict(getattr(recipe, section.name)).items():
            if value is not None:
                lines.append(f"{key} = {_toml(value)}")
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return '"' + "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in escaped) + '"'
    return repr(value)
