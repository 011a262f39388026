"""Redaction by an allow-list: what is not known to be harmless does not get out.

A field is published only if its name is in the list *and* its value fits the field's rule: a
number, a yes or no, or a word of a closed vocabulary. No rule takes free text, so host names,
users, paths, addresses and identifiers have nowhere to stand, whatever field they are put in. A
number in a field of numbers is taken at its word: a job id stored as a rank stays a rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any

from mpipar.comm.call import Op, ReduceOp
from mpipar.comm.trace_types import CollectiveKind, ParallelTraceVisibility
from mpipar.errors import InvalidPublicReport
from mpipar.units import ParallelStrategy
from mpipar.units.quantity import LARGEST

Rule = Callable[[object], Any]
"""Gives the value as plain Python data, made anew, or None when it does not fit."""


def whole(value: object) -> int | None:
    """Rule: a whole number from 0 to ``2**63 - 1``."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        return None
    number = int(value)
    return number if 0 <= number <= LARGEST else None


def finite(value: object) -> float | None:
    """Rule: a finite number."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _flag(value: object) -> bool | None:
    """Rule: yes or no."""
    return value if isinstance(value, bool) else None


def one_of(words: Iterable[object]) -> Rule:
    """Make a rule for a closed vocabulary."""
    known = {str(word): str(word) for word in words}

    def rule(value: object) -> str | None:
        word = value.value if isinstance(value, Enum) else value
        return known.get(word) if isinstance(word, str) else None

    return rule


def list_of(rule: Rule) -> Rule:
    """Make a rule for a list; an item that does not fit removes it all: a shorter one would lie."""

    def whole_list(value: object) -> list[Any] | None:
        if not isinstance(value, list | tuple):
            return None
        items = [rule(item) for item in value]
        return None if any(item is None for item in items) else items

    return whole_list


def record_of(fields: Mapping[str, Rule]) -> Rule:
    """Make a rule for a nested record."""

    def record(value: object) -> dict[str, Any] | None:
        if not isinstance(value, Mapping):
            return None
        cleaned = ((name, rule(value[name])) for name, rule in fields.items() if name in value)
        return {name: item for name, item in cleaned if item is not None}

    return record


_AXES = ("pp", "dp", "cp", "tp", "ep")
_DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
)
_CALL_FIELDS: Mapping[str, Rule] = {
    "kind": one_of(CollectiveKind),
    "op": one_of(Op),
    "reduce_op": one_of(ReduceOp),
    "dtype": one_of(_DTYPES),
    "axis": one_of(_AXES),
    "axes": list_of(one_of(_AXES)),
    "coordinate": record_of(dict.fromkeys(_AXES, whole)),
    "strategy": one_of(ParallelStrategy),
    "visibility": one_of(ParallelTraceVisibility),
    **dict.fromkeys(("sequence", "rank", "world_size", "root", "peer", "dim"), whole),
    **dict.fromkeys(("n_bytes", "bytes_per_rank", "communication_estimate_bytes"), whole),
    **dict.fromkeys(("shape", "counts", "recv_counts", "exact_bytes_per_rank"), list_of(whole)),
    **dict.fromkeys(("duration_s", "wait_s", "bytes_per_s", "reduced_value"), finite),
    **dict.fromkeys(("deterministic", "blocking"), _flag),
}
PUBLIC_FIELDS: Mapping[str, Rule] = MappingProxyType(
    {**_CALL_FIELDS, "calls": list_of(record_of(_CALL_FIELDS))}
)
"""Every field that may be published, with the rule that its value must fit."""


def redacted(
    record: Mapping[str, Any], fields: Mapping[str, Rule] = PUBLIC_FIELDS
) -> dict[str, Any]:
    """Make the publishable copy of a trace or report record.

    Parameters
    ----------
    record : mapping
        Nested record; it is not changed, and nothing of it is shared with the result.
    fields : mapping
        Allowed field names and their rules. Whoever adds a field answers for its rule.

    Returns
    -------
    dict
        Plain data with the allowed fields that fit, in the order of `fields`.

    Raises
    ------
    InvalidPublicReport
        If `record` is no mapping.
    """
    cleaned: dict[str, Any] | None = record_of(fields)(record)
    if cleaned is None:
        raise InvalidPublicReport("redaction", f"a {type(record).__name__} is not a record")
    return cleaned
