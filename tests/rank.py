"""One rank of the MPI tests: ``mpipar run -n N -- python -m tests.rank FOLDER PYTEST-ARGUMENTS``.

Each rank writes its own report into FOLDER; only rank 0 talks, and the others if they fail.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from mpipar.launch.environment import detect


def main(folder: str, arguments: list[str]) -> int:
    """Run pytest on this rank."""
    launched = detect(os.environ)
    rank = launched.rank if launched is not None else 0
    options = ["--with-mpi", "-q", "-p", "no:cacheprovider", f"--junitxml={folder}/rank{rank}.xml"]
    options.append(f"--basetemp={folder}/tmp{rank}")  # ranks would clear each other's folders
    talk = Path(folder, f"rank{rank}.txt")
    if rank:
        os.dup2(os.open(talk, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), sys.stdout.fileno())
    code = int(pytest.main([*options, *arguments]))
    sys.stdout.flush()
    if rank and code:
        lines = talk.read_text(errors="replace").splitlines()
        sys.stderr.write("".join(f"[rank {rank}] {line}\n" for line in lines))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
