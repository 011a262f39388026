"""Parity of training on real ranks, with the same bodies as on threads."""

from tests.train.test_parity import *  # noqa: F403
