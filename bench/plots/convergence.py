#!/usr/bin/env python3
"""Draws what bench/convergence.py kept: docs/plots/data/*.json to docs/plots/*.svg. Needs matplotlib (python3-matplotlib)."""
import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "convergence"
import matplotlib.pyplot as plt  # noqa: E402

PLOTS = Path(__file__).resolve().parent.parent.parent / "docs" / "plots"
MOST_POINTS = 400


def draw(name, title, curves, y):
    figure, axes = plt.subplots(figsize=(7, 4))
    for label, (xs, ys) in curves.items():
        stride = max(1, len(ys) // MOST_POINTS)
        axes.plot(xs[::stride], ys[::stride], label=label, linewidth=1)
    axes.set(title=title, xlabel="step", ylabel=y)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(PLOTS / f"{name}.svg", metadata={"Date": None})


def curve(losses):
    return list(range(1, len(losses) + 1)), losses


def main():
    data = Path(sys.argv[1]) if len(sys.argv) > 1 else PLOTS / "data"
    kept = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(data.glob("*.json"))}
    types = {name[len("types-"):]: run for name, run in kept.items() if name.startswith("types-")}
    if types:
        draw("types", "Training loss", {name: curve(run["losses"]) for name, run in types.items()}, "nats a byte")
        held = {name: ([e["step"] for e in run["evaluations"]], [e["perplexity"] for e in run["evaluations"]])
                for name, run in types.items()}
        draw("heldout", "Held-out perplexity", held, "perplexity of a byte")
    for name, title in (("peer", "Tiny kimi_linear"), ("images", "Captions")):
        if name in kept:
            draw(name, title, {label: curve(losses) for label, losses in kept[name].items()}, "nats")
    if "lora" in kept:
        draw("lora", "Adapters on a second text", {"loss": curve(kept["lora"]["losses"])}, "nats a byte")


if __name__ == "__main__":
    main()
