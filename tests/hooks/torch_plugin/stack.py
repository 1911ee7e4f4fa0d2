"""A stack of equal layers, and the plugin with a budget for everything that they need."""

import contextlib
import os
import tempfile

import torch
from torch import nn

import models
from terrace.torch.torch_versions import data_of

WIDTH, LAYERS = 128, 8
LAYER = WIDTH * WIDTH * 4  # bytes
WEIGHTS = LAYER * LAYERS


@contextlib.contextmanager
def budget(nbytes, tier="ddr", **settings):
    """The plugin with so many bytes of HBM for everything, and all that an update needs in DDR. No `tier`: nothing is said."""
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as policy:
        policy.write(f'version = 1\n[hbm]\nbudget = "{nbytes // 1024}KiB"\nreserve = "0"\n'
                     '[ddr]\nbudget = "256MiB"\nhugepages = false\n')
        if tier is not None:
            policy.write(f'[optimizer]\ntier = "{tier}"\n')
        policy.flush()
        os.environ["TERRACE_POLICY"] = policy.name
        try:
            with models.plugin(ddr_budget=0, **settings) as plugin:
                yield plugin
        finally:
            del os.environ["TERRACE_POLICY"]


def ledger(plugin):
    return plugin.ledger_of(torch.device("cpu"))


def layers(frozen=()):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    for index in frozen:
        model[index].weight.requires_grad_(False)
    return model


BATCH = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(3))


def away(model):
    """How many of the weights show something else than their bytes."""
    return sum(data_of(p).stride() == (0, 0) for p in model.parameters())


def whole_weights(model):
    return [p.detach().clone() for p in model.parameters()]


def train(model, optimizer, steps=3, between=lambda model, optimizer, step: None, micro_batches=1):
    seen = []
    for step in range(steps):
        for _ in range(micro_batches):
            loss = model(BATCH).pow(2).mean()
            loss.backward()
        seen.append(loss.detach().clone())
        between(model, optimizer, step)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return seen + whole_weights(model)


def adamw(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
