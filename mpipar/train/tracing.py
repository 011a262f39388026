"""The trainer's own events in a trace, and the trace of a run in its folder."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import numpy as np

from mpipar.comm import Communicator
from mpipar.comm.traced import Tracer, clock_offsets
from mpipar.pipeline_parallel import Timeline
from mpipar.pipeline_parallel.action import Kind
from mpipar.pipeline_parallel.executor import PipelineExecutor
from mpipar.pipeline_parallel.links import SlotLinks

TRACE = "trace.jsonl"
_EVENTS = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "input gradient",
    Kind.W: "weight gradient",
}


def span(tracer: Tracer | None, op: str) -> contextlib.AbstractContextManager[None]:
    """Record a block, or do nothing without a tracer.

    Parameters
    ----------
    tracer : Tracer or None
        None for nothing.
    op : str
        Name of the block.

    Returns
    -------
    context manager
        Around the block.
    """
    return contextlib.nullcontext() if tracer is None else tracer.span(op)


def trace_timeline(tracer: Tracer, executor: PipelineExecutor, timeline: Timeline) -> None:
    """Record the actions of this rank in one step of a pipeline.

    Parameters
    ----------
    tracer : Tracer
        Of this rank.
    executor : PipelineExecutor
        That made the step.
    timeline : Timeline
        What `PipelineExecutor.step` gave.
    """
    schedule, rank = executor.schedule, executor.comm.rank
    owner = schedule.stage_to_rank.tolist()
    group = getattr(executor.comm, "_group", None)
    members = list(range(executor.comm.size)) if group is None else group.members
    by_slots = isinstance(executor.links, SlotLinks)
    for index in range(int(schedule.offsets[rank]), int(schedule.offsets[rank + 1])):
        kind, stage = Kind(int(schedule.kind[index])), int(schedule.stage[index])
        begin, end = (
            executor.origin + float(x) * 1e-6 for x in (timeline.start[index], timeline.end[index])
        )
        facts = {"stage": stage, "microbatch": int(schedule.microbatch[index])}
        if kind in _EVENTS:
            tracer.add(_EVENTS[kind], begin, end, **facts)
        elif kind is not Kind.REDUCE_GRAD and by_slots:  # messages are recorded by the group
            sends = kind in (Kind.SEND_F, Kind.SEND_B)
            up = kind in (Kind.SEND_F, Kind.RECV_B)
            low = stage if up else stage - 1
            shape, dtype = executor.specs[low][facts["microbatch"]] or ((0,), "float32")
            n_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
            tag = 2 * low + (kind in (Kind.SEND_B, Kind.RECV_B))
            tracer.add(
                "send" if sends else "recv", begin, end, group="pp", members=members,
                bytes=n_bytes, dtype=dtype, algorithm="slot",
                peer=members[owner[stage + (1 if up else -1)]],
                tag=tag, sequence=tracer.step * 10_000 + facts["microbatch"], **facts,
            )  # fmt: skip


def write_trace(comm: Communicator, tracer: Tracer, folder: Path) -> Path:
    """Bring the records of all ranks together, on rank 0's clock. Collective.

    Parameters
    ----------
    comm : Communicator
        All ranks, not traced.
    tracer : Tracer
        Of this rank.
    folder : Path
        Run folder, seen by all ranks.

    Returns
    -------
    Path
        ``trace.jsonl``, records by start.
    """
    offsets = comm.broadcast_json(clock_offsets(comm))
    parts = folder / ".trace"
    comm.made_by_root(lambda: parts.mkdir(exist_ok=True))
    tracer.write(parts / f"{comm.rank}.jsonl", offsets[comm.rank])
    comm.barrier()
    if comm.rank == 0:
        with (folder / TRACE).open("w", encoding="utf-8") as whole:
            for rank in range(comm.size):
                with (parts / f"{rank}.jsonl").open(encoding="utf-8") as part:
                    shutil.copyfileobj(part, whole)
        shutil.rmtree(parts)
    comm.barrier()
    return folder / TRACE
