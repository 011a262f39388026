"""How long files and functions are: told above the aim, a failure above the maximum."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

FILE_AIM, FILE_MAX = 250, 400
FUNCTION_AIM, FUNCTION_MAX = 40, 60
LIBRARY_MAX = 27_500  # lines of code: blank lines, comments and docstrings are not counted


def function_sizes(source: str) -> list[tuple[int, str, int]]:
    """Line, name and length (signature and docstring left out) of every function."""
    sizes = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[ast.get_docstring(node) is not None :]
            length = (node.end_lineno or 0) - body[0].lineno + 1 if body else 0
            sizes.append((node.lineno, node.name, length))
    return sizes


def code_lines(source: str) -> int:
    """Lines that are neither blank, nor a comment, nor part of a docstring."""
    words: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        for child in (
            getattr(node, "body", ()) if not isinstance(node, ast.Lambda | ast.IfExp) else ()
        ):
            value = getattr(child, "value", None)
            if isinstance(child, ast.Expr) and isinstance(value, ast.Constant):
                words.update(range(child.lineno, (child.end_lineno or child.lineno) + 1))
    lines = enumerate(source.splitlines(), 1)
    return sum(
        1 for i, s in lines if s.strip() and not s.strip().startswith("#") and i not in words
    )


def measure(root: Path) -> tuple[list[str], list[str]]:
    """What is above the aim, and what is above the maximum."""
    long: list[str] = []
    too_long: list[str] = []
    total = 0
    for path in sorted(root.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        n_lines = source.count("\n")
        total += code_lines(source)
        if n_lines > FILE_AIM:
            (too_long if n_lines > FILE_MAX else long).append(f"{path}: {n_lines} lines")
        for line, name, length in function_sizes(source):
            if length > FUNCTION_AIM:
                target = too_long if length > FUNCTION_MAX else long
                target.append(f"{path}:{line}: {name} has {length} lines")
    if total > LIBRARY_MAX:
        too_long.append(f"the library has {total} lines of code, {LIBRARY_MAX} at most")
    long.append(f"the library has {total} lines of code")
    return long, too_long


def main(folder: str = "mpipar") -> int:
    """Print both lists; 1 if anything is above the maximum."""
    long, too_long = measure(Path(folder))
    print("\n".join(long))
    for line in too_long:
        print(f"TOO LONG  {line}")
    return 1 if too_long else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
