"""The bodies of `tests/comm/test_requests.py`, on real ranks."""

from tests.comm.test_requests import *  # noqa: F403
