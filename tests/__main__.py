"""``python -m tests [static] [laws] [mpi] [kill] [slurm] [--full]``: every check, as CI runs it.

Without arguments all five parts. Each step has a deadline, a hang is a failure, and a table at the
end says what ran and what it cost. An MPI test that no launch ran to its end is a failure.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

from mpipar.errors import LaunchError
from mpipar.launch.environment import thread_settings
from mpipar.launch.job import run_job
from mpipar.launch.library import choose_library
from tests.slurm import cluster

ROOT = Path(__file__).resolve().parents[1]
PREFIX = ROOT / ".mpich"
PARTS = ("static", "laws", "mpi", "kill", "slurm")
RANKS = (1, 2, 3, 4)
UNMARKED = "not (bench or gpu or slurm or kill{})"
OVER_NODES = ("collectives", "reductions", "requests", "mismatch", "message_order")
NEEDS_MPI = "need --with-mpi"  # pytest-mpi's reason for a test that a plain run skipped


@dataclass
class Step:
    """One command with its deadline, and the folder of the test reports that it writes."""

    part: str
    name: str
    command: list[str]
    deadline_s: float
    environment: dict[str, str] = field(default_factory=dict)
    reports: Path | None = None
    n_reports: int = 1


@dataclass
class Result:
    """How a step went."""

    step: Step
    seconds: float
    problem: str = ""
    counts: Counter[str] = field(default_factory=Counter)
    outcomes: dict[str, str] = field(default_factory=dict)


def python(*words: str) -> list[str]:
    """A command that runs this Python."""
    return [sys.executable, *words]


def static_steps() -> Iterator[Step]:
    """Linter, formatter, types, import contract, docstrings, sizes; the guide and its examples."""
    contract = "from importlinter.cli import lint_imports_command as check; check()"
    yield Step("static", "lint", python("-m", "ruff", "check", "."), 60)
    yield Step("static", "format", python("-m", "ruff", "format", "--check", "."), 60)
    yield Step("static", "types", python("-m", "mypy"), 180)
    yield Step("static", "import contract", python("-c", contract), 60)
    yield Step("static", "docstrings", python("-m", "tests.docstrings"), 60)
    yield Step("static", "sizes", python("-m", "tests.sizes"), 30)
    examples = python("-m", "pytest", "-q", "--doctest-modules", "mpipar")
    yield Step("static", "docstrings' examples", examples, 60)
    for name, builder in (("guide", "html"), ("guide's examples", "doctest")):
        words = ["-m", "sphinx", "-q", "-W", "--keep-going", "-b", builder, "docs"]
        yield Step("static", name, python(*words, f"docs/_build/{builder}"), 120)


def marks(is_full: bool) -> str:
    """Mark expression of a run: long forms only in a full one."""
    return UNMARKED.format("" if is_full else " or slow")


def laws_steps(reports: Path, is_full: bool) -> Iterator[Step]:
    """All that needs no launcher."""
    words = ["-m", "pytest", "-q", "-m", marks(is_full), "--ignore=tests/mpi"]
    command = python(*words, f"--junitxml={reports}/laws/rank0.xml")
    yield Step("laws", "pytest", command, 3600 if is_full else 900, reports=reports / "laws")


def mpis() -> dict[str, str]:
    """The MPIs to test: name -> what `mpipar run --mpi` takes."""
    return {"openmpi": "openmpi", "mpich": str(PREFIX)}


def mpi_steps(name: str, reports: Path, is_full: bool) -> Iterator[Step]:
    """One launch per rank count."""
    deadline_s = 600 if is_full else 240
    for n in RANKS:
        folder = reports / f"mpi-{name}-{n}"
        launch = ["-m", "mpipar", "run", "-n", str(n), "--mpi", mpis()[name]]
        options = ["-o", f"faulthandler_timeout={deadline_s // 2}", "-m", marks(is_full)]
        entry = ["--", "python", "-m", "tests.rank", str(folder), *options, "tests/mpi"]
        command = python(*launch, "--deadline", str(deadline_s), *entry)
        step_name = f"{name}, {n} rank{'s' if n > 1 else ''}"
        environment = {"MPIPAR_CHECK": "1"}
        yield Step("mpi", step_name, command, deadline_s + 30, environment, folder, n)
    folder = reports / f"mpi-{name}-nodes"
    launch = ["-m", "mpipar", "run", "-n", "4", "--mpi", mpis()[name]]
    files = [f"tests/mpi/test_{part}.py" for part in OVER_NODES]
    entry = ["--", "python", "-m", "tests.rank", str(folder), "-m", marks(is_full), *files]
    command = python(*launch, "--deadline", str(deadline_s), *entry)
    environment = {"MPIPAR_NODE_SIZE": "2"}
    step_name = f"{name}, 4 ranks on 2 nodes"
    yield Step("mpi", step_name, command, deadline_s + 30, environment, folder, 4)


def kill_steps(name: str, reports: Path, is_full: bool) -> Iterator[Step]:
    """Jobs that end badly."""
    folder = reports / f"kill-{name}"
    chosen = "kill" if is_full else "kill and not slow"
    command = python("-m", "pytest", "-q", "-m", chosen, f"--junitxml={folder}/rank0.xml")
    environment = choose_library(name)
    if name == "mpich":  # installed by the time this step runs
        environment = {"MPI4PY_LIBMPI": str(PREFIX / "lib" / "libmpi.so.12")}
    yield Step("kill", name, command, 300, environment, folder)


def slurm_step(names: list[str], reports: Path, is_full: bool) -> Step:
    """Job scripts on a private Slurm on loopback."""
    words = ["-m", "pytest", "-q", "-m", "slurm" if is_full else "slurm and not slow"]
    words += ["tests/slurm", *([] if "mpich" in names else ["-k", "not mpich"])]
    command = python(*words, f"--junitxml={reports}/slurm/rank0.xml")
    name = f"slurm, {' and '.join(names)}"
    return Step("slurm", name, command, 1200 if is_full else 240, reports=reports / "slurm")


def run_slurm(names: list[str], reports: Path, is_full: bool) -> list[Result]:
    """Install Slurm where that is possible, and run the step; else say so."""
    start = time.monotonic()
    reason = cluster.why_not()
    installed = Result(Step("slurm", "install slurm", [], 0), time.monotonic() - start)
    if reason:
        print(f"\n!!!! JOB SCRIPTS ARE NOT TESTED: {reason}\n", flush=True)
        installed.step.name = f"slurm SKIPPED: {reason}"
        return [installed]
    return [installed, run(slurm_step(names, reports, is_full))]


def install_mpich() -> Result | None:
    """A second MPI beside the environment's own, unless it is there."""
    if (PREFIX / "lib").is_dir():
        return None
    words = ["--quiet", "--no-deps", "--ignore-installed", "--prefix", str(PREFIX), "mpich"]
    return run(Step("mpi", "install mpich", python("-m", "pip", "install", *words), 180))


def run(step: Step) -> Result:
    """Run one step to its end or its deadline."""
    print(f"\n==== {step.part}: {step.name}", flush=True)
    if step.reports is not None:
        step.reports.mkdir(parents=True)
    environment = {**os.environ, **thread_settings(os.environ), **step.environment}
    start = time.monotonic()
    outcome = run_job(step.command, environment, step.deadline_s)
    result = Result(step, time.monotonic() - start)
    if outcome.stopped_by is not None:
        raise KeyboardInterrupt
    if outcome.timed_out:
        result.problem = f"did not end within {step.deadline_s:g} s"
    elif outcome.returncode != 0:
        result.problem = f"exit code {outcome.returncode}"
    if step.reports is not None:
        read_reports(result, step.reports)
    return result


def read_reports(result: Result, folder: Path) -> None:
    """Count tests; a report that is missing or empty is a problem of its own."""
    paths = sorted(folder.glob("rank*.xml"))
    for path in paths:
        for case in ElementTree.parse(path).iter("testcase"):
            found = {child.tag: child.get("message", "") for child in case}
            outcome = next(
                (tag for tag in ("error", "failure", "skipped") if tag in found), "passed"
            )
            if NEEDS_MPI in found.get("skipped", ""):
                outcome = "failure"
                result.problem = result.problem or "an MPI test outside tests/mpi is never run"
            if path.name == "rank0.xml":
                result.counts[outcome] += 1
                result.outcomes[f"{case.get('classname')}::{case.get('name')}"] = outcome
    if not result.problem and len(paths) != result.step.n_reports:
        result.problem = f"{len(paths)} of {result.step.n_reports} ranks wrote a report"
    if not result.problem and not result.counts["passed"]:
        result.problem = "no test ran"


def never_ran(results: list[Result], name: str) -> list[str]:
    """MPI tests that every launch of one MPI skipped."""
    launches = [r for r in results if r.step.part == "mpi" and r.step.name.startswith(f"{name},")]
    tests = {test for r in launches for test in r.outcomes}
    ran = {t for r in launches for t, outcome in r.outcomes.items() if outcome != "skipped"}
    return sorted(tests - ran)


def run_parts(parts: list[str], reports: Path, is_full: bool) -> list[Result]:
    """Run the chosen parts in order."""
    results: list[Result] = []
    if "static" in parts:
        results += [run(step) for step in static_steps()]
    if "laws" in parts:
        results += [run(step) for step in laws_steps(reports, is_full)]
    if not {"mpi", "kill", "slurm"} & set(parts):
        return results
    names = list(mpis())
    installed = install_mpich()
    if installed is not None and installed.problem:
        print("\n!!!! MPICH IS NOT TESTED: pip cannot install it\n", flush=True)
        installed.problem, installed.step.name = "", "mpich SKIPPED: pip cannot install it"
        names.remove("mpich")
    results += [installed] if installed is not None else []
    for name in names if "mpi" in parts else []:
        results += [run(step) for step in mpi_steps(name, reports, is_full)]
        for test in never_ran(results, name):
            results[-1].problem = results[-1].problem or f"skipped at every rank count: {test}"
    for name in names if "kill" in parts else []:
        results += [run(step) for step in kill_steps(name, reports, is_full)]
    if "slurm" in parts:
        results += run_slurm(names, reports, is_full)
    return results


def table(results: list[Result]) -> str:
    """One line a step."""
    lines = [
        f"{'part':<8}{'step':<28}{'passed':>8}{'failed':>8}{'skipped':>8}{'seconds':>9}  result"
    ]
    for r in results:
        cells = [r.counts["passed"], r.counts["failure"] + r.counts["error"], r.counts["skipped"]]
        numbers = "".join(f"{n if r.counts else '':>8}" for n in cells)
        verdict = f"FAILED: {r.problem}" if r.problem else "ok"
        lines.append(f"{r.step.part:<8}{r.step.name:<28}{numbers}{r.seconds:>9.1f}  {verdict}")
    lines.append(f"{'total':<60}{sum(r.seconds for r in results):>9.1f}")
    return "\n".join(lines)


def main() -> int:
    """Parse, run, tell; 0 only if nothing failed."""
    parser = argparse.ArgumentParser(prog="python -m tests", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--full", action="store_true", help="long forms too")
    arguments = parser.parse_args()
    if wrong := set(arguments.parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(wrong))}; parts are {', '.join(PARTS)}")
    os.chdir(ROOT)
    reports = Path(tempfile.mkdtemp(prefix="mpipar-tests-"))
    try:
        results = run_parts(arguments.parts or list(PARTS), reports, arguments.full)
    except (KeyboardInterrupt, LaunchError) as error:
        print(f"stopped: {error or 'by a signal'}", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(reports, ignore_errors=True)
    print(f"\n{table(results)}")
    return 1 if any(result.problem for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
