"""The record of a run: read with care, completed, and seen from several sides. Pure.

A trace is a file of JSON lines as `mpipar.comm.traced` writes them, all ranks on one clock.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mpipar.comm.call import Op
from mpipar.comm.trace_types import CollectiveKind, MeasuredCollective
from mpipar.errors import CheckpointError
from mpipar.topology.cost import bus_factor
from mpipar.units import CommunicationBytes, WorldSize

MESSAGES = ("send", "recv")
CALLS = frozenset(str(op) for op in Op)
_LONGEST_LINE, _MOST_RECORDS, _MOST_BYTES = 1 << 16, 5_000_000, 1 << 31
_MOST_RANKS, _MOST_DRAWN = 1 << 20, 4096
_KINDS = {
    "all_reduce": CollectiveKind.ALL_REDUCE,
    "reduce_scatter": CollectiveKind.REDUCE_SCATTER,
    "all_gather": CollectiveKind.ALL_GATHER,
    "all_to_all": CollectiveKind.ALL_TO_ALL,
    "broadcast": CollectiveKind.BROADCAST,
    "reduce": CollectiveKind.REDUCE,
    "gather": CollectiveKind.GATHER,
    "scatter": CollectiveKind.SCATTER,
    "barrier": CollectiveKind.BARRIER,
    "send": CollectiveKind.POINT_TO_POINT,
    "recv": CollectiveKind.POINT_TO_POINT,
}


@dataclass
class Record:
    """One thing that one rank did.

    Parameters
    ----------
    op : str
        A collective, ``send``, ``recv``, or the name of an event.
    rank : int
        Who.
    start_s, duration_s : float
        On rank 0's clock.
    group : str
        Axes of the communicator; empty for an event.
    members : tuple of int
        Ranks of the communicator.
    bytes : int
        Of the larger buffer.
    dtype, algorithm : str
        Of the call.
    sequence : int
        Number of the call on its communicator, or of the message between its two ends.
    peer, tag : int
        Of a message.
    wait_s : float or None
        For how long the program stood still; `complete` finds it for blocking collectives.
    waited_for : int
        The rank that came last; -1 where that is not known.
    step : int
        Of the training.
    coordinate : dict
        Of the rank on the mesh.
    """

    op: str
    rank: int
    start_s: float
    duration_s: float
    group: str = ""
    members: tuple[int, ...] = ()
    bytes: int = 0
    dtype: str = ""
    algorithm: str = ""
    sequence: int = 0
    peer: int = -1
    tag: int = 0
    wait_s: float | None = None
    waited_for: int = -1
    step: int = 0
    coordinate: dict[str, int] = field(default_factory=dict)

    @property
    def is_call(self) -> bool:
        """Whether it is a call of a communicator."""
        return self.op in CALLS

    def typed(self) -> MeasuredCollective:
        """The call as a typed trace with exact bytes.

        Returns
        -------
        MeasuredCollective
            Of the whole group.
        """
        size = 2 if self.op in MESSAGES else max(1, len(self.members))
        return MeasuredCollective(_KINDS[self.op], WorldSize(size), CommunicationBytes(self.bytes))


def missing(file: Path, error: OSError) -> CheckpointError:
    """What to say of an input that cannot be read.

    Parameters
    ----------
    file : Path
        In a run folder.
    error : OSError
        Why.

    Returns
    -------
    CheckpointError
        With the way to have it, where that is known.
    """
    hint = ""
    if file.name == "trace.jsonl" and file.parent.is_dir():
        hint = "; `mpipar train --trace` records one"
    elif not file.parent.is_dir():
        hint = f"; there is no folder {file.parent}"
    return CheckpointError(f"{file} cannot be read: {error.strerror}{hint}")


def load_trace(path: Path) -> list[Record]:
    """Read a trace.

    Parameters
    ----------
    path : Path
        A file of JSON lines, or a run folder that holds ``trace.jsonl``.

    Returns
    -------
    list of Record
        By start, completed.

    Raises
    ------
    CheckpointError
        If it is missing, too large, cut short, or a line is no record; names file and line.
    """
    file = path / "trace.jsonl" if path.is_dir() else path
    try:
        size = file.stat().st_size
    except OSError as error:
        raise missing(file, error) from None
    if size > _MOST_BYTES:
        raise CheckpointError(f"{file} has {size} bytes; up to {_MOST_BYTES} are read")
    records = []
    with file.open("rb") as lines:
        for number, line in enumerate(iter(lambda: lines.readline(_LONGEST_LINE + 1), b""), 1):
            where = f"{file}, line {number}"
            if number > _MOST_RECORDS:
                raise CheckpointError(f"{where}: more than {_MOST_RECORDS} records")
            records.append(_record(line, where))
    return complete(records)


def _record(line: bytes, where: str) -> Record:
    if len(line) > _LONGEST_LINE:
        raise CheckpointError(f"{where} is longer than {_LONGEST_LINE} bytes")
    try:
        found = json.loads(line, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} is no JSON, or cut short: {error}") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{where} is a {type(found).__name__}, not a record")
    try:
        return _checked(found)
    except (KeyError, ValueError, TypeError, OverflowError) as error:
        raise CheckpointError(f"{where} is no record: {error!r}"[:300]) from None


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no number of a trace")


def _checked(found: Mapping[str, Any]) -> Record:
    def whole(name: str, default: int | None = None) -> int:
        value = found[name] if default is None else found.get(name, default)
        if type(value) is not int or abs(value) >= 1 << 62:
            raise ValueError(f"{name}={value!r} is no whole number")
        return value

    def number(name: str, value: Any) -> float:
        if type(value) not in (int, float) or not math.isfinite(value):
            raise ValueError(f"{name}={value!r} is no finite number")
        return float(value)

    def word(name: str) -> str:
        value = found.get(name, "")
        if not isinstance(value, str) or len(value) > 80:
            raise ValueError(f"{name} is no short text")
        return value

    members = found.get("members", [])
    coordinate = found.get("coordinate", {})
    if not isinstance(members, list) or not all(type(m) is int and m >= 0 for m in members):
        raise ValueError("members are no list of ranks")
    if not isinstance(coordinate, dict) or not all(type(v) is int for v in coordinate.values()):
        raise ValueError("coordinate is no record of numbers")
    wait = found.get("wait_s")
    if not word("op"):
        raise ValueError("op is missing")
    if word("op") in CALLS and not members:
        raise ValueError("a call has no members")
    if max(members, default=0) >= _MOST_RANKS or whole("rank") >= _MOST_RANKS:
        raise ValueError(f"a rank is {_MOST_RANKS} or more")
    if members and whole("rank") not in members:
        raise ValueError("rank is not among members")
    if word("op") in MESSAGES and whole("peer") not in members:
        raise ValueError("peer is not among members")
    record = Record(
        word("op"), whole("rank"), number("start_s", found["start_s"]),
        number("duration_s", found["duration_s"]), word("group"), tuple(members),
        whole("bytes", 0), word("dtype"), word("algorithm"), whole("sequence", 0),
        whole("peer", -1), whole("tag", 0), None if wait is None else number("wait_s", wait), -1,
        whole("step", 0), {str(k)[:8]: v for k, v in coordinate.items()},
    )  # fmt: skip
    if record.rank < 0 or record.bytes < 0 or record.duration_s < 0:
        raise ValueError("rank, bytes or duration are negative")
    return record


def complete(records: Iterable[Record]) -> list[Record]:
    """Find who waited for whom: in a blocking collective all wait for the rank that comes last.

    Parameters
    ----------
    records : iterable of Record
        Of all ranks, on one clock.

    Returns
    -------
    list of Record
        The same, by start.
    """
    found = sorted(records, key=lambda r: (r.start_s, r.rank))
    calls: dict[tuple[Any, ...], list[Record]] = defaultdict(list)
    for record in found:
        if record.is_call and record.op not in MESSAGES:
            calls[record.members, record.group, record.sequence, record.op].append(record)
    for together in calls.values():
        last = max(together, key=lambda r: r.start_s)
        for record in together:
            record.waited_for = last.rank if record is not last else -1
            if record.wait_s is None:
                record.wait_s = max(0.0, min(record.duration_s, last.start_s - record.start_s))
    return found


@dataclass(frozen=True)
class Row:
    """All calls of one operation on one group of axes.

    Parameters
    ----------
    op, group : str
        Which.
    n_calls, n_bytes : int
        Over all ranks.
    seconds, wait_s : float
        Over all ranks.
    n_ranks : int
        Of one group.
    waited_for : int
        The rank for which was waited longest; -1 for none.
    """

    op: str
    group: str
    n_calls: int
    n_bytes: int
    seconds: float
    wait_s: float
    n_ranks: int
    waited_for: int

    @property
    def bytes_per_s(self) -> float:
        """Algorithm bandwidth: bytes over time, both of one rank's calls."""
        return self.n_bytes / self.seconds if self.seconds > 0 else 0.0

    @property
    def bus_bytes_per_s(self) -> float:
        """Bus bandwidth, in the convention of nccl-tests."""
        return self.bytes_per_s * bus_factor(self.op, self.n_ranks)


def by_op(records: Sequence[Record]) -> list[Row]:
    """Calls by operation and axes, longest first.

    Parameters
    ----------
    records : sequence of Record
        Of `load_trace`.

    Returns
    -------
    list of Row
        One an operation and group label.
    """
    groups: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for record in records:
        if record.is_call:
            groups[record.op, record.group].append(record)
    rows = []
    for (op, group), calls in groups.items():
        late: dict[int, float] = defaultdict(float)
        for call in calls:
            if call.waited_for >= 0:
                late[call.waited_for] += call.wait_s or 0.0
        rows.append(Row(
            op, group, len(calls), sum(c.bytes for c in calls),
            sum(c.duration_s for c in calls), sum(c.wait_s or 0.0 for c in calls),
            max(len(c.members) for c in calls), max(late, key=lambda r: late[r], default=-1),
        ))  # fmt: skip
    return sorted(rows, key=lambda row: -row.seconds)


def by_event(records: Sequence[Record]) -> dict[str, tuple[int, float]]:
    """Events that are no calls: how often, and how many seconds over all ranks, longest first."""
    found: dict[str, list[float]] = defaultdict(list)
    for record in records:
        if not record.is_call:
            found[record.op].append(record.duration_s)
    sums = {op: (len(times), sum(times)) for op, times in found.items()}
    return dict(sorted(sums.items(), key=lambda item: -item[1][1]))


def matrix(records: Sequence[Record]) -> list[list[int]]:
    """Bytes that each rank sends to each other one.

    Messages go where they go; the bytes of a collective's ring form go to the right neighbour in
    the group, and those of an all-to-all in equal parts to all others.

    Parameters
    ----------
    records : sequence of Record
        Of `load_trace`.

    Returns
    -------
    list of list of int
        Row: sender.

    Raises
    ------
    CheckpointError
        Above 4096 ranks.
    """
    ranks = [r.rank for r in records] + [m for r in records for m in r.members]
    n = 1 + max(ranks, default=-1)
    if n > _MOST_DRAWN:
        raise CheckpointError(f"a matrix of {n} ranks; up to {_MOST_DRAWN} are made")
    table = [[0] * n for _ in range(n)]
    for record in records:
        if record.op == "send":
            table[record.rank][record.peer] += record.bytes
        elif record.is_call and record.op not in ("recv", "barrier") and len(record.members) > 1:
            place = record.members.index(record.rank)
            sent = int(record.typed().exact_bytes_per_rank[place])
            others = [m for m in record.members if m != record.rank]
            if record.op == "all_to_all":
                for other in others:
                    table[record.rank][other] += sent // len(others)
            else:
                right = record.members[(place + 1) % len(record.members)]
                table[record.rank][right] += sent
    return table
