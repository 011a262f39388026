"""Checks of what the site gives: the batch system."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from mpipar.doctor.check import Check, Status
from mpipar.doctor.devices import answer

if TYPE_CHECKING:
    from mpipar.doctor.here import Here


def check_slurm(here: Here) -> Check:
    """Whether a Slurm is here, and whether its ``srun`` speaks the library's language.

    Parameters
    ----------
    here : Here
        Where to look.

    Returns
    -------
    Check
        What was found.
    """
    if shutil.which("srun", path=here.environment.get("PATH")) is None:
        return Check("Slurm", Status.NOT_APPLICABLE, "no srun on PATH")
    plugins = answer(here.environment, "srun", "--mpi=list")
    if plugins is None:
        return Check("Slurm", Status.NOT_APPLICABLE, "srun is there, but no cluster answers")
    wanted = "pmix" if here.library.name.family == "Open MPI" else "pmi2"
    found = [name for name in ("pmix", "pmi2", "none") if name in plugins.split()]
    facts = {"plugins": found}
    if wanted in found:
        return Check("Slurm", Status.OK, f"srun --mpi={wanted} fits {here.library.name}",
                     facts=facts)  # fmt: skip
    return Check("Slurm", Status.WARN, f"srun offers {', '.join(found) or plugins.strip()}; "
                 f"{here.library.name} needs {wanted}",
                 "start the ranks by `mpipar run` from the batch script", facts)  # fmt: skip
