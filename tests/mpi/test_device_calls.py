"""The bodies of `tests/comm/test_device_calls.py`, on real ranks: direct runs on the engine."""

from tests.comm.test_device_calls import *  # noqa: F403
