"""The bodies of `tests/comm/test_made_again.py`, on real ranks."""

from tests.comm.test_made_again import *  # noqa: F403
