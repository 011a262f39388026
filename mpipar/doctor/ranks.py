"""Checks that the ranks of a job make together: do they agree, where do they stand, is it fast?"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from mpipar._version import version as own_version
from mpipar.comm import Communicator
from mpipar.comm.placement import places
from mpipar.comm.traced import clock_offsets
from mpipar.doctor.check import Check, Status
from mpipar.doctor.devices import check_ways
from mpipar.launch.environment import detect
from mpipar.launch.place import Place, place_problems
from mpipar.topology.discover import ranks_by_node

_PINGS = 20
_MIB = 1 << 20


@dataclass(frozen=True)
class LinkExpectation:
    """What two ranks should reach.

    Parameters
    ----------
    latency_s : float
        Longest half round trip of 8 bytes.
    bytes_per_s : float
        Least bandwidth of 4 MiB, one way.
    """

    latency_s: float
    bytes_per_s: float


IN_NODE = LinkExpectation(50e-6, 1e9)
ETHERNET = LinkExpectation(200e-6, 1e8)  # what a plain 1 Gbit/s network gives


def expectation(is_one_node: bool, card_bits_per_s: float) -> LinkExpectation:
    """What the link between two ranks should reach.

    Parameters
    ----------
    is_one_node : bool
        Whether they share memory.
    card_bits_per_s : float
        Rate of the node's fastest network card, 0 where unknown.

    Returns
    -------
    LinkExpectation
        Half of the card's rate: one pair of ranks and no tuning.
    """
    if is_one_node:
        return IN_NODE
    return LinkExpectation(20e-6, card_bits_per_s / 16) if card_bits_per_s else ETHERNET


def card_rate(root: Path = Path("/sys")) -> float:
    """Bits a second of the fastest InfiniBand card that is up, 0 without one.

    Parameters
    ----------
    root : Path
        Where sysfs is mounted.

    Returns
    -------
    float
        From ``ports/*/rate``, such as "100 Gb/sec (4X EDR)".
    """
    rates = [0.0]
    for port in (root / "class/infiniband").glob("*/ports/*"):
        state, rate = port / "state", port / "rate"
        if rate.is_file() and (not state.is_file() or "ACTIVE" in state.read_text()):
            rates.append(float(rate.read_text().split()[0]) * 1e9)
    return max(rates)


def check_ranks(comm: Communicator, folder: Path) -> list[Check]:
    """Every check that the ranks make together. Collective.

    Parameters
    ----------
    comm : Communicator
        All ranks, from `init`.
    folder : Path
        Where run folders are to be made.

    Returns
    -------
    list of Check
        The same on every rank.
    """
    found = places(comm)
    checks = [
        _world(comm),
        _agreement(comm),
        *_places(found),
        _sum(comm, found),
        _folder(comm, folder),
        _clocks(comm),
        check_ways(comm),
        *_links(comm, found),
    ]
    values: list[dict[str, Any]] = comm.broadcast_json([check.to_json() for check in checks])
    return [Check(**{**value, "status": Status(value["status"])}) for value in values]


def _world(comm: Communicator) -> Check:
    launched = detect(os.environ)
    facts = {"size": comm.size, "announced": launched.size if launched else 1}
    if launched is not None and launched.size not in (None, comm.size):
        reason = f"{comm.size} ranks, but {launched.variable} says {launched.size}"
        return Check("world size", Status.FAIL, reason, "start all ranks by one launcher", facts)
    reason = f"{comm.size} ranks, as announced; MPI_THREAD_MULTIPLE, else MPI is refused"
    return Check("world size", Status.OK, reason, facts=facts)


def _agreement(comm: Communicator) -> Check:
    """Same versions everywhere: an old environment on one node is a classic."""
    mine = {"mpipar": own_version, "numpy": version("numpy"), "mpi4py": version("mpi4py")}
    told: Sequence[Mapping[str, str]] = comm.all_gather_json(mine)
    odd = {rank: other for rank, other in enumerate(told) if other != told[0]}
    if odd:
        rank, other = next(iter(odd.items()))
        reason = f"{len(odd)} ranks differ from rank 0, which has {dict(told[0])}; rank {rank} has "
        reason, fix = f"{reason}{dict(other)}", "use one environment on all nodes"
        return Check("same versions", Status.FAIL, reason, fix, {"ranks_that_differ": len(odd)})
    return Check("same versions", Status.OK, "on every rank")


def _places(found: Sequence[Place]) -> Iterator[Check]:
    n_nodes = len({place.node for place in found})
    problems = place_problems(found)
    fix = "give each rank its own cores and GPU: see the table of `mpipar train --places`"
    facts = {"nodes": n_nodes, "problems": len(problems)}
    yield Check("places", Status.WARN if problems else Status.OK,
                "; ".join(problems) or f"{len(found)} ranks on {n_nodes} nodes, no device shared",
                fix if problems else "", facts)  # fmt: skip


def _sum(comm: Communicator, found: Sequence[Place]) -> Check:
    """A sum over all nodes against its closed form."""
    n = comm.size
    total = comm.all_reduce(np.arange(1000, dtype=np.float64) + comm.rank)
    right = n * np.arange(1000) + n * (n - 1) / 2
    if not np.array_equal(total, right):
        return Check("all-reduce", Status.FAIL, "the sum over the ranks is wrong",
                     "set MPIPAR_CHECK=1 and tell us")  # fmt: skip
    return Check("all-reduce", Status.OK, f"right over {len({p.node for p in found})} nodes")


def _folder(comm: Communicator, folder: Path) -> Check:
    """A file of rank 0 that every rank must see: the folder is on a shared file system."""
    place = Path(comm.broadcast_json(str(folder.resolve())))
    probe, error = place / f".mpipar-doctor-{comm.broadcast_json(os.getpid())}", ""
    if comm.rank == 0:
        try:
            probe.write_text("seen")
        except OSError as problem:
            error = str(problem.strerror)
    error = comm.broadcast_json(error)
    sees = comm.all_gather_json(probe.exists())
    comm.barrier()
    if comm.rank == 0:
        probe.unlink(missing_ok=True)
    if error:
        return Check("shared folder", Status.FAIL, f"{place} cannot be written: {error}",
                     "choose another with --run FOLDER")  # fmt: skip
    blind = [rank for rank, is_seen in enumerate(sees) if not is_seen]
    if blind:
        return Check("shared folder", Status.FAIL, f"{place} of rank 0 is not that of ranks "
                     f"{', '.join(map(str, blind))}", "run in a folder that all nodes share",
                     {"ranks_without": len(blind)})  # fmt: skip
    return Check("shared folder", Status.OK, f"{place} is the same for all ranks")


def _clocks(comm: Communicator) -> Check:
    """Offset of each rank's clock from rank 0's."""
    offsets = clock_offsets(comm, time.time)
    worst = max(abs(offset) for offset in offsets)
    facts = {"largest_offset_s": round(worst, 6)}
    if worst > 1.0:
        return Check("clocks", Status.WARN, f"they differ by up to {worst:.1f} s",
                     "times of different nodes cannot be compared in logs and traces; check NTP",
                     facts)  # fmt: skip
    return Check("clocks", Status.OK, f"within {worst * 1e3:.2f} ms of rank 0's", facts=facts)


def _links(comm: Communicator, found: Sequence[Place]) -> Iterator[Check]:
    """Rank 0 against a rank of its node, and against the first rank of another."""
    nodes = list(ranks_by_node([place.node for place in found]).values())
    pairs = {"link in a node": nodes[0][1] if len(nodes[0]) > 1 else None,
             "link between nodes": nodes[1][0] if len(nodes) > 1 else None}  # fmt: skip
    for name, peer in pairs.items():
        if peer is None:
            yield Check(name, Status.NOT_APPLICABLE, "no such pair of ranks in this job")
            continue
        latency_s = _ping(comm, peer, 8, _PINGS)
        rate = 4 * _MIB / max(_ping(comm, peer, 4 * _MIB, 5), 1e-9)
        wanted = expectation(name == "link in a node", card_rate())
        yield judge_link(name, latency_s, rate, wanted)


def judge_link(name: str, latency_s: float, bytes_per_s: float, wanted: LinkExpectation) -> Check:
    """Compare a measured link with what it should reach.

    Parameters
    ----------
    name : str
        Of the link.
    latency_s, bytes_per_s : float
        As measured.
    wanted : LinkExpectation
        What it should reach.

    Returns
    -------
    Check
        A warning where it falls short.
    """
    reason = f"{latency_s * 1e6:.1f} us, {bytes_per_s / 1e9:.2f} GB/s"
    facts = {"latency_us": round(latency_s * 1e6, 2), "gb_per_s": round(bytes_per_s / 1e9, 3)}
    if latency_s <= wanted.latency_s and bytes_per_s >= wanted.bytes_per_s:
        return Check(name, Status.OK, reason, facts=facts)
    return Check(name, Status.WARN, f"{reason}; expected at most {wanted.latency_s * 1e6:.0f} us "
                 f"and at least {wanted.bytes_per_s / 1e9:.2f} GB/s",
                 "more ranks than cores, or the MPI does not use the fast network (`ucx_info -d`, "
                 "`fi_info`)", facts)  # fmt: skip


def _ping(comm: Communicator, peer: int, n_bytes: int, n_times: int) -> float:
    """Half of the fastest round trip between rank 0 and a peer; 0 on other ranks."""
    data, best = np.zeros(n_bytes, np.uint8), float("inf")
    first, second = _turns(comm, data, peer if comm.rank == 0 else 0)
    for _ in range(n_times):
        start = time.perf_counter()
        if comm.rank == 0:
            first(), second()
        elif comm.rank == peer:
            second(), first()
        best = min(best, time.perf_counter() - start)
    return best / 2


def _turns(
    comm: Communicator, data: Any, other: int
) -> tuple[Callable[[], object], Callable[[], object]]:
    return lambda: comm.send(data, other), lambda: comm.recv(data, other)
