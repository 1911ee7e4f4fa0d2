#!/usr/bin/env python3
"""Reads an exported model with transformers and prints {"loss": ...} of it on the tokens of a file, as one JSON line.

    export_check.py MODEL --tokens FILE [--device cpu|cuda]     FILE: {"ids": [[...]], "labels": [[...]]} a line
"""
import argparse
import json
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch  # noqa: E402
import transformers  # noqa: E402


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("model")
    parser.add_argument("--tokens", required=True)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    model, told = transformers.AutoModelForCausalLM.from_pretrained(
        options.model, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    model = model.to(options.device).eval()
    total, count = 0.0, 0
    with torch.no_grad():
        for line in open(options.tokens, encoding="utf-8"):
            batch = {key: torch.tensor(value, device=options.device) for key, value in json.loads(line).items()}
            logits = model(input_ids=batch["ids"], use_cache=False).logits.double()
            labels = batch["labels"].flatten()
            total += torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels, reduction="sum").item()
            count += labels.numel()
    print(json.dumps({"loss": total / count, "missing": sorted(told["missing_keys"]),
                      "unexpected": sorted(told["unexpected_keys"])}))


if __name__ == "__main__":
    main()
