"""How the guide is built: ``python -m sphinx -W -b html docs docs/_build/html``.

The reference pages are written from each room's ``__all__``, so that no public name is missing.
"""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from inspect import isclass, isroutine
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from mpipar._version import version  # noqa: E402

project, author = "mpipar", "the mpipar developers"
release = version
extensions = ["sphinx.ext.autodoc", "sphinx.ext.doctest", "numpydoc", "myst_parser"]
html_theme = "furo"
html_title = f"mpipar {version}"
exclude_patterns = ["_build", "examples"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
numpydoc_show_class_members = False
autodoc_typehints = "none"
autodoc_member_order = "bysource"
doctest_global_setup = "import numpy as np\nimport mpipar"
doctest_test_doctest_blocks = ""  # examples in docstrings are run by pytest, in their modules

ROOMS = {
    "mpipar": "the names at the top",
    "mpipar.units": "typed quantities",
    "mpipar.comm": "communicators",
    "mpipar.mesh": "named axes",
    "mpipar.sharding": "sharded arrays",
    "mpipar.device_group": "one process, several devices",
    "mpipar.data_parallel": "data parallelism",
    "mpipar.tensor_parallel": "tensor and sequence parallelism",
    "mpipar.pipeline_parallel": "pipeline schedules and their executor",
    "mpipar.distributed_cache": "a paged cache of keys and values over ranks",
    "mpipar.models": "GPT and Llama",
    "mpipar.checkpoint": "checkpoints, and models of other tools",
    "mpipar.planner": "plans",
    "mpipar.topology": "machines and the cost of collectives",
    "mpipar.report": "what may be published",
    "mpipar.train": "the training job",
    "mpipar.generate": "text over a paged cache",
    "mpipar.errors": "errors",
}


def page(module: Any, title: str) -> str:
    """A reference page as text."""
    names = [n for n in getattr(module, "__all__", dir(module)) if not n.startswith("_")]
    lines = [f"{module.__name__}: {title}"]
    lines += ["=" * len(lines[0]), "", f".. automodule:: {module.__name__}", "   :no-members:", ""]
    for name in names:
        value = getattr(module, name)
        home = getattr(value, "__module__", "")
        if not str(home).startswith("mpipar") or (
            not hasattr(module, "__all__") and home != module.__name__
        ):
            continue
        path = f"{home}.{name}" if hasattr(sys.modules[home], name) else f"{module.__name__}.{name}"
        if isclass(value):
            lines += [f".. autoclass:: {path}", "   :members:", "   :no-index:", ""]
        elif isroutine(value):
            lines += [f".. autofunction:: {path}", "   :no-index:", ""]
    return "\n".join(lines) + "\n"


def write_reference() -> None:
    """Pages of all rooms, and their list."""
    folder = HERE / "reference"
    folder.mkdir(exist_ok=True)
    for name, title in ROOMS.items():
        (folder / f"{name}.rst").write_text(page(import_module(name), title))
    toctree = "\n".join(f"   {name}" for name in ROOMS)
    text = "Reference\n=========\n\nEvery public name.\n\n.. toctree::\n   :maxdepth: 1\n\n"
    (folder / "index.rst").write_text(text + toctree + "\n")


write_reference()
subprocess.run([sys.executable, str(HERE / "figures.py")], check=True)
