"""The bodies of `tests/comm/test_groups.py`, on real ranks."""

from tests.comm.test_groups import *  # noqa: F403
