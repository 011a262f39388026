"""A mesh's groups on real ranks, with the same body as on threads."""

from tests.mesh.test_mesh import test_groups_on_any_transport_and_closing_frees_them  # noqa: F401
