"""The executor and the training on stages, with the same bodies as on threads."""

from tests.pipeline_parallel.test_executor import *  # noqa: F403
from tests.train.test_pipeline import *  # noqa: F403
