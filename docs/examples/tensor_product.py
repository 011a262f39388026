"""A tensor-parallel product of two NumPy matrices: each rank holds 1/n of the second one.

mpipar run -n 2 -- python docs/examples/tensor_product.py
"""

import numpy as np

import mpipar
from mpipar.tensor_parallel import ColumnParallel

a, b = np.random.default_rng(0).normal(size=(2, 64, 48))

comm = mpipar.init()
layer = ColumnParallel(comm, n_in=48, n_out=64, gather_output=True)
shard = layer.shard({"weight": b})  # rows of b, 1/n of them
product, _ = layer.forward(shard, a)
assert np.allclose(product, a @ b.T)

print(f"rank {comm.rank} of {comm.size}: holds {shard['weight'].shape} of {b.shape}")
