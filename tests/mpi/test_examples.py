"""The examples of the guide on real ranks."""

from tests.docs.test_examples import *  # noqa: F403
