"""The examples of the guide learn, and on any number of ranks exactly what one rank learns."""

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from mpipar.comm import Communicator, IdentityCommunicator

pytestmark = pytest.mark.ranks(1, 2, 3, 4)

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_own_model(comm: Communicator):
    train = example("own_model").train
    together, alone = train(comm, 60), train(IdentityCommunicator(), 60)
    assert alone[-1] < 0.25 * alone[0]
    np.testing.assert_allclose(together, alone, rtol=1e-10)


@pytest.mark.bench
def test_torch_model(comm: Communicator):
    torch = pytest.importorskip("torch")
    train = example("torch_model").train
    torch.manual_seed(comm.rank)
    together = train(comm, 100)
    torch.manual_seed(0)
    alone = train(IdentityCommunicator(), 100)
    assert alone[-1] < 0.8 * alone[0]
    np.testing.assert_allclose(together, alone, rtol=1e-10)
