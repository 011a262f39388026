"""One rank decides, all apply."""

import pytest

from mpipar.comm import Communicator
from mpipar.distributed_cache.plans import PlanStream
from mpipar.distributed_cache.pool import BlockPool
from mpipar.errors import CacheError


@pytest.mark.ranks(1, 3, 4)
def test_pools_of_a_group_make_the_same_steps(comm: Communicator) -> None:
    plans, pool = PlanStream(comm), BlockPool(8)
    held: list[int] = []
    for step in range(6):
        plan = plans.next(lambda step=step: {"take": step % 3, "give": step // 3})
        if plan["give"]:
            pool.release(held[: plan["give"]])
            held = held[plan["give"] :]
        held += pool.allocate(plan["take"]).tolist()
    assert comm.all_gather_json(held) == [held] * comm.size
    assert len(held) == 3
    with pytest.raises(CacheError, match="asked for"):
        plans.next(lambda: pool.allocate(100))
    assert plans.next(lambda: 1) == 1


@pytest.mark.ranks(2, 4)
def test_a_rank_that_missed_a_plan_is_told(comm: Communicator) -> None:
    plans = PlanStream(comm)
    plans.number = comm.rank
    if comm.rank:
        with pytest.raises(CacheError, match="plan 0 came"):
            plans.next(lambda: 0)
    else:
        assert plans.next(lambda: 5) == 5
