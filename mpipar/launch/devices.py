"""Which GPU a rank takes, before MPI starts. Pure functions of the environment and of text.

The visible-device variables may be unset (all devices), empty (none), or hold numbers, UUIDs or
MIG ids; the numbers are the node's or the task's own, as the site's cgroups decide. So entries are
kept as text: a rank takes a *position* in the list, and only a driver's ids tell devices apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

VISIBLE_VARIABLES: Final = (
    "CUDA_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
)
_ENDS: Final = ("", "-1", "nodevfiles", "none", "void")  # the vendors' words for "no more"


@dataclass(frozen=True)
class VisibleDevices:
    """What the environment lets a process see.

    Parameters
    ----------
    variable : str
        The variable that says so, "" where none is set.
    entries : tuple of str or None
        Entries as they stand; None where every device of the node is visible.
    """

    variable: str
    entries: tuple[str, ...] | None

    def __str__(self) -> str:
        if self.entries is None:
            return "all (no variable set)"
        return f"{','.join(self.entries) or 'none'} ({self.variable})"


@dataclass(frozen=True)
class DeviceChoice:
    """The device of one rank.

    Parameters
    ----------
    index : int
        Position among the visible devices: what ``cudaSetDevice`` takes.
    n_visible : int
        How many are visible.
    entry : str
        Its entry in the variable, or its number on the node.
    device_id : str
        UUID or PCI bus id; "" where nothing but a number is known.
    """

    index: int
    n_visible: int
    entry: str
    device_id: str = ""


def read_visible(environment: Mapping[str, str]) -> VisibleDevices:
    """Read the first visible-device variable that is set.

    Parameters
    ----------
    environment : mapping of str to str
        Such as ``os.environ``.

    Returns
    -------
    VisibleDevices
        As CUDA does it, the list ends at the first entry that means "none".
    """
    for variable in VISIBLE_VARIABLES:
        if variable in environment:
            entries: list[str] = []
            for word in environment[variable].split(","):
                if word.strip().lower() in _ENDS:
                    break
                entries.append(word.strip())
            return VisibleDevices(variable, tuple(entries))
    return VisibleDevices("", None)


def choose_device(
    visible: VisibleDevices, local_rank: int | None, node_ids: Sequence[str] = ()
) -> DeviceChoice | None:
    """The device of a rank: the only visible one, or local rank modulo their number.

    Parameters
    ----------
    visible : VisibleDevices
        From `read_visible`.
    local_rank : int or None
        Rank on the node; None counts as 0.
    node_ids : sequence of str
        UUID or bus id of each device that the driver shows to this process, in bus order; empty
        without a driver.

    Returns
    -------
    DeviceChoice or None
        None where no device is visible, or every one is and no driver tells how many.
    """
    entries = visible.entries
    if entries is None:
        entries = tuple(str(i) for i in range(len(node_ids)))
    if not entries:
        return None
    index = 0 if len(entries) == 1 else (local_rank or 0) % len(entries)
    return DeviceChoice(index, len(entries), entries[index], _id_of(entries[index], node_ids))


def _id_of(entry: str, node_ids: Sequence[str]) -> str:
    """Id of an entry: its own text unless that is a number, which only the driver can resolve."""
    if not entry.isdecimal():
        whole = [known for known in node_ids if known.startswith(entry)]  # CUDA takes beginnings
        return whole[0] if len(whole) == 1 else entry
    return node_ids[int(entry)] if int(entry) < len(node_ids) else ""


def shared_devices(claims: Iterable[tuple[int, str, DeviceChoice | None]]) -> list[str]:
    """Name the ranks that have taken the same device.

    Parameters
    ----------
    claims : iterable of tuple
        Rank, node and choice of every rank.

    Returns
    -------
    list of str
        One sentence for each shared device; empty if every rank has its own.
    """
    owners: dict[tuple[str, str], list[int]] = {}
    for rank, node, choice in claims:
        if choice is not None:
            owners.setdefault((node, choice.device_id or f"number {choice.entry}"), []).append(rank)
    return [
        f"ranks {', '.join(map(str, ranks))} on {node} share one device ({device})"
        for (node, device), ranks in owners.items()
        if len(ranks) > 1
    ]
