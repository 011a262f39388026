"""The bodies of `tests/comm/test_message_order.py`, on real ranks."""

from tests.comm.test_message_order import *  # noqa: F403
