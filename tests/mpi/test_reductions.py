"""The bodies of `tests/comm/test_reductions.py`, on real ranks."""

from tests.comm.test_reductions import *  # noqa: F403
