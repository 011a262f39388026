"""The contract on a real device: every way that this machine has, several ranks on one GPU."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from mpipar.comm import Communicator, ReduceOp
from mpipar.errors import UnsupportedArray
from tests.comm.cases import VERBS, random_case, run_case, uniform_case
from tests.comm.device_double import OnDevice
from tests.comm.test_device_calls import WAYS, fits, on_device

pytestmark = [pytest.mark.gpu, pytest.mark.ranks(1, 2, 4)]


def group_of(comm: Communicator, way: str) -> OnDevice:
    from tests.gpu.side import CupySide, has_device

    if not has_device():
        pytest.skip("no device works")
    group = comm.split(0, purpose=f"gpu {way}")
    assert group is not None
    try:
        return OnDevice(group, way, CupySide())
    except UnsupportedArray as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("verb", VERBS)
def test_random_calls_equal_numpy(comm: Communicator, verb: str, way: str) -> None:
    group, rng = group_of(comm, way), random.Random(f"gpu {verb} {way}")
    for _ in range(20):
        case = on_device(random_case(rng, comm.size, verb))
        if fits(case, way) and case.dtype.itemsize < 16:
            run_case(group, case)  # type: ignore[arg-type]


@pytest.mark.parametrize("verb", VERBS)
def test_chunks_add_up(comm: Communicator, verb: str) -> None:
    group = group_of(comm, "staged")
    group.inner.devices.stage.chunk = 2**16
    for n in (2**18 * comm.size, 2**18 + 7):
        run_case(group, uniform_case(verb, comm.size, (n,), "f4"))  # type: ignore[arg-type]


@pytest.mark.parametrize("way", WAYS)
def test_a_busy_stream_is_waited_for(comm: Communicator, way: str) -> None:
    import cupy

    group = group_of(comm, way).inner
    busy, x = cupy.ones((3000, 3000), np.float32), cupy.zeros(2**20, np.float32)
    for _ in range(20):
        busy = busy @ busy
        busy /= busy.max()
    x += busy[0, 0] + comm.rank  # is there only when all of that is done
    want = comm.size + sum(range(comm.size))
    got = group.all_reduce(x)
    got += 1  # the stream itself waits for the result
    assert float(got.min()) == float(got.max()) == want + 1
    y = group.all_reduce(x, ReduceOp.MEAN)
    assert float(y[5]) == pytest.approx(want / comm.size)


def test_an_array_of_another_library_is_taken_where_it_lies(comm: Communicator) -> None:
    torch: Any = pytest.importorskip("torch")
    group = group_of(comm, "staged").inner
    x = torch.full((1000,), comm.rank + 1.0, device="cuda")
    out = torch.zeros_like(x)
    torch.cuda.synchronize()
    group.all_reduce(x, out=out)
    torch.cuda.synchronize()
    assert bool((out == comm.size * (comm.size + 1) / 2).all())
