"""Reports of a run, in Markdown and HTML: built from an allow-list, published only when reviewed.

Every report is made from the record of `report_record`, which holds fields of `FIELDS` and nothing
else: numbers, and words of closed vocabularies. A review names the hash of what was reviewed, so
that a later change of any input voids it.
"""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mpipar.comm.trace_types import ParallelTraceVisibility
from mpipar.errors import CheckpointError, InvalidPublicReport
from mpipar.report import redact
from mpipar.report.trace import by_event, by_op, load_trace, missing

REVIEW = "review.json"
INPUTS = ("recipe.toml", "metrics.jsonl", "trace.jsonl", "environment.json")
_MOST_BYTES = 1 << 28


def _bytes_of(folder: Path) -> dict[str, bytes]:
    """The inputs, each read once: what is hashed is what is shown."""
    found = {}
    for name in INPUTS:
        try:
            if (folder / name).stat().st_size > _MOST_BYTES:
                raise CheckpointError(f"{name} is larger than {_MOST_BYTES} bytes")
            found[name] = (folder / name).read_bytes()
        except OSError as error:
            raise missing(folder / name, error) from None
    return found


def input_hashes(inputs: Mapping[str, bytes]) -> dict[str, str]:
    """SHA-256 of each input.

    Parameters
    ----------
    inputs : mapping
        Name to content.

    Returns
    -------
    dict
        Name to hexadecimal digest.
    """
    return {name: hashlib.sha256(data).hexdigest() for name, data in inputs.items()}


def write_review(folder: Path, reviewer: str, visibility: ParallelTraceVisibility) -> Path:
    """Record that somebody has looked at a run's inputs, and who may see them.

    Parameters
    ----------
    folder : Path
        Run folder.
    reviewer : str
        Who; kept in the review and never shown in a public report.
    visibility : ParallelTraceVisibility
        The decision.

    Returns
    -------
    Path
        The review file.

    Raises
    ------
    InvalidPublicReport
        Without a reviewer.
    """
    if not reviewer.strip():
        raise InvalidPublicReport("review", "it needs the reviewer's name: --review WHO")
    review = {
        "reviewer": reviewer,
        "reviewed_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "visibility": str(visibility),
        "inputs": input_hashes(_bytes_of(folder)),
    }
    (folder / REVIEW).write_text(json.dumps(review, indent=1) + "\n", encoding="utf-8")
    return folder / REVIEW


def check_review(folder: Path, hashes: Mapping[str, str]) -> None:
    """Refuse unless the inputs, as they are now, were reviewed as public.

    Parameters
    ----------
    folder : Path
        Run folder.
    hashes : mapping
        Of the inputs now.

    Raises
    ------
    InvalidPublicReport
        Naming the input and the reason.
    """

    def blocked(name: str, reason: str) -> InvalidPublicReport:
        return InvalidPublicReport("public report", f"blocked: {name} {reason}")

    try:
        review = json.loads((folder / REVIEW).read_text(encoding="utf-8"))
    except OSError:
        raise blocked("trace.jsonl", "has no review; --review WHO writes one") from None
    except (ValueError, RecursionError):
        raise blocked(REVIEW, "is no JSON, or cut short") from None
    if not isinstance(review, dict) or not isinstance(review.get("inputs"), dict):
        raise blocked(REVIEW, "is no review")
    if not all(isinstance(review.get(k), str) and review[k] for k in ("reviewer", "reviewed_at")):
        raise blocked(REVIEW, "does not say who reviewed, and when")
    if review.get("visibility") != str(ParallelTraceVisibility.PUBLIC):
        raise blocked("trace.jsonl", "was not reviewed as public")
    for name, digest in hashes.items():
        if review["inputs"].get(name) != digest:
            raise blocked(name, "has changed since it was reviewed")


def _digest(value: object) -> str | None:
    """Rule: a SHA-256 in hexadecimal, as this module computes it."""
    fits = isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value)
    return value if fits and isinstance(value, str) else None


_AXES = ("pp", "dp", "cp", "tp", "ep")
_EVENTS = ("data", "forward", "backward", "input gradient", "weight gradient", "optimizer")
_GROUPS = ("world", *_AXES, *(f"{a}x{b}" for a in _AXES for b in _AXES))
_CALL_OPS = redact.PUBLIC_FIELDS["op"]
_MPIS = ("Open MPI", "MPICH", "Intel MPI", "Cray MPICH", "MVAPICH", "none")
_MODEL = ("n_layers", "width", "n_heads", "sequence", "vocabulary")
_TRAIN = ("steps", "batch", "microbatches", "seed")
FIELDS: Mapping[str, redact.Rule] = {
    "visibility": redact.PUBLIC_FIELDS["visibility"],
    "model": redact.record_of(
        {**dict.fromkeys(_MODEL, redact.whole), "kind": redact.one_of(("gpt", "llama"))}
    ),
    "train": redact.record_of(
        {**dict.fromkeys(_TRAIN, redact.whole), "dtype": redact.PUBLIC_FIELDS["dtype"]}
    ),
    "layout": redact.record_of(dict.fromkeys(_AXES, redact.whole)),
    "n_ranks": redact.whole,
    "steps": redact.list_of(redact.whole),
    "losses": redact.list_of(redact.finite),
    "final": redact.record_of(
        dict.fromkeys(("loss", "held_out_loss", "tokens_per_s", "communication_share"),
                      redact.finite)
    ),
    "step_s": redact.record_of(dict.fromkeys(("predicted", "measured"), redact.finite)),
    "time_by_kind": redact.record_of(dict.fromkeys(_EVENTS, redact.finite)),
    "communication": redact.list_of(
        redact.record_of(
            {
                "op": _CALL_OPS,
                "axes": redact.one_of(_GROUPS),
                **dict.fromkeys(("calls", "bytes"), redact.whole),
                **dict.fromkeys(("seconds", "waiting_s", "bus_bytes_per_s"), redact.finite),
            }
        )
    ),
    "environment": redact.record_of(
        {
            **dict.fromkeys(("python", "numpy", "mpi_version"), redact.list_of(redact.whole)),
            **dict.fromkeys(("cores", "n_ranks"), redact.whole),
            "mpi": redact.one_of(_MPIS),
        }
    ),
    "inputs": redact.record_of(dict.fromkeys(INPUTS, _digest)),
}  # fmt: skip
"""What a report may hold. Whoever adds a field answers for its rule."""


def report_record(folder: Path, visibility: ParallelTraceVisibility) -> dict[str, Any]:
    """Gather what a report shows, through the allow-list.

    Parameters
    ----------
    folder : Path
        Run folder.
    visibility : ParallelTraceVisibility
        Who may see the report.

    Returns
    -------
    dict
        Fields of `FIELDS`.

    Raises
    ------
    InvalidPublicReport
        For a public report of what was not reviewed as public.
    CheckpointError
        For inputs that cannot be read.
    """
    inputs = _bytes_of(folder)
    hashes = input_hashes(inputs)
    if visibility is ParallelTraceVisibility.PUBLIC:
        check_review(folder, hashes)
    records = load_trace(folder / "trace.jsonl")
    if input_hashes(_bytes_of(folder)) != hashes:
        raise CheckpointError("an input changed while it was read")
    recipe, metrics = _recipe(inputs["recipe.toml"]), _metrics(inputs["metrics.jsonl"])
    points = [m for m in metrics if "loss" in m and "step" in m]
    ranks = {r.rank: r.coordinate for r in records}
    raw = {
        "visibility": visibility,
        "model": recipe.get("model"),
        "train": recipe.get("train"),
        "layout": {a: 1 + max((c.get(a, 0) for c in ranks.values()), default=0) for a in _AXES},
        "n_ranks": len(ranks),
        "steps": [m["step"] for m in points],
        "losses": [m["loss"] for m in points],
        "final": metrics[-1] if metrics else {},
        "step_s": _step_s(recipe, metrics),
        "time_by_kind": {op: seconds for op, (_, seconds) in by_event(records).items()},
        "communication": [
            {"op": r.op, "axes": r.group, "calls": r.n_calls, "bytes": r.n_bytes,
             "seconds": r.seconds, "waiting_s": r.wait_s, "bus_bytes_per_s": r.bus_bytes_per_s}
            for r in by_op(records)
        ],
        "environment": _environment(inputs["environment.json"]),
        "inputs": hashes,
    }  # fmt: skip
    return redact.redacted(raw, FIELDS)


def _recipe(data: bytes) -> dict[str, Any]:
    try:
        return tomllib.loads(data.decode())
    except (ValueError, RecursionError):
        raise CheckpointError("recipe.toml is no TOML, or cut short") from None


def _environment(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise CheckpointError("environment.json is no JSON, or cut short") from None
    if not isinstance(found, dict):
        raise CheckpointError("environment.json is no record")
    return found


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no number of a record")


def _metrics(data: bytes) -> list[dict[str, Any]]:
    lines = []
    for number, line in enumerate(data.splitlines(), 1):
        try:
            found = json.loads(line, parse_constant=_no_constant)
        except (ValueError, RecursionError):
            raise CheckpointError(f"metrics.jsonl, line {number} is no JSON") from None
        if not isinstance(found, dict):
            raise CheckpointError(f"metrics.jsonl, line {number} is no record")
        lines.append(found)
    return lines


def _step_s(recipe: Mapping[str, Any], metrics: list[dict[str, Any]]) -> dict[str, Any]:
    """Seconds of a step: as the planner priced it, and as the throughput says."""

    def number(table: object, name: str) -> float:
        return redact.finite(table.get(name, 0)) or 0.0 if isinstance(table, dict) else 0.0

    tokens = number(recipe.get("train"), "batch") * number(recipe.get("model"), "sequence")
    rate = number(metrics[-1] if metrics else {}, "tokens_per_s")
    predicted = number(recipe.get("plan"), "step_s")
    found = {"predicted": predicted, "measured": tokens / rate if rate else 0.0}
    return {name: seconds for name, seconds in found.items() if seconds > 0}
