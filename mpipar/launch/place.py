"""Where a rank stands: node, cores, NUMA domain, GPU and network card; and what is wrong there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from mpipar.launch.devices import DeviceChoice, shared_devices


@dataclass(frozen=True)
class Place:
    """Where one rank stands.

    Parameters
    ----------
    rank : int
        World rank.
    node : str
        Host name.
    cpus : tuple of int
        CPUs that it may run on: mask and control group, after binding.
    cores : tuple of int
        Their cores, each by its first hardware thread.
    numa : tuple of int
        NUMA domains that the CPUs touch.
    device : DeviceChoice or None
        Its GPU.
    device_numa : int or None
        The GPU's NUMA domain.
    nic : str
        The network card nearest to the GPU.
    n_threads : int
        Threads of its array library.
    """

    rank: int
    node: str
    cpus: tuple[int, ...]
    cores: tuple[int, ...]
    numa: tuple[int, ...]
    device: DeviceChoice | None = None
    device_numa: int | None = None
    nic: str = ""
    n_threads: int = 1

    def to_json(self) -> dict[str, Any]:
        """The same as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Place:
        """What `to_json` gave.

        Parameters
        ----------
        values : mapping
            JSON values.

        Returns
        -------
        Place
            Equal to the one that was written.
        """
        device = values["device"] and DeviceChoice(**values["device"])
        lists = {key: tuple(values[key]) for key in ("cpus", "cores", "numa")}
        return cls(**{**values, **lists, "device": device})


def cpu_text(cpus: Sequence[int]) -> str:
    """CPU numbers as the kernel writes them: ``0-3,8``.

    Parameters
    ----------
    cpus : sequence of int
        Ascending.

    Returns
    -------
    str
        Empty for none.
    """
    runs: list[list[int]] = []
    for cpu in cpus:
        if runs and runs[-1][-1] == cpu - 1:
            runs[-1].append(cpu)
        else:
            runs.append([cpu])
    return ",".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else str(r[0]) for r in runs)


def place_table(places: Sequence[Place]) -> str:
    """A table of ranks: node, cores, NUMA, threads, GPU, network card.

    Parameters
    ----------
    places : sequence of Place
        Of every rank.

    Returns
    -------
    str
        One line a rank below a header.
    """
    rows = [("rank", "node", "cpus", "numa", "threads", "gpu", "gpu id", "gpu numa", "nic")]
    for p in places:
        device, numa = p.device, ",".join(map(str, p.numa))
        gpu = ("-", "-") if device is None else (
            f"{device.index} of {device.n_visible}", device.device_id or f"number {device.entry}"
        )  # fmt: skip
        near = "-" if p.device_numa is None else str(p.device_numa)
        rows.append((str(p.rank), p.node, cpu_text(p.cpus), numa, str(p.n_threads), *gpu, near,
                     p.nic or "-"))  # fmt: skip
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in rows]
    return "\n".join(lines)


def place_problems(places: Sequence[Place]) -> list[str]:
    """Devices shared by accident, ranks far from their device, more threads than cores.

    Parameters
    ----------
    places : sequence of Place
        Of every rank.

    Returns
    -------
    list of str
        Sentences; empty if all is well.
    """
    problems = shared_devices((p.rank, p.node, p.device) for p in places)
    for p in places:
        if p.device_numa is not None and p.numa and p.device_numa not in p.numa:
            problems.append(
                f"rank {p.rank} on {p.node} runs on NUMA {','.join(map(str, p.numa))}, its GPU "
                f"sits at NUMA {p.device_numa}"
            )
    for node in dict.fromkeys(p.node for p in places):
        mine = [p for p in places if p.node == node]
        threads, cores = sum(p.n_threads for p in mine), {c for p in mine for c in p.cores}
        if threads > len(cores):
            problems.append(
                f"{len(mine)} ranks with {threads} threads run on {len(cores)} cores of {node}"
            )
    return problems


def with_rank(place: Place, rank: int, n_threads: int) -> Place:
    """The place of a process once MPI has told its rank.

    Parameters
    ----------
    place : Place
        From `prepare`.
    rank, n_threads : int
        World rank; threads of its array library.

    Returns
    -------
    Place
        With both.
    """
    return replace(place, rank=rank, n_threads=n_threads)
