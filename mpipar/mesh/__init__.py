"""Named axes over the ranks of a communicator; the layout alone is pure."""

from typing import TYPE_CHECKING, Any

from mpipar.mesh.layout import AXES, MeshLayout

if TYPE_CHECKING:
    from mpipar.mesh.mesh import Mesh

__all__ = ["AXES", "Mesh", "MeshLayout"]


def __getattr__(name: str) -> Any:
    if name == "Mesh":
        from mpipar.mesh.mesh import Mesh

        return Mesh
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
