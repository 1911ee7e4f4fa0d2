"""The history of PyTorch's allocator, recorded while training and read back."""

import torch

from model import batch, model, skip, step

if not hasattr(torch.cuda.memory, "_record_memory_history"):
    skip("this PyTorch records no history")
torch.cuda.memory._record_memory_history(max_entries=10000)
net = model()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
print([step(net, optimizer, batch(seed)) for seed in range(3)])
snapshot = torch.cuda.memory._snapshot()
live = sum(block["size"] for segment in snapshot["segments"] for block in segment["blocks"]
           if block["state"] == "active_allocated")
print(live > 0, live <= torch.cuda.memory_reserved(), len(snapshot["device_traces"][0]) > 0)
torch.cuda.memory._record_memory_history(enabled=None)
print("done")
