"""Tensors from a torch.cuda.MemPool beside those of the default pool."""

import torch

from model import batch, model, skip, step

if not hasattr(torch.cuda, "MemPool"):
    skip("this PyTorch has no MemPool")
net = model()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
pool = torch.cuda.MemPool()
with torch.cuda.use_mem_pool(pool):
    data = batch(1)
    print([step(net, optimizer, data) for _ in range(2)])
print([step(net, optimizer, batch(seed)) for seed in (2, 3)])
del data
print("done")
