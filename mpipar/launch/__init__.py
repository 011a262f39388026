"""Launching: which launcher, which MPI library, what the ranks need, one supervised job.

`environment` is pure; `library` and `launcher` start short child processes; `job` runs one.
MPI never starts in this process.
"""

from mpipar.launch.environment import (
    Launched,
    LibraryName,
    check_before_start,
    check_launch,
    detect,
    identify_library,
    local_rank,
)

__all__ = [
    "Launched",
    "LibraryName",
    "check_before_start",
    "check_launch",
    "detect",
    "identify_library",
    "local_rank",
]
