"""A client of bench/preload.py: a GPT in plain PyTorch that knows nothing of any memory runtime.

Prints one JSON line: ms_per_step, peak_gib (null where there is no GPU) and the losses as hexadecimal floats.
"""

import argparse
import json
import time

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

on_gpu = torch.cuda.is_available()


def arguments():
    parser = argparse.ArgumentParser()
    for name, value in (("layers", 16), ("dim", 4096), ("heads", 32), ("batch", 8), ("seq", 2048), ("vocab", 32000),
                        ("steps", 10), ("warmup", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--mode", choices=["plain", "checkpoint", "save_on_cpu"], default="checkpoint")
    parser.add_argument("--deterministic", action="store_true")
    return parser.parse_args()


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def attention(self, x):
        batch, seq, dim = x.shape
        qkv = self.qkv(x).view(batch, seq, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4)
        if hasattr(F, "scaled_dot_product_attention"):
            y = F.scaled_dot_product_attention(*qkv, is_causal=True)
        else:  # before PyTorch 2.0
            scores = qkv[0] @ qkv[1].transpose(-1, -2) / (dim // self.heads) ** 0.5
            y = scores.masked_fill(torch.ones(seq, seq, dtype=torch.bool).triu(1), float("-inf")).softmax(-1) @ qkv[2]
        return self.out(y.transpose(1, 2).reshape(batch, seq, dim))

    def forward(self, x):
        x = x + self.attention(self.before_attention(x))
        return x + self.mlp(self.before_mlp(x))


class Gpt(nn.Module):
    def __init__(self, options):
        super().__init__()
        self.checkpointed = options.mode == "checkpoint"
        self.embedding = nn.Embedding(options.vocab, options.dim)
        self.blocks = nn.ModuleList(Block(options.dim, options.heads) for _ in range(options.layers))
        self.norm, self.head = nn.LayerNorm(options.dim), nn.Linear(options.dim, options.vocab, bias=False)

    def forward(self, tokens, labels):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), labels.flatten())


def main():
    options = arguments()
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(options.deterministic)
    device = "cuda" if on_gpu else "cpu"
    model = Gpt(options).to(device)
    if on_gpu:
        model = model.bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, **({"fused": True} if on_gpu else {}))
    tokens = torch.randint(0, options.vocab, (options.batch, options.seq + 1), generator=torch.Generator().manual_seed(1))
    tokens = tokens.to(device)

    def step():
        if options.mode == "save_on_cpu":
            with torch.autograd.graph.save_on_cpu(pin_memory=on_gpu):
                loss = model(tokens[:, :-1], tokens[:, 1:])
        else:
            loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    losses = [step() for _ in range(options.warmup)]
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    losses += [step() for _ in range(options.steps)]
    if on_gpu:
        torch.cuda.synchronize()
    print(json.dumps({"ms_per_step": (time.perf_counter() - began) / options.steps * 1e3,
                      "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None,
                      "losses": [float(loss).hex() for loss in losses]}))


main()
