"""The communicator's tests, the same bodies as on threads, on real ranks."""

from tests.comm.test_collectives import *  # noqa: F403
from tests.comm.test_groups import *  # noqa: F403
from tests.comm.test_mismatch import *  # noqa: F403
from tests.comm.test_reductions import *  # noqa: F403
from tests.comm.test_requests import *  # noqa: F403
