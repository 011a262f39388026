"""Slurm scripts of a training run, as text. The files in ``jobs/`` are what this module writes.

Options of Slurm that hide a rank's peers from it (``--gpus-per-task``, ``--gpu-bind``) are never
used: they break copies between the GPUs of a node. Every rank sees all of its node's, and
the library chooses.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Final, Literal

from mpipar.errors import LaunchError

_TIME: Final = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")


@dataclass(frozen=True)
class JobRequest:
    """What a job script asks for.

    Parameters
    ----------
    recipe : str
        Path of the recipe; the script's first argument replaces it.
    n_nodes, ranks_per_node : int
        Nodes, and ranks on each.
    gpus_per_node : int
        0 for a job on CPUs.
    cpus_per_task : int
        Cores of a rank.
    time : str
        Time limit in Slurm's words: ``30`` (minutes), ``02:00:00``, ``1-12``.
    launcher : {"srun", "mpirun"}
        What starts the ranks; ``mpirun`` by way of `mpipar run`.
    slurm_mpi : str
        Plugin of ``srun``: ``pmix`` for Open MPI, ``pmi2`` for MPICH.
    signal_s : int
        Seconds before the limit at which the run is told to write its checkpoint.
    n_pieces : int
        Above 0: an array of so many pieces, one after the other, instead of requeueing.
    options : tuple of str
        Further ``#SBATCH`` lines, such as ``--partition=gpu``.
    """

    recipe: str = "recipe.toml"
    n_nodes: int = 2
    ranks_per_node: int = 4
    gpus_per_node: int = 4
    cpus_per_task: int = 8
    time: str = "02:00:00"
    launcher: Literal["srun", "mpirun"] = "srun"
    slurm_mpi: str = "pmix"
    signal_s: int = 300
    n_pieces: int = 0
    options: tuple[str, ...] = field(default=())


def limit_seconds(text: str) -> int:
    """Read a time limit as Slurm does.

    Parameters
    ----------
    text : str
        ``M``, ``M:S``, ``H:M:S``, ``D-H``, ``D-H:M`` or ``D-H:M:S``.

    Returns
    -------
    int
        Seconds.

    Raises
    ------
    LaunchError
        If it is none of these, or nothing.
    """
    found = _TIME.fullmatch(text)
    seconds = 0
    if found:
        days, *rest = (None if part is None else int(part) for part in found.groups())
        numbers = [part for part in rest if part is not None]
        if days is not None:
            units = (3600, 60, 1)
        else:
            units = (3600, 60, 1) if len(numbers) == 3 else (60, 1, 0)
        seconds = (days or 0) * 86400 + sum(n * u for n, u in zip(numbers, units, strict=False))
    if seconds < 1:
        raise LaunchError(
            f"{text!r} is no time limit; minutes, H:M:S or D-H:M:S would do, as 02:00:00"
        )
    return seconds


def job_script(job: JobRequest) -> str:
    """The script of a training run, to be given to ``sbatch``.

    Parameters
    ----------
    job : JobRequest
        What it asks for.

    Returns
    -------
    str
        A bash script.

    Raises
    ------
    LaunchError
        If the signal would come before the job starts, or a number is below its least.
    """
    limit_s = limit_seconds(job.time)
    if not 0 < job.signal_s < limit_s:
        raise LaunchError(
            f"the signal cannot come {job.signal_s} s before a limit of {limit_s} s; "
            f"{max(1, min(300, limit_s // 4))} s would do"
        )
    for name in ("n_nodes", "ranks_per_node", "cpus_per_task"):
        if getattr(job, name) < 1:
            raise LaunchError(f"{name}={getattr(job, name)} must be 1 or more")
    parts = (_header(job), _start(job), _ranks(job), _end(job))
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def _header(job: JobRequest) -> list[str]:
    name = re.sub(r"[^\w.-]", "_", PurePath(job.recipe).stem) or "train"
    each = f"{job.gpus_per_node} GPUs" if job.gpus_per_node else f"{job.ranks_per_node} ranks"
    to_shell = "B:" if job.launcher == "mpirun" else ""
    options = [
        f"--job-name={name}",
        f"--nodes={job.n_nodes}",
        f"--ntasks-per-node={job.ranks_per_node}",
        *([f"--gpus-per-node={job.gpus_per_node}"] if job.gpus_per_node else []),
        f"--cpus-per-task={job.cpus_per_task}",
        f"--time={job.time}",
        f"--signal={to_shell}USR1@{job.signal_s}",
        *([f"--array=1-{job.n_pieces}%1"] if job.n_pieces else ["--requeue"]),
        "--open-mode=append",
        f"--output={'%x-%A.out' if job.n_pieces else '%x-%j.out'}",
        *job.options,
    ]
    lines = [
        "#!/usr/bin/env bash",
        f"# Trains on {job.n_nodes} nodes x {each}: sbatch THIS [RECIPE]",
    ]
    return [*lines, *(f"#SBATCH {option}" for option in options)]


def _start(job: JobRequest) -> list[str]:
    key = "SLURM_ARRAY_JOB_ID" if job.n_pieces else "SLURM_JOB_ID"
    return [
        "set -euo pipefail",
        'cd "$SLURM_SUBMIT_DIR"',
        f"recipe=${{1:-{shlex.quote(job.recipe)}}}",
        f"run=${{RUN:-runs/${key}}}",
        'if [[ -f ${SITE_ENV:=site.env} ]]; then . "$SITE_ENV"; fi',
        'train=(train "$recipe" --run "$run" --resume-if-any --places)',
    ]


def _ranks(job: JobRequest) -> list[str]:
    if job.launcher == "srun":
        return [
            "# -c again: srun of some versions forgets the job's. One dead rank ends them all.",
            f'srun --mpi="${{SRUN_MPI:-{job.slurm_mpi}}}" -c "$SLURM_CPUS_PER_TASK" '
            "--kill-on-bad-exit=1 \\",
            '  python -m mpipar "${train[@]}"',
        ]
    return [
        "# The signal comes to this shell only, as mpirun's daemons would die of it.",
        'python -m mpipar run -n "$SLURM_NTASKS" "${train[@]}" & ranks=$!',
        "trap 'kill -USR1 $ranks' USR1",
        "code=138  # of a wait that the signal broke off",
        "while ((code == 138)); do code=0; wait $ranks || code=$?; done",
        "((code == 0)) || exit $code",
    ]


def _end(job: JobRequest) -> list[str]:
    if job.n_pieces:
        return [
            "# Done before the last piece: the others are not needed.",
            'if [[ ! -e $run/stopped ]]; then scancel --state=PENDING "$SLURM_ARRAY_JOB_ID"; fi',
        ]
    return [
        "# Stopped by the signal: once more from the checkpoint, a bounded number of times.",
        "if [[ -e $run/stopped ]] && ((${SLURM_RESTART_COUNT:-0} < ${MAX_RESTARTS:-10})); then",
        '  scontrol requeue "$SLURM_JOB_ID"',
        "fi",
    ]
