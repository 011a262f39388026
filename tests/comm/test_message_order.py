"""Messages of one tag keep their order, however many of them are under way."""

import numpy as np
import pytest

from mpipar.comm import Communicator


@pytest.mark.ranks(2)
def test_many_receives_of_one_channel_are_posted_at_once(comm: Communicator) -> None:
    other = 1 - comm.rank
    for _ in range(5):
        given = [np.full((k % 5 + 1, 3), k + 100 * comm.rank) for k in range(12)]
        taken = [np.empty((k % 5 + 1, 3), int) for k in range(12)]
        receives = [comm.begin_recv(array, other, 3) for array in taken[:8]]
        sends = [comm.begin_send(array, other, 3) for array in given]
        for array in taken[8:]:
            comm.recv(array, other, 3)
        for request in receives + sends:
            request.wait()
        for k, array in enumerate(taken):
            assert (array == k + 100 * other).all()
