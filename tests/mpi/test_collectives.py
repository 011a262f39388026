"""The bodies of `tests/comm/test_collectives.py`, on real ranks."""

from tests.comm.test_collectives import *  # noqa: F403
