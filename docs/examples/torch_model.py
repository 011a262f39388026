"""A PyTorch module on the CPU, trained data-parallel: ``mpipar run -n 4 -- torch_model.py``.

Needs PyTorch: ``pip install torch``.
"""

import torch

import mpipar


def train(comm, n_steps=200, batch=48):
    model = torch.nn.Sequential(
        torch.nn.Linear(2, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)
    ).double()
    parameters = dict(model.named_parameters())
    dp = mpipar.DataParallel(comm, parameters)  # rank 0's values, written into the module itself
    for name, parameter in parameters.items():
        parameter.grad = torch.from_numpy(dp.gradients[name])  # backward adds into the buckets
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: dp.ready(name))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(n_steps):
        generator = torch.Generator().manual_seed(step)
        data = torch.rand(batch, 2, generator=generator, dtype=torch.float64) * 4 - 2
        x = data[comm.rank :: comm.size]  # this rank's share of the batch
        y = torch.sin(x[:, :1] * x[:, 1:])
        loss = dp.loss_scale(len(x)) * (model(x) - y).square().sum()

        dp.zero_gradients()
        loss.backward()  # sums over the ranks start to travel on the way
        dp.finish()
        optimizer.step()
        losses.append(float(comm.all_reduce(loss.item())))
    return losses


if __name__ == "__main__":
    comm = mpipar.init()
    torch.manual_seed(comm.rank)  # only rank 0's draw counts
    losses = train(comm)
    if comm.rank == 0:
        print(f"{comm.size} ranks: loss {losses[0]:.4f} -> {losses[-1]:.4f}")
