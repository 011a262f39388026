"""The bodies of `tests/comm/test_node.py`, on real ranks."""

from tests.comm.test_node import *  # noqa: F403
