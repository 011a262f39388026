"""A timeline as Chrome trace events, which Perfetto and chrome://tracing open."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from mpipar.pipeline_parallel.action import Action, Kind, Message
from mpipar.pipeline_parallel.timeline import Timeline

_STREAMS: Final = {
    Kind.SEND_F: "send forward",
    Kind.RECV_F: "receive forward",
    Kind.SEND_B: "send backward",
    Kind.RECV_B: "receive backward",
    Kind.REDUCE_GRAD: "reduce gradients",
}


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """Trace events of a timeline: a process per rank, a lane per stream, arrows for messages.

    Events of one lane never overlap (viewers draw such lanes wrongly), so messages that travel
    at the same time get lanes of their own. Messages are drawn for a lowered schedule.

    Parameters
    ----------
    timeline : Timeline
        Simulated or measured.

    Returns
    -------
    dict
        The JSON object format: ``traceEvents`` in microseconds.
    """
    return {"traceEvents": list(_events(timeline)), "displayTimeUnit": "ms"}


def write_chrome_trace(timeline: Timeline, path: str | Path) -> None:
    """Write `chrome_trace` to a file.

    Parameters
    ----------
    timeline : Timeline
        Simulated or measured.
    path : str or Path
        A JSON file.
    """
    Path(path).write_text(json.dumps(chrome_trace(timeline)), encoding="utf-8")


def _events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    schedule = timeline.schedule
    for rank in range(schedule.n_ranks):
        stages = ", ".join(map(str, schedule.stages_of(rank)))
        yield meta("process_name", rank, 0, {"name": f"rank {rank} (stage {stages})"})
        yield meta("process_sort_index", rank, 0, {"sort_index": rank})
        lanes = Lanes()
        skip = False
        for index in range(int(schedule.offsets[rank]), int(schedule.offsets[rank + 1])):
            if skip:  # the second half of a pair, drawn with the first
                skip = False
                continue
            action = schedule.action(index)
            name, skip = str(action), bool(schedule.overlapped[index])
            if skip:
                name = f"{name} + {schedule.action(index + 1)}"
            start, end = float(timeline.start_us(index)), float(timeline.end_us(index))
            lane = lanes.place(_STREAMS.get(action.kind, "compute"), start, end)
            event = {"pid": rank, "tid": lane, "ts": start}
            yield {"ph": "X", "name": name, "cat": _category(action), "dur": end - start, **event}
            if action.kind.is_communication:
                yield _arrow(action, event, end)
        for lane, name in lanes.names():
            yield meta("thread_name", rank, lane, {"name": name})
            yield meta("thread_sort_index", rank, lane, {"sort_index": lane})


def _category(action: Action) -> str:
    return "compute" if action.kind.is_compute else "communication"


def meta(name: str, rank: int, lane: int, args: dict[str, Any]) -> dict[str, Any]:
    """Name or order of a process or lane, as a trace event.

    Parameters
    ----------
    name : str
        What is told, such as ``thread_name``.
    rank, lane : int
        Of whom.
    args : dict
        The value.

    Returns
    -------
    dict
        One event.
    """
    return {"ph": "M", "name": name, "pid": rank, "tid": lane, "args": args}


def _arrow(action: Action, event: dict[str, Any], end: float) -> dict[str, Any]:
    """One end of the arrow: it starts with the send's event and binds to the receive's end."""
    sends = action.kind in (Kind.SEND_F, Kind.SEND_B)
    place = {**event, "ts": event["ts"] if sends else end}
    shape = {"ph": "s"} if sends else {"ph": "f", "bp": "e"}
    return {"name": "message", "cat": "message", "id": _number(action.message), **shape, **place}


def _number(message: Message) -> str:
    return f"{message.direction}-{message.boundary}-{message.microbatch}"


class Lanes:
    """Gives each event the first lane of its stream that is free."""

    def __init__(self) -> None:
        self._ends: dict[tuple[str, int], float] = {("compute", 0): 0.0}
        self._number: dict[tuple[str, int], int] = {("compute", 0): 0}

    def place(self, stream: str, start: float, end: float) -> int:
        """Take a lane.

        Parameters
        ----------
        stream : str
            Events of one stream share lanes.
        start, end : float
            Of the event; starts do not go back.

        Returns
        -------
        int
            The lane.
        """
        copy = 0
        while self._ends.get((stream, copy), start) > start:
            copy += 1
        self._ends[stream, copy] = end
        return self._number.setdefault((stream, copy), len(self._number))

    def names(self) -> Iterator[tuple[int, str]]:
        """Lanes in use.

        Yields
        ------
        tuple of int and str
            Number and name.
        """
        for (stream, copy), lane in self._number.items():
            yield lane, stream if copy == 0 else f"{stream} ({copy + 1})"
