"""The figures and tables of the guide: ``python docs/figures.py`` writes them to ``_figures``."""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path

HERE = Path(__file__).parent
FOLDER = HERE / "_figures"
sys.path.insert(0, str(HERE.parent))

from mpipar.cli.main import main as run  # noqa: E402


def printed(*words: str) -> str:
    """What a command prints."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        run(list(words))
    return text.getvalue()


def costs() -> str:
    """Bytes that each rank sends at least, from the cost room."""
    from mpipar.topology.cost import bus_factor

    lines = [f"{'collective':16}" + "".join(f"{f'n = {n}':>10}" for n in (2, 4, 8, 64))]
    for op in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast"):
        row = "".join(f"{bus_factor(op, n):>8.3f} b" for n in (2, 4, 8, 64))
        lines.append(f"{op:16}{row}")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write all of them."""
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / "costs.txt").write_text(costs())
    grids = []
    for name in ("gpipe", "1f1b", "zb-h1"):
        text = printed("schedule", name, "--stages", "4", "--microbatches", "8")
        head, grid = text.split("\n\n")[:2]
        grids.append(f"{head}\n{grid}")
    (FOLDER / "grids.txt").write_text("\n\n".join(grids) + "\n")
    whole = printed("schedule", "1f1b", "--stages", "4", "--microbatches", "8")
    (FOLDER / "compare.txt").write_text("\n\n".join(whole.split("\n\n")[2:]).strip() + "\n")
    picture = str(FOLDER / "1f1b.svg")
    printed("schedule", "1f1b", "--stages", "4", "--microbatches", "8", "--plot", picture)


if __name__ == "__main__":
    main()
