"""Clusters as TOML files: read, written, and found by name."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpipar.errors import LayoutError
from mpipar.topology.cluster import Cluster, Figure, NodeClass, Origin, Tier
from mpipar.topology.link import DeviceKind
from mpipar.topology.presets import PRESETS


def cluster_from_toml(text: str) -> Cluster:
    """Read a cluster from TOML: a name, `[[nodes]]` and `[[tiers]]`.

    Parameters
    ----------
    text : str
        A figure is a plain number (then its origin is `given`) or
        ``[number, "measured" | "given" | "published" | "assumed", "source"]``.

    Returns
    -------
    Cluster
        Checked.

    Raises
    ------
    LayoutError
        If a key is unknown or missing, or the sizes do not fit.
    """
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise LayoutError(f"cluster file is not TOML: {error}") from error
    nodes = tuple(_read(NodeClass, part) for part in document.pop("nodes", []))
    tiers = tuple(_read(Tier, part) for part in document.pop("tiers", []))
    name = document.pop("name", "cluster")
    if document:
        raise LayoutError(f"cluster file: {next(iter(document))!r} is none of name, nodes, tiers")
    return Cluster(name, nodes, tiers)


def _read(kind: type[Any], part: Mapping[str, Any]) -> Any:
    known = kind.__dataclass_fields__
    unknown = [key for key in part if key not in known]
    needed = [k for k in known if k not in part and k not in ("efficiency", "kind")]
    if unknown or needed:
        fault = f"{unknown[0]!r} is unknown" if unknown else f"{needed[0]!r} is missing"
        raise LayoutError(f"cluster file, {kind.__name__}: {fault}; keys are {', '.join(known)}")
    values: dict[str, Any] = {"kind": DeviceKind.OTHER} if kind is NodeClass else {}
    for key, value in part.items():
        if "Figure" in known[key].type:
            number, origin, source = (
                (*value, "", "")[:3] if isinstance(value, list) else (value, "", "")
            )
            values[key] = Figure(float(number), Origin(origin or "given"), source)
        else:
            values[key] = DeviceKind(value) if key == "kind" else value
    return kind(**values)


def cluster_to_toml(cluster: Cluster) -> str:
    """Write a cluster as TOML that `cluster_from_toml` reads back to an equal value.

    Parameters
    ----------
    cluster : Cluster
        Any.

    Returns
    -------
    str
        One figure a line with its origin.
    """
    lines = [f"name = {_toml(cluster.name)}"]
    for title, parts in (("nodes", cluster.nodes), ("tiers", cluster.tiers)):
        for part in parts:
            lines += ["", f"[[{title}]]", *(f"{k} = {_toml(v)}" for k, v in vars(part).items())]
    return "\n".join(lines) + "\n"


def _toml(value: object) -> str:
    if isinstance(value, Figure):
        return f'[{value.value!r}, "{value.origin}", {_toml(value.source)}]'
    if isinstance(value, str):
        escaped = str(value).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        return f'"{escaped}"'
    return repr(value)


def load_cluster(where: str | Path) -> Cluster:
    """A preset by its name, else a TOML file.

    Parameters
    ----------
    where : str or Path
        Name or file.

    Returns
    -------
    Cluster
        The machine.

    Raises
    ------
    LayoutError
        If it is neither; the message lists the presets.
    """
    if str(where) in PRESETS:
        return PRESETS[str(where)]
    if not Path(where).is_file():
        raise LayoutError(
            f"cluster {str(where)!r} is neither a file nor a preset; presets: {', '.join(PRESETS)}"
        )
    return cluster_from_toml(Path(where).read_text())
