"""The script for GPU machines: what it does when things are missing, fail or hang."""

from __future__ import annotations

import sys
import time
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def run() -> Any:
    loader = SourceFileLoader("gpu_run", str(Path(__file__).with_name("run")))
    spec = spec_from_loader("gpu_run", loader)
    assert spec is not None
    module = sys.modules["gpu_run"] = module_from_spec(spec)
    loader.exec_module(module)
    return module


def shown(run: Any, code: str, tmp_path: Path, limit_s: float = 20.0, **words: Any) -> Any:
    step = run.Step("one", [sys.executable, "-c", code], limit_s, **words)
    return run.run_step(step, 20.0, {"a GPU"}, tmp_path / "log")


def test_verdicts(run: Any, tmp_path: Path) -> None:
    good = shown(run, "print('3 passed, 1 skipped in 2 s')", tmp_path)
    assert (good.verdict, good.told) == ("ok", "3 passed, 1 skipped")
    assert shown(run, "print('9 skipped')", tmp_path).verdict == "not shown"
    bad = shown(run, "print('why'); raise SystemExit(3)", tmp_path)
    assert (bad.verdict, bad.told) == ("FAILED", "exit code 3; why")
    absent = shown(run, "", tmp_path, needs=("numpy", "a GPU"))
    assert (absent.verdict, absent.told) == ("not shown", "needs a GPU")
    assert run.exit_code([good]) == 0
    assert run.exit_code([good, absent]) == 2
    assert run.exit_code([good, absent, bad]) == 1
    assert "one" in run.table([good, absent])


def test_a_step_that_hangs_is_ended_with_its_children(run: Any, tmp_path: Path) -> None:
    sign = tmp_path / "sign"
    inner = f"import time, pathlib; time.sleep(7); pathlib.Path({str(sign)!r}).touch()"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    start = time.monotonic()
    late = shown(run, code, tmp_path, limit_s=5.0)
    assert late.verdict == "FAILED"
    assert time.monotonic() - start < 7
    time.sleep(2.5)
    assert not sign.exists()


def test_a_spent_budget_starts_nothing(run: Any, tmp_path: Path) -> None:
    step = run.Step("one", ["/nowhere"], 60)
    assert run.run_step(step, 2.0, set(), tmp_path / "log").verdict == "not shown"


def test_packages_fit_the_driver(run: Any) -> None:
    smi = "| NVIDIA-SMI 580.1   Driver Version: 580.1   CUDA Version: 13.0 |"
    assert run.cuda_major(smi) == 13
    assert run.cuda_major("") == 12
    packages = run.missing_packages(13, lambda module: module not in ("cupy", "pytest_mpi"))
    assert packages == ["pytest-mpi", "cupy-cuda13x", "nvidia-nccl-cu13"]
    assert run.missing_packages(12, lambda module: True) == []


def test_a_package_that_is_not_to_be_had_takes_none_with_it(run: Any, tmp_path: Path) -> None:
    command = run.install_command(["not-there>=1", "neither"], tmp_path)
    done = run.run_step(run.Step("install", command, 60), 60.0, set(), tmp_path / "log")
    assert done.verdict == "FAILED"
    text = (tmp_path / "log").read_text()
    assert "not-there" in text
    assert "neither" in text


def test_steps_fit_the_time(run: Any) -> None:
    steps = run.steps("python", "folder")
    assert len({step.name for step in steps}) == len(steps)
    assert all(step.limit_s <= 100 and step.needs for step in steps)
