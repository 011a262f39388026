"""Checked mode: ranks compare what they call before any byte of it is moved."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

import numpy as np
from mpi4py import MPI

from mpipar.comm.call import Array, Call, Op
from mpipar.comm.local import check_exchange, mismatch, refusal
from mpipar.comm.mpi.engine import Engine, Program, each
from mpipar.errors import CollectiveMismatch, ParallelismError

_RECORD = 32
_HEADER = 256


def preflight(engine: Engine, call: Call) -> Program:
    """Compare a collective call with those of all ranks.

    Parameters
    ----------
    engine : Engine
        Of the group.
    call : Call
        This rank's call.

    Yields
    ------
    MPI.Request
        One all-gather of 32 bytes; another of the texts where they differ.

    Raises
    ------
    ParallelismError
        The same on every rank: what some rank refused, or how the calls differ.
    """
    text = _text(call)
    mine = np.zeros(_RECORD, np.uint8)
    mine[:16] = np.frombuffer(hashlib.blake2b(text, digest_size=16).digest(), np.uint8)
    mine[16] = call.error is not None
    mine[24:].view(np.int64)[0] = len(text)
    rows = np.empty((engine.size, _RECORD), np.uint8)
    yield engine.comm.Iallgather(mine, rows)
    if rows[:, 16].any() or (rows[:, :16] != mine[:16]).any():
        sizes = rows[:, 24:].copy().view(np.int64).reshape(-1).tolist()
        joined = np.empty(sum(sizes), np.uint8)
        yield engine.comm.Iallgatherv(
            np.frombuffer(text, np.uint8), [joined, sizes, None, MPI.BYTE]
        )
        stops = np.cumsum(sizes).tolist()
        texts = [bytes(joined[b - s : b]).decode() for b, s in zip(stops, sizes, strict=True)]
        raise _verdict(texts, rows[:, 16].astype(bool).tolist())
    if call.op is Op.ALL_TO_ALL and not call.uniform:
        sends = np.array(call.counts, np.int64)
        matrix = np.empty((2, engine.size, engine.size), np.int64)
        yield engine.comm.Iallgather(sends, matrix[0])
        yield engine.comm.Iallgather(np.array(call.recv_counts, np.int64), matrix[1])
        wrong = check_exchange(matrix[0].tolist(), matrix[1].tolist())
        if wrong is not None:
            raise wrong


def _text(call: Call) -> bytes:
    if call.error is not None:
        return json.dumps([type(call.error).__name__, str(call.error)]).encode()
    return call.signature.encode()


def _verdict(texts: Sequence[str], refused: Sequence[bool]) -> ParallelismError:
    errors = [
        (rank, *json.loads(text))
        for rank, (text, bad) in enumerate(zip(texts, refused, strict=True))
        if bad
    ]
    return refusal(errors, len(texts)) if errors else mismatch(texts)


def send_header(engine: Engine, call: Call) -> Program:
    """Send shape and dtype ahead of a message.

    Parameters
    ----------
    engine : Engine
        Of the group.
    call : Call
        The send.

    Yields
    ------
    MPI.Request
        One message of 256 bytes.
    """
    yield engine.comm.Isend(_described(call), call.peer, call.tag)


def receive_header(engine: Engine, call: Call) -> Program:
    """Compare what comes with what is expected; a message that does not fit is taken and dropped.

    Parameters
    ----------
    engine : Engine
        Of the group.
    call : Call
        The receive.

    Yields
    ------
    MPI.Request
        The header, and the message if it is dropped.

    Raises
    ------
    CollectiveMismatch
        If shape or dtype differ; later messages are not affected.
    """
    header = np.empty(_HEADER, np.uint8)
    yield engine.comm.Irecv(header, call.peer, call.tag)
    sent = bytes(header).rstrip(b"\0")
    wanted = bytes(_described(call)).rstrip(b"\0")
    if sent == wanted:
        return
    shape, dtype, n_bytes = json.loads(sent)
    scratch = np.empty(n_bytes, np.uint8)
    parts = engine.pieces(scratch)
    yield from each([engine.comm.Irecv(part, call.peer, call.tag) for part in parts])
    raise CollectiveMismatch(
        f"recv from rank {call.peer} tag {call.tag} expects shape {call.agreed} of {call.dtype}, "
        f"the message has shape {shape} of {dtype}"
    )


def _described(call: Call) -> Array:
    text = json.dumps([call.agreed, str(call.dtype), call.n_bytes]).encode()
    header = np.zeros(_HEADER, np.uint8)
    header[: min(len(text), _HEADER)] = np.frombuffer(text[:_HEADER], np.uint8)
    return header
