"""A two-layer model of one's own, trained data-parallel: ``mpipar run -n 4 -- own_model.py``."""

import numpy as np

import mpipar


def train(comm, n_steps=200, batch=48):
    rng = np.random.default_rng(comm.rank)  # only rank 0's draw counts
    p = {"w1": rng.normal(size=(2, 16)), "b1": np.zeros(16), "w2": rng.normal(size=(16, 1)) / 4}
    dp = mpipar.DataParallel(comm, p)
    losses = []
    for step in range(n_steps):
        data = np.random.default_rng([7, step]).uniform(-2, 2, size=(batch, 2))
        x = data[comm.rank :: comm.size]  # this rank's share of the batch
        y = np.sin(x[:, :1] * x[:, 1:])
        scale = dp.loss_scale(len(x))  # 1 / number of samples on all ranks
        hidden = np.tanh(x @ p["w1"] + p["b1"])
        error = hidden @ p["w2"] - y
        grad_y = 2 * scale * error
        grad_hidden = grad_y @ p["w2"].T * (1 - hidden**2)
        dp.gradients["w2"][...] = hidden.T @ grad_y  # dp.ready("w2") would start its sum here
        dp.gradients["b1"][...] = grad_hidden.sum(axis=0)
        dp.gradients["w1"][...] = x.T @ grad_hidden
        dp.finish()  # sums over all ranks
        for name in dp.trainable:
            p[name] -= 0.1 * dp.gradients[name]
        losses.append(float(comm.all_reduce(scale * np.square(error).sum())))
    return losses


if __name__ == "__main__":
    comm = mpipar.init()
    losses = train(comm)
    if comm.rank == 0:
        print(f"{comm.size} ranks: loss {losses[0]:.4f} -> {losses[-1]:.4f}")
