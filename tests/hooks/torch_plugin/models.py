"""Small models on the CPU, trained with and without the plugin, and compared bit for bit."""

import contextlib
import gc

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

SMALLEST = 4 << 10  # bytes of a tensor that moves, in these tests
FAST_LINK = 50e9
# Before 2.1, a checkpoint that is not reentrant holds its inputs itself: autograd does not save them.
CHECKPOINTS_SAVE_INPUTS = torch.__version__.split(".")[:2] >= ["2", "1"]


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2)) / (d // self.heads) ** 0.5
        mask = torch.ones(t, t, dtype=torch.bool, device=x.device).triu(1)
        y = scores.masked_fill(mask, float("-inf")).softmax(-1) @ v
        return x + self.out(y.transpose(1, 2).reshape(b, t, d))


class Dense(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Experts(nn.Module):
    """Top-2 routing: how many tokens an expert gets differs from step to step."""

    def __init__(self, dim, experts=4):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.gate = nn.Linear(dim, experts, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(dim, 2 * dim), nn.SiLU(), nn.Linear(2 * dim, dim))
                                     for _ in range(experts))

    def forward(self, x):
        flat = self.norm(x).flatten(0, 1)
        weight, chosen = self.gate(flat).softmax(-1).topk(2, -1)
        out = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            token, place = (chosen == index).nonzero(as_tuple=True)
            if token.numel():
                out = out.index_add(0, token, expert(flat[token]) * weight[token, place, None])
        return x + out.view_as(x)


class Model(nn.Module):
    def __init__(self, kind="gpt", dim=64, layers=3, vocab=128, checkpointed=None):
        super().__init__()
        self.checkpointed = checkpointed  # None, "reentrant" or "plain"
        self.emb = nn.Embedding(vocab, dim)
        feed = Dense if kind == "gpt" else Experts
        self.blocks = nn.ModuleList(nn.Sequential(Attention(dim, 4), feed(dim)) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids, labels):
        x = self.emb(ids)
        for block in self.blocks:
            if self.checkpointed:
                x = checkpoint(block, x, use_reentrant=self.checkpointed == "reentrant")
            else:
                x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), labels.flatten())


def train(model_options=None, steps=3, micro_batches=1, autocast=False, optimizer=None, batch=2, time=32,
          device="cpu"):
    """Losses, every gradient of every step and the last weights, as bytes that compare."""
    torch.manual_seed(0)
    model = Model(**(model_options or {})).to(device)
    opt = (optimizer or (lambda p: torch.optim.AdamW(p, lr=1e-2)))(model.parameters())
    generator = torch.Generator().manual_seed(1)
    seen = []
    for _ in range(steps):
        for _ in range(micro_batches):
            data = torch.randint(0, 128, (batch, time + 1), generator=generator).to(device)
            context = torch.autocast(device, dtype=torch.bfloat16) if autocast else contextlib.nullcontext()
            with context:
                loss = model(data[:, :-1], data[:, 1:])
            (loss / micro_batches).backward()
            seen.append(loss.detach().clone())
            del loss
        seen += [p.grad.clone() for p in model.parameters()]
        opt.step()
        opt.zero_grad(set_to_none=True)
    seen += [p.detach().clone() for p in model.parameters()]
    del model, opt
    gc.collect()
    return seen


def same(left, right):
    return len(left) == len(right) and all(
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8) if a.dim() else a,
                                                                  b.view(torch.uint8) if b.dim() else b)
        for a, b in zip(left, right))


@contextlib.contextmanager
def plugin(device="emulated", **settings):
    import terrace.torch

    options = dict(smallest=SMALLEST, emulated_link=FAST_LINK, join_daemon=False, ddr_budget=1 << 30)
    options.update(settings)
    enabled = terrace.torch.enable(device, **options)
    try:
        yield enabled
    finally:
        terrace.torch.disable()
