"""Collectives whose ranks share one memory: the identity, and the arithmetic of `ThreadWorld`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpipar.comm.arrays import reduce_rows
from mpipar.comm.base import Communicator
from mpipar.comm.call import Array, Call, CommInfo, Op
from mpipar.comm.request import ENDED, Request
from mpipar.errors import CollectiveMismatch, ParallelismError, rebuild


def mismatch(signatures: Sequence[str]) -> CollectiveMismatch:
    """The error for calls that differ between ranks.

    Parameters
    ----------
    signatures : sequence of str
        One a rank.

    Returns
    -------
    CollectiveMismatch
        Its message groups the ranks by what they called.
    """
    groups: dict[str, list[int]] = {}
    for rank, text in enumerate(signatures):
        groups.setdefault(text, []).append(rank)
    parts = (
        f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: {text}"
        for text, ranks in groups.items()
    )
    return CollectiveMismatch("ranks made different calls: " + "; ".join(parts))


def refusal(errors: Sequence[tuple[int, str, str]], n_ranks: int) -> ParallelismError:
    """The error that every rank raises when some ranks refused their call.

    Parameters
    ----------
    errors : sequence of (rank, class name, message)
        At least one.
    n_ranks : int
        Size of the group.

    Returns
    -------
    ParallelismError
        Of the class that the first of them found, naming ranks where not all agree.
    """
    _, name, message = errors[0]
    if len(errors) < n_ranks or any(e[1:] != errors[0][1:] for e in errors):
        message = "; ".join(f"rank {rank}: {text}" for rank, _, text in errors)
    return rebuild(name, message)


def agree(calls: Sequence[Call]) -> ParallelismError | None:
    """What is wrong with the calls of all ranks taken together.

    Parameters
    ----------
    calls : sequence of Call
        One a rank, in rank order.

    Returns
    -------
    ParallelismError or None
        The error that every rank is to raise.
    """
    errors = [
        (rank, type(call.error).__name__, str(call.error))
        for rank, call in enumerate(calls)
        if call.error is not None
    ]
    if errors:
        return refusal(errors, len(calls))
    signatures = [call.signature for call in calls]
    if any(text != signatures[0] for text in signatures):
        return mismatch(signatures)
    if calls[0].op is Op.ALL_TO_ALL:
        return check_exchange([c.counts or () for c in calls], [c.recv_counts or () for c in calls])
    return None


def check_exchange(
    sends: Sequence[Sequence[int]], recvs: Sequence[Sequence[int]]
) -> CollectiveMismatch | None:
    """Whether what each rank sends is what its peers expect.

    Parameters
    ----------
    sends, recvs : sequence of sequence of int
        Row r is what rank r sends to, and expects from, each rank, in elements.

    Returns
    -------
    CollectiveMismatch or None
        For the first pair of ranks that disagree.
    """
    for source, row in enumerate(sends):
        for dest, count in enumerate(row):
            if recvs[dest][source] != count:
                return CollectiveMismatch(
                    f"all_to_all: rank {source} sends {count} elements to rank {dest}, which "
                    f"expects {recvs[dest][source]}"
                )
    return None


def split_order(rows: Sequence[Any], color: int | None) -> list[int]:
    """Who joins this rank's group in a split, in the order of the new group.

    Parameters
    ----------
    rows : sequence of (color, key, purpose)
        One a rank.
    color : int or None
        Color of this rank.

    Returns
    -------
    list of int
        Ranks of the parent group; none without a color.

    Raises
    ------
    CollectiveMismatch
        If the ranks of one color gave different purposes.
    """
    if color is None:
        return []
    members = sorted((key, rank) for rank, (c, key, _) in enumerate(rows) if c == color)
    purposes = {rows[rank][2] for _, rank in members}
    if len(purposes) > 1:
        raise CollectiveMismatch(f"split: color {color} has the purposes {sorted(purposes)}")
    return [rank for _, rank in members]


def complete(calls: Sequence[Call]) -> None:
    """Carry out one collective over the calls of all ranks, with NumPy, in rank order.

    Parameters
    ----------
    calls : sequence of Call
        One a rank, in rank order, found right by `agree`; their outputs are filled.
    """
    first = calls[0]
    inputs = [c.input for c in calls if c.input is not None]
    if first.op in (Op.ALL_REDUCE, Op.REDUCE, Op.REDUCE_SCATTER):
        _reduce(calls, inputs)
    elif first.op in (Op.ALL_GATHER, Op.GATHER):
        joined = np.concatenate(inputs)
        for rank, call in enumerate(calls):
            if call.output is not None and first.root in (None, rank):
                call.output[...] = joined
    elif first.op is Op.ALL_TO_ALL:
        blocks = [_blocks(c.input, c.counts) for c in calls]
        for rank, call in enumerate(calls):
            if call.output is not None:
                call.output[...] = np.concatenate([row[rank] for row in blocks])
    elif first.op in (Op.BROADCAST, Op.SCATTER):
        root = calls[first.root or 0]
        pieces = [root.input] * len(calls)
        if first.op is Op.SCATTER:
            pieces = list(_blocks(root.input, root.counts))
        for call, piece in zip(calls, pieces, strict=True):
            if call.output is not None and piece is not None and call.output is not piece:
                call.output[...] = piece


def _reduce(calls: Sequence[Call], inputs: Sequence[Array]) -> None:
    first = calls[0]
    op = first.reduce_op
    if op is None or first.output is None:
        return
    if len(calls) == 1 and first.output.dtype == inputs[0].dtype:
        if first.output.ctypes.data != inputs[0].ctypes.data:
            first.output[...] = inputs[0]
        return
    total = np.empty(inputs[0].size, next(c.output.dtype for c in calls if c.output is not None))
    reduce_rows(inputs, op, total)
    blocks = _blocks(total, first.counts) if first.op is Op.REDUCE_SCATTER else [total] * len(calls)
    for rank, (call, block) in enumerate(zip(calls, blocks, strict=True)):
        if call.output is not None and first.root in (None, rank):
            call.output[...] = block


def _blocks(buffer: Array | None, counts: Sequence[int] | None) -> list[Array]:
    if buffer is None or counts is None:
        return []
    return np.split(buffer, np.cumsum(counts)[:-1])


class IdentityCommunicator(Communicator):
    """The group of one rank: every collective returns what it was given.

    Parameters
    ----------
    deterministic : bool
        Default of the verbs' argument of that name.
    """

    def __init__(self, deterministic: bool = False) -> None:
        super().__init__(CommInfo(0, 1), "identity", deterministic)
        self._mail: dict[int, list[Call]] = {}

    def submit(self, call: Call) -> Request:
        """Carry the call out at once.

        Parameters
        ----------
        call : Call
            Any collective; send and recv to rank 0, itself.

        Returns
        -------
        Request
            Ended; a receive ends when its message has been sent.
        """
        if call.error is not None:
            raise call.error
        if call.op in (Op.SEND, Op.RECV):
            return self._pass_on(call)
        complete([call])
        return ENDED

    def _pass_on(self, call: Call) -> Request:
        box = self._mail.setdefault(call.tag, [])
        if call.op is Op.SEND and call.input is not None:
            box.append(Call(Op.SEND, call.input.copy(), agreed=call.agreed))
            return ENDED

        def take() -> bool:
            if not box:
                return False
            sent = box.pop(0)
            check_message(sent, call)
            return True

        return Request(call, take, lambda: ": nothing was sent by rank 0, this rank", 1.0)

    def split(self, color: int | None, key: int = 0, purpose: str = "split") -> Communicator | None:
        """The same single rank again.

        Parameters
        ----------
        color, key, purpose
            As in `Communicator.split`.

        Returns
        -------
        Communicator or None
            A group of one.
        """
        del key, purpose
        return None if color is None else IdentityCommunicator(self.deterministic)


def check_message(sent: Call, received: Call) -> None:
    """Copy a message into the receiver's buffer, or refuse it.

    Parameters
    ----------
    sent, received : Call
        A send and the receive that matches it.

    Raises
    ------
    CollectiveMismatch
        If shape or dtype differ.
    """
    have, want = sent.input, received.output
    if have is None or want is None:
        return
    if have.dtype != want.dtype or sent.agreed != received.agreed:
        raise CollectiveMismatch(
            f"recv expects shape {received.agreed} of {want.dtype.name}, the message has shape "
            f"{sent.agreed} of {have.dtype.name}"
        )
    want[...] = have


def wrong_size(call: Call, got: str) -> CollectiveMismatch:
    """The error for a message of another size.

    Parameters
    ----------
    call : Call
        The receive.
    got : str
        Bytes that came.

    Returns
    -------
    CollectiveMismatch
        Naming both sizes.
    """
    return CollectiveMismatch(
        f"recv from rank {call.peer} tag {call.tag} expects {call.n_bytes} bytes "
        f"(shape {call.agreed} of {call.dtype}), the message has {got}"
    )
