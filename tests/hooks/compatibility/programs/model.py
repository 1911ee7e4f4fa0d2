"""What the programs train: a few wide layers, whose saved tensors are large enough to move. Deterministic."""

import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch  # noqa: E402
from torch import nn  # noqa: E402

WIDTH, ROWS = 1024, 2048


def skip(why):
    print(why, flush=True)
    raise SystemExit(77)


def model(device="cuda"):
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    layers = [nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
              for _ in range(6)]
    return nn.Sequential(*layers).to(device)


def batch(seed, device="cuda"):
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed)).to(device)


def step(forward, optimizer, data):
    """One update; the loss as text, to the last bit."""
    loss = (forward(data) - data).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(loss.detach()).hex()
