"""What Slurm says of the network: node lists, `topology.conf`, a job's environment.

Everything is a function of text or of a mapping, so that it works on recorded examples.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from mpipar.errors import LayoutError


def expand_hosts(text: str) -> tuple[str, ...]:
    """Expand a compressed host list such as ``"a[01-03,7],b[0-1]c[0-1],d"``.

    Parameters
    ----------
    text : str
        Slurm's grammar: ranges with padding, several brackets in one name, commas.

    Returns
    -------
    tuple of str
        Host names in the order written.

    Raises
    ------
    LayoutError
        If brackets do not close or a range runs backwards.
    """
    if re.search(r"\[[^\]]*(\[|$)", text) or text.count("[") != text.count("]"):
        raise LayoutError(f"host list {text!r}: every [ needs its ]")
    hosts: list[str] = []
    for word in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text.replace(" ", "")):
        names = [""]
        for plain, ranges in re.findall(r"([^\[]+)|\[([^\]]*)\]", word):
            ends = _numbers(ranges, text) if ranges else [plain]
            names = [name + end for name in names for end in ends]
        hosts += names
    return tuple(hosts)


def _numbers(ranges: str, text: str) -> list[str]:
    numbers: list[str] = []
    for part in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if not match or int(match[2] or match[1]) < int(match[1]):
            raise LayoutError(f"host list {text!r}: {part!r} is not a number or a rising range")
        low, high = match[1], match[2] or match[1]
        numbers += [str(n).zfill(len(low)) for n in range(int(low), int(high) + 1)]
    return numbers


@dataclass(frozen=True)
class SwitchTree:
    """Switches and what hangs on them.

    Parameters
    ----------
    switches : mapping of str to tuple of str
        Children of each switch that joins switches.
    nodes : mapping of str to tuple of str
        Nodes of each leaf switch.
    """

    switches: Mapping[str, tuple[str, ...]]
    nodes: Mapping[str, tuple[str, ...]]

    def parent(self, name: str) -> str | None:
        """The switch above a switch or a node, None at the top."""
        above = {c: p for p, children in self.switches.items() for c in children}
        above |= {n: p for p, nodes in self.nodes.items() for n in nodes}
        return above.get(name)

    def route(self, node: str) -> tuple[str, ...]:
        """Switches from the one above a node up to the top."""
        found: list[str] = []
        above = self.parent(node)
        while above is not None:
            if above in found:
                raise LayoutError(f"switch {above} stands above itself")
            found.append(above)
            above = self.parent(above)
        return tuple(found)

    def level_sizes(self) -> tuple[int, ...]:
        """Nodes that one switch joins, by level from the leaves up; the largest of each level."""
        levels: dict[int, dict[str, int]] = {}
        for nodes in self.nodes.values():
            for node in nodes:
                for level, switch in enumerate(self.route(node)):
                    at = levels.setdefault(level, {})
                    at[switch] = at.get(switch, 0) + 1
        return tuple(max(levels[level].values()) for level in sorted(levels))


def parse_topology_conf(text: str) -> SwitchTree:
    """Read Slurm's `topology.conf` (tree plugin).

    Parameters
    ----------
    text : str
        Lines of ``SwitchName=... Nodes=...`` or ``Switches=...``; comments and `LinkSpeed` pass.

    Returns
    -------
    SwitchTree
        Switches and nodes by name.

    Raises
    ------
    LayoutError
        If a line has no switch name, or neither nodes nor switches.
    """
    switches: dict[str, tuple[str, ...]] = {}
    nodes: dict[str, tuple[str, ...]] = {}
    joined = re.sub(r"\\\n", " ", text)
    for number, line in enumerate(joined.splitlines(), 1):
        fields = {k.lower(): v for k, v in re.findall(r"(\w+)=(\S+)", line.split("#")[0])}
        if not fields:
            continue
        if "switchname" not in fields or not fields.keys() & {"nodes", "switches"}:
            raise LayoutError(
                f"topology.conf line {number}: SwitchName with Nodes or Switches is expected, "
                f"found {line.strip()!r}"
            )
        for key, table in (("nodes", nodes), ("switches", switches)):
            if key in fields:
                table[fields["switchname"]] = expand_hosts(fields[key])
    return SwitchTree(switches, nodes)


@dataclass(frozen=True)
class SlurmJob:
    """A job as its environment tells it.

    Parameters
    ----------
    nodes : tuple of str
        Host names, of all groups of a heterogeneous job in order.
    tasks_per_node : tuple of int
        Tasks on each node, () when not told.
    switches : tuple of str
        Switches above this node, from the leaf up, () when Slurm does not tell.
    gpus_on_node : int or None
        GPUs of this node that the job was given.
    """

    nodes: tuple[str, ...]
    tasks_per_node: tuple[int, ...] = ()
    switches: tuple[str, ...] = ()
    gpus_on_node: int | None = None


def job_from_environment(environment: Mapping[str, str]) -> SlurmJob | None:
    """What the environment of a Slurm task says of its job; None outside Slurm.

    Parameters
    ----------
    environment : mapping of str to str
        Such as `os.environ`.

    Returns
    -------
    SlurmJob or None
        None when no node list is there.
    """
    n_groups = int(environment.get("SLURM_HET_SIZE", "0"))
    suffixes = [f"_HET_GROUP_{i}" for i in range(n_groups)] or [""]
    lists = [environment.get(f"SLURM_JOB_NODELIST{s}", "") for s in suffixes]
    if not any(lists):
        return None
    tasks = ",".join(filter(None, (environment.get(f"SLURM_TASKS_PER_NODE{s}") for s in suffixes)))
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks):
        counts += [int(count)] * int(times or 1)
    address = environment.get("SLURM_TOPOLOGY_ADDR", "").split(".")
    pattern = environment.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").split(".")
    above = [a for a, kind in zip(address, pattern, strict=False) if kind == "switch"]
    gpus = environment.get("SLURM_GPUS_ON_NODE", "")
    return SlurmJob(
        tuple(host for text in lists for host in expand_hosts(text)),
        tuple(counts),
        tuple(reversed(above)),
        int(gpus) if gpus.isdigit() else None,
    )
