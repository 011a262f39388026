"""The communicator's tests, the same bodies as on threads, on real ranks."""

from tests.comm.test_collectives import *  # noqa: F403
