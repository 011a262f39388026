"""Docstrings of the public names (each package's ``__all__``, and public methods) by numpydoc."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

from numpydoc.validate import validate

import mpipar


def public_names() -> Iterator[tuple[str, object]]:
    """Every public class and function of every package, by the module that defines it."""
    packages = ["mpipar", *(m.name for m in pkgutil.iter_modules(mpipar.__path__, "mpipar."))]
    seen: set[str] = set()
    for package in packages:
        module = importlib.import_module(package)
        for name in getattr(module, "__all__", ()):
            thing = getattr(module, name)
            if not (inspect.isclass(thing) or inspect.isfunction(thing)):
                continue
            full = f"{thing.__module__}.{thing.__qualname__}"
            if full not in seen and thing.__module__.startswith("mpipar"):
                seen.add(full)
                yield full, thing
                yield from methods(full, thing)


def methods(full: str, thing: object) -> Iterator[tuple[str, object]]:
    """Public methods and properties that a class defines itself."""
    if inspect.isclass(thing):
        for name, member in vars(thing).items():
            if not name.startswith("_") and (inspect.isroutine(member) or type(member) is property):
                yield f"{full}.{name}", member


def faults(full: str, thing: object, checks: set[str]) -> Iterator[str]:
    """What numpydoc finds, without what it cannot see: fields of dataclasses, simple returns."""
    try:
        found = validate(full)["errors"]
    except (AttributeError, ImportError) as error:
        yield f"{full}: {error}"
        return
    is_class = inspect.isclass(thing)
    is_value = dataclasses.is_dataclass(thing) or (is_class and hasattr(thing, "_fields"))
    is_value |= is_class and "__init__" not in vars(thing)  # documented where it is defined
    is_value |= getattr(thing, "_is_protocol", False)
    for code, text in found:
        if code not in checks or (is_value and code in ("PR01", "PR02")):
            continue
        if code in ("RT01", "YD01", "PR01") and (type(thing) is property or "Attributes" in text):
            continue
        yield f"{full}: {code} {text}"


def main() -> int:
    """Print every fault; 1 if there is one."""
    root = Path(__file__).resolve().parents[1]
    with (root / "pyproject.toml").open("rb") as file:
        checks = set(tomllib.load(file)["tool"]["numpydoc_validation"]["checks"])
    n_names, lines = 0, []
    for full, thing in public_names():
        n_names += 1
        lines += list(faults(full, thing, checks))
    print("\n".join(lines))
    print(f"{n_names} public names, {len(lines)} faults")
    return 1 if lines or not n_names else 0


if __name__ == "__main__":
    sys.exit(main())
