"""Rung 7: two matrices in a row need one collective each way: the pair called f and g.

The first weight is split by columns, the second by rows, so nothing has to be exchanged between
them. Forward, the terms of the result are summed (g). Backward, the terms of the input's gradient
are (f). Each operator is the other's mirror image.

Which global object is split?     Both weights, along the hidden dim.
Which rank owns each local object? Rank r owns hidden units r*n to (r+1)*n of both.
Which traces may be published?    Bytes: one all-reduce of the output, one of the input's gradient.

    python 07_tensor_parallel_mlp.py
    mpipar run -n 2 -- 07_tensor_parallel_mlp.py
"""

import numpy as np
from ladder import say, show, start

from mpipar.tensor_parallel import AllReduceCopy, CopyAllReduce

QUESTION = "One MLP, forward and backward, on 2 ranks: how many all-reduces does a rank make?"
ANSWER = 2


def rung(comm):
    rng = np.random.default_rng(0)  # the same draw on every rank
    x, a, b = rng.normal(size=(3, 4)), rng.normal(size=(4, 12)), rng.normal(size=(12, 4))
    n = 12 // comm.size
    mine = slice(comm.rank * n, (comm.rank + 1) * n)
    show(comm, "BEFORE: weights of each rank", f"{a[:, mine].shape} and {b[mine].shape}")

    f, g = CopyAllReduce(comm), AllReduceCopy(comm)
    hidden = np.maximum(f.forward(x) @ a[:, mine], 0)
    y = g.forward(hidden @ b[mine])

    grad_y = np.ones_like(y)  # of the loss sum(y)
    grad_hidden = (g.backward(grad_y) @ b[mine].T) * (hidden > 0)
    grad_x = f.backward(grad_hidden @ a[:, mine].T)
    show(comm, "AFTER: the first row of the result, the same everywhere", y[0].round(3))

    whole = np.maximum(x @ a, 0)
    np.testing.assert_allclose(y, whole @ b, atol=1e-12)
    np.testing.assert_allclose(grad_x, ((grad_y @ b.T) * (whole > 0)) @ a.T, atol=1e-12)
    say(comm, "result and gradient equal those of one rank")
    return y


if __name__ == "__main__":
    start(rung, QUESTION)
