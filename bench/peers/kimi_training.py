#!/usr/bin/env python3
"""Trains a public model in transformers as moe_trainer does: the same weights, the same batches, the same AdamW.

    kimi_training.py MODEL --tokens FILE --config FILE [--device cpu|cuda]

FILE of --tokens: a JSON line {"ids": [[...]], "labels": [[...]]} a step. One JSON line {"step", "loss", "margin"} a step on
stdout: the mean loss before the update, and the smallest distance, over all tokens and layers, between the score of the last
expert that was chosen and of the next. Everything is fp32, without TF32, and plain PyTorch: no kernel of another package is used.
"""
import argparse
import json
import math
import os
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch  # noqa: E402
import transformers  # noqa: E402

DEFAULTS = {"batch": 2, "length": 64, "steps": 100, "schedule_steps": 100, "warmup_steps": 10, "learning_rate": 3e-3,
            "final_learning_rate": 3e-4, "beta1": 0.9, "beta2": 0.95, "adam_eps": 1e-8, "weight_decay": 0.1,
            "clip_norm": 1.0}


def training_of(path):
    values, section = dict(DEFAULTS), ""
    for line in open(path, encoding="utf-8"):
        line = line.split("#")[0].strip()
        if line.startswith("["):
            section = line.strip("[]")
        elif "=" in line and section == "train":
            key, text = (part.strip() for part in line.split("=", 1))
            if key in values:
                values[key] = float(text)
    return values


def learning_rate_at(t, step):
    """Linear warm-up, then a cosine: examples/moe_trainer/optimizer.cpp."""
    if step <= t["warmup_steps"]:
        return t["learning_rate"] * step / t["warmup_steps"]
    done = min(1.0, (step - t["warmup_steps"]) / max(1, t["schedule_steps"] - t["warmup_steps"]))
    share = 0.5 * (1 + math.cos(math.pi * done))
    return t["final_learning_rate"] + (t["learning_rate"] - t["final_learning_rate"]) * share


def is_matrix(name, parameter):
    """What decays: matrices and stacks of them; not norms, gates' vectors, nor a convolution's taps."""
    return parameter.dim() >= 2 and "conv1d" not in name and not name.endswith(("A_log", "dt_bias"))


def clip(parameters, most):
    norm = torch.sqrt(sum((p.grad.double() ** 2).sum() for p in parameters))
    if most > 0 and norm > most:
        for p in parameters:
            p.grad.mul_(float(most / norm))


class InFloat64:
    """Stands in for torch in a module of transformers that names float32 outright, so that it computes in float64."""

    float32 = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


def make_model(options):
    model = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32, attn_implementation="eager",
                                                              experts_implementation="eager")
    if options.dtype == "float64":
        torch.Tensor.float = torch.Tensor.double
        sys.modules[type(model).__module__].torch = InFloat64()
        model = model.double()
    return model.to(options.device).train()


class Routers:
    """Moves their biases towards equal counts once a step, as the trainer does; transformers leaves that to its user. Keeps
    each one's choice of the step and how near it was: a token whose two scores lie within rounding goes either way."""

    RATE = 1e-3

    def __init__(self, model):
        self.chosen, self.margins = {}, {}
        for module in model.modules():
            if hasattr(module, "e_score_correction_bias") and hasattr(module, "weight"):
                module.register_forward_hook(self.seen)

    @torch.no_grad()
    def seen(self, gate, inputs, out):
        self.chosen[gate] = out[2]
        rows = inputs[0].reshape(-1, gate.weight.shape[1]).to(gate.weight.dtype)
        scores = torch.nn.functional.linear(rows, gate.weight).sigmoid() + gate.e_score_correction_bias
        best = scores.topk(out[2].shape[-1] + 1, dim=-1)[0]
        self.margins[gate] = (best[:, -2] - best[:, -1]).min().item()

    def step(self):
        for gate, chosen in self.chosen.items():
            bias = gate.e_score_correction_bias
            counts = torch.bincount(chosen.flatten(), minlength=bias.numel()).float()
            bias += self.RATE * torch.sign(counts.mean() - counts)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("model")
    parser.add_argument("--tokens", required=True)
    parser.add_argument("--config", required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "float64"])
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    training = training_of(options.config)
    model = make_model(options)
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    groups = [{"params": [p for n, p in named if is_matrix(n, p)], "weight_decay": training["weight_decay"]},
              {"params": [p for n, p in named if not is_matrix(n, p)], "weight_decay": 0.0}]
    print("no decay: " + " ".join(n for n, p in named if not is_matrix(n, p)), file=sys.stderr)
    adam = torch.optim.AdamW(groups, lr=1.0, betas=(training["beta1"], training["beta2"]), eps=training["adam_eps"])
    routers = Routers(model)
    for step, line in enumerate(open(options.tokens, encoding="utf-8"), 1):
        batch = {key: torch.tensor(value, device=options.device) for key, value in json.loads(line).items()}
        logits = model(input_ids=batch["ids"], use_cache=False).logits.float()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        adam.zero_grad()
        loss.backward()
        trained = [p for _, p in named if p.grad is not None]
        clip(trained, training["clip_norm"])
        for group in adam.param_groups:
            group["lr"] = learning_rate_at(training, step)
        adam.step()
        routers.step()
        print(json.dumps({"step": step, "loss": loss.item(), "margin": min(routers.margins.values())}), flush=True)


if __name__ == "__main__":
    main()
