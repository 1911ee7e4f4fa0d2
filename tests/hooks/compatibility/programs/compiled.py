"""A model through torch.compile; the mode is the argument."""

import sys

import torch

from model import batch, model, skip, step

if not hasattr(torch, "compile"):
    skip("this PyTorch does not compile")
net = model()
compiled = torch.compile(net, mode=sys.argv[1])
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
for seed in range(5):
    print(step(compiled, optimizer, batch(seed)))
print("done")
