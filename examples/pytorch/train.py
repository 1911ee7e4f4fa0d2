"""A training loop that knows nothing of Terrace, small enough for a CPU.

    python train.py
    terrace run --policy policy.toml -- python train.py

Both print the same losses, to the last bit. On a GPU nothing else is needed. On a machine without one,
TERRACE_TORCH_DEVICE=emulated makes tensors of the CPU travel to an emulated device's DDR and back.
"""

import torch
from torch import nn

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
width, layers, batch, steps = (4096, 24, 8192, 20) if device == "cuda" else (256, 4, 1024, 4)
model = nn.Sequential(*(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
                        for _ in range(layers))).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = torch.randn(batch, width, generator=torch.Generator().manual_seed(1)).to(device)

for step in range(steps):
    loss = (model(data) - data).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    print(step, float(loss.detach()).hex())
if device == "cuda":
    print(f"peak {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")
