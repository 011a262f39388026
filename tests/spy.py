"""A communicator that counts what its rank sends: the transport's word against the formula's."""

from __future__ import annotations

from collections import Counter

from mpipar.comm import Call, Communicator, Op, Request


class Spy(Communicator):
    """Hands every call on to another communicator and adds up bytes sent, by operation.

    A reduction counts what the best algorithm sends: 2 (n-1)/n of the array for an all-reduce.
    """

    def __init__(self, inner: Communicator, sent: Counter[str] | None = None) -> None:
        super().__init__(inner.info, inner.name, inner.deterministic)
        self.inner = inner
        self.sent: Counter[str] = Counter() if sent is None else sent
        self.calls: Counter[str] = Counter()

    def submit(self, call: Call) -> Request:
        if call.error is None:
            self.sent[str(call.op)] += self._bytes(call)
            self.calls[str(call.op)] += 1
        return self.inner.submit(call)

    def _bytes(self, call: Call) -> int:
        n, me = self.size, self.rank
        given = 0 if call.input is None else call.input.nbytes
        item = 0 if call.dtype is None else call.dtype.itemsize
        counts = call.counts or (0,) * n
        if call.op is Op.ALL_REDUCE:
            assert 2 * (n - 1) * given % n == 0, "choose sizes that divide"
            return 2 * (n - 1) * given // n
        if call.op is Op.ALL_GATHER:
            return (n - 1) * given
        if call.op in (Op.ALL_TO_ALL, Op.REDUCE_SCATTER):
            return (sum(counts) - counts[me]) * item
        if call.op in (Op.SEND, Op.BROADCAST):
            return given
        return 0

    @property
    def n_bytes(self) -> int:
        """Bytes that this rank has sent."""
        return sum(self.sent.values())

    def reset(self) -> None:
        self.sent.clear()
        self.calls.clear()

    def split(self, color, key=0, purpose="split"):
        group = self.inner.split(color, key, purpose)
        return None if group is None else Spy(group, self.sent)

    def empty(self, shape, dtype=float):
        return self.inner.empty(shape, dtype)

    def free(self, array) -> None:
        self.inner.free(array)

    def close(self) -> None:
        self.inner.close()
