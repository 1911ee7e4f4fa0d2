"""A model whose weights, gradients and optimizer state are more than the HBM it may use. Plain PyTorch.

    python larger_than_hbm.py                                            # needs all of it
    terrace run --policy larger_than_hbm.toml -- python larger_than_hbm.py   # two thirds of it

Both print the same losses, to the last bit. The sizes are arguments; the first line says what they come to, and
`budget` in the policy is to be two thirds of that. Without a GPU, TERRACE_TORCH_DEVICE=emulated makes tensors of the
CPU travel, and the defaults are small.
"""

import argparse

import torch
from torch import nn

on_gpu = torch.cuda.is_available()
parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=8192 if on_gpu else 512)
parser.add_argument("--layers", type=int, default=24 if on_gpu else 4)
parser.add_argument("--batch", type=int, default=16384 if on_gpu else 64, help="rows")
parser.add_argument("--steps", type=int, default=10 if on_gpu else 4)
parser.add_argument("--frozen", type=int, default=0, help="layers, from the first on, that are not trained")
parser.add_argument("--clip", type=float, default=0, help="the most that the norm of all gradients may be; 0: any")
options = parser.parse_args()

torch.manual_seed(0)
torch.use_deterministic_algorithms(True)
kind = {"device": "cuda" if on_gpu else "cpu", "dtype": torch.bfloat16 if on_gpu else torch.float32}


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width, **kind)
        self.up, self.down = nn.Linear(width, 4 * width, **kind), nn.Linear(4 * width, width, **kind)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


model = nn.Sequential(*(Block(options.width) for _ in range(options.layers)))
for block in model[: options.frozen]:
    block.requires_grad_(False)
trained = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=1e-4)
size = sum(p.numel() * p.element_size() for p in model.parameters())
state = 3 * sum(p.numel() * p.element_size() for p in trained)
print(f"weights, gradients and optimizer state: {(size + state) / 2**30:.3f} GiB")
data = torch.randn(options.batch, options.width, generator=torch.Generator().manual_seed(1)).to(**kind)

for step in range(options.steps):
    loss = (model(data) - data).float().pow(2).mean()
    loss.backward()
    if options.clip:
        nn.utils.clip_grad_norm_(trained, options.clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    print(step, float(loss.detach()).hex())
