"""The verb table, exit codes, and how errors are told."""

import argparse
import subprocess
import sys
from types import ModuleType

import pytest

from mpipar import errors
from mpipar.cli import main as command_line
from mpipar.cli.main import exit_code, main


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """A verb `probe` whose `main` does what the test puts into the returned dictionary."""
    does: dict[str, object] = {}
    module = ModuleType("a_verb_of_the_tests")

    def configure(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--size", type=int, default=1)

    def act(arguments: argparse.Namespace) -> int:
        does["size"] = arguments.size
        if isinstance(does.get("raise"), Exception):
            raise does["raise"]
        return 3

    module.configure, module.main = configure, act
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(command_line.VERBS, "probe", (module.__name__, "a probe"))
    return does


def test_a_verb_gets_its_options_and_gives_the_exit_code(verb: dict[str, object]) -> None:
    assert main(["probe", "--size", "5"]) == 3
    assert verb["size"] == 5


def test_usage_errors_are_2(verb: dict[str, object], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", "--sise", "5"]) == 2
    assert "--sise" in capsys.readouterr().err
    assert main([]) == 2
    assert "usage: mpipar" in capsys.readouterr().err
    assert "size" not in verb


def test_an_unknown_verb_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rnu"]) == 2
    assert capsys.readouterr().err == "mpipar: unknown verb 'rnu'; did you mean run?\n"
    assert main(["xyzzy"]) == 2
    assert "verbs are " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.RecipeError("x"), 2),
        (errors.UnevenSplit("x", "y"), 3),
        (errors.LayoutError("x"), 3),
        (errors.ScheduleError("x"), 3),
        (errors.LaunchError("x"), 4),
        (errors.CheckpointError("x"), 1),
        (errors.RankFailed("x"), 1),
    ],
)
def test_exit_codes_of_errors(error: errors.ParallelismError, code: int) -> None:
    assert exit_code(error) == code


def test_errors_of_the_tree_are_three_lines(
    verb: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    verb["raise"] = errors.LayoutError("tp=3 does not divide 8; 2 or 4 would do")
    assert main(["probe"]) == 3
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["mpipar probe: LayoutError", "tp=3 does not divide 8; 2 or 4 would do"]
    assert len(lines) == 3
    with pytest.raises(errors.LayoutError):
        main(["probe", "-v"])


def test_further_ranks_say_one_line_and_usage_nothing(
    verb: dict[str, object],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "3")
    verb["raise"] = errors.LayoutError("tp=3 does not divide 8;\n2 or 4 would do")
    assert main(["probe"]) == 3
    assert capsys.readouterr().err == "[rank 3] LayoutError: tp=3 does not divide 8;\n"
    assert main(["probe", "--sise", "1"]) == 2
    assert capsys.readouterr() == ("", "")


def test_mistakes_in_the_code_keep_their_traceback(verb: dict[str, object]) -> None:
    verb["raise"] = KeyError("a bug")
    with pytest.raises(KeyError):
        main(["probe"])


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in command_line.VERBS)
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("mpipar 0")
    assert main(["run", "--help"]) == 0


def test_the_module_form_works_and_every_verb_can_be_loaded() -> None:
    child = subprocess.run(
        [sys.executable, "-m", "mpipar", "nonsense"], capture_output=True, text=True, check=False
    )
    assert child.returncode == 2
    assert "unknown verb 'nonsense'" in child.stderr
    for name in command_line.VERBS:
        module, parser = command_line.load_verb(name)
        assert callable(module.main)
        assert parser.prog == f"mpipar {name}"


def test_no_verb_loads_mpi_before_it_runs() -> None:
    """The process that starts a launcher must not be a rank itself."""
    code = (
        "import sys; from mpipar.cli import main as m; [m.load_verb(name) for name in m.VERBS]; "
        "heavy = {'mpi4py.MPI', 'matplotlib', 'torch', 'cupy'} & set(sys.modules); "
        "sys.exit(f'loaded {heavy}' if heavy else 0)"
    )
    child = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert child.returncode == 0, child.stderr


def test_the_overview_loads_nothing_heavy() -> None:
    code = (
        "import sys; from mpipar.cli.main import main; main(['--help']); "
        "heavy = {'numpy', 'mpi4py', 'mpipar.cli.run', 'matplotlib', 'difflib'} & set(sys.modules);"
        "sys.exit(f'loaded {heavy}' if heavy else 0)"
    )
    child = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert child.returncode == 0, child.stderr
