"""One configuration with its price, and whether `mpipar train` can run it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mpipar.planner.spec import ModelSpec
from mpipar.units import Bytes, Seconds

RUNNABLE: dict[str, Any] = {"max_cp": 1, "max_chunks": 2, "recompute": (0,), "zero": (0,)}
"""Limits of what `mpipar train` runs today."""


def not_runnable(spec: ModelSpec, row: Mapping[str, Any]) -> tuple[str, ...]:
    """What a configuration needs that `mpipar train` cannot do yet; empty when it can run it."""
    needs = {
        f"{spec.family} models": spec.family != "gpt",
        "experts": spec.n_experts > 1,
        "copied key and value heads": spec.kv_heads % row["tp"] > 0,
        "context parallelism": row["cp"] > 1,
        "expert parallelism": row["ep"] > 1,
        "uneven parts of a sequence": row["sp"] and spec.sequence % row["tp"] > 0,
        f"{row['recompute']} recompute": row["recompute"] != "none",
        f"ZeRO {row['zero']}": row["zero"] > 0,
        f"{row['chunks']} chunks a stage": row["chunks"] > 2,
    }
    return tuple(name for name, needed in needs.items() if needed)


@dataclass(frozen=True)
class Option:
    """One configuration with its price.

    Parameters
    ----------
    row : mapping
        The configuration in words (`Configs.row`).
    seconds : float
        Predicted step: the simulator's pipeline where there is one, else the closed form.
    closed_form_s : float
        The step by the closed form; its kinds are in `time_s`.
    time_s : mapping of str to float
        Seconds by kind.
    first_bytes, last_bytes : mapping of str to float
        Memory of a rank in the first and the last stage, by kind.
    missing : tuple of str
        What cannot run yet.
    """

    row: Mapping[str, Any]
    seconds: float
    closed_form_s: float
    time_s: Mapping[str, float]
    first_bytes: Mapping[str, float]
    last_bytes: Mapping[str, float]
    missing: tuple[str, ...]

    @property
    def step(self) -> Seconds:
        """Predicted step."""
        return Seconds(self.seconds)

    @property
    def peak(self) -> Bytes:
        """Memory of the fullest rank."""
        return Bytes(round(max(sum(self.first_bytes.values()), sum(self.last_bytes.values()))))

    def loses_by(self, other: Option) -> str:
        """Why this option is slower than another, in one line.

        Parameters
        ----------
        other : Option
            The faster one.

        Returns
        -------
        str
            The difference and the two kinds of time that make most of it.
        """
        more = {k: self.time_s[k] - other.time_s[k] for k in self.time_s}
        worst = sorted(more, key=lambda k: -more[k])[:2]
        parts = [f"{k} {more[k]:+.3g} s" for k in worst if more[k] > 0.002 * other.seconds]
        return f"{self.seconds / other.seconds - 1:+.1%}: {', '.join(parts) or 'a near tie'}"
