"""The bodies of `tests/comm/test_mismatch.py`, on real ranks."""

from tests.comm.test_mismatch import *  # noqa: F403
