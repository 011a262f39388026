"""Node memory among the ranks of a `ThreadWorld`: tests run on the fast paths themselves."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mpipar.comm.base import Communicator
from mpipar.comm.call import Call
from mpipar.comm.hierarchy import placed
from mpipar.comm.node.arena import Arena
from mpipar.comm.node.flags import Fence
from mpipar.comm.node.host import Group, Movable
from mpipar.comm.node.memory import Memory
from mpipar.comm.node.paths import Paths
from mpipar.comm.node.process_memory import probe
from mpipar.comm.request import Request

if TYPE_CHECKING:
    from mpipar.comm.threads.world import ThreadCommunicator


class ThreadHost:
    """What one thread knows of its simulated node; see `node_host.Host`.

    Parameters
    ----------
    memory : Memory
        Of the node.
    index : int
        Which region is this rank's.
    """

    turns = True
    n_spins = 0
    fence: Fence | None = None

    def __init__(self, memory: Memory, index: int) -> None:
        self.arena = Arena(memory, index)
        self.pending: list[Movable] = []

    def process_ids(self, inner: Any) -> Sequence[int] | None:
        """This process, once a rank, where the kernel copies within it."""
        word = np.array([3], "q")
        if not probe(os.getpid(), word.__array_interface__["data"][0], 3):
            return None
        return [os.getpid()] * int(inner.size)

    def adopt(self, group: Group) -> None:
        """Nothing is kept of a group."""

    def arriving(self, group: Group, call: Call) -> None:
        """Let the world put others first, or plant a fault."""
        group.inner.arriving(call)

    def rest(self, group: Group) -> None:
        """Hand on once."""
        group.inner.rest()

    def block(self, group: Group, call: Call, ready: Callable[[], bool]) -> None:
        """Hand on until `ready()`; calls under way on other groups go on meanwhile.

        Parameters
        ----------
        group : Group
            On which is waited.
        call : Call
            What is waited for.
        ready : callable
            Without effects.
        """

        def able() -> bool:
            return ready() or any(g.calls.can_go_on for g in self.pending if g is not group)

        while not ready():
            group.inner.wait_until(call, able)
            for other in list(self.pending):
                if other is not group and not ready():
                    other.progress()

    def finish(self, group: Group, request: Request) -> None:
        """Wait for a request of the transport.

        Parameters
        ----------
        group : Group
            On which is waited.
        request : Request
            Of its transport.
        """
        while self.pending and not request.test():
            for other in list(self.pending):
                other.progress()
        request.wait()


def over_nodes(
    world: ThreadCommunicator, memories: Sequence[Memory], node_size: int
) -> Communicator:
    """The world of one thread, through the memory of simulated nodes. Collective.

    Parameters
    ----------
    world : ThreadCommunicator
        Plain.
    memories : sequence of Memory
        One a node, shared by all threads.
    node_size : int
        Ranks on a node.

    Returns
    -------
    Communicator
        Whose large calls go through node memory.
    """
    memory = memories[world.rank // node_size]
    host = ThreadHost(memory, world.rank % node_size)
    nodes = [rank // node_size for rank in world.ranks]
    return placed(world, host, nodes, Paths.from_environment(node_size))
