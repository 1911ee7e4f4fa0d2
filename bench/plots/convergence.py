#!/usr/bin/env python3
"""Draws what bench/convergence.py kept: docs/plots/data/*.json, or DIR/*.json, to docs/plots/*.svg, or OUT/*.svg.

    convergence.py [DIR [OUT]]

What a folder does not hold is not drawn. Needs matplotlib (Debian: python3-matplotlib).
"""
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "bench"))
from convergence import BOUNDS, CAPTION_FLOOR, SMOOTHED, smoothed  # noqa: E402

PLOTS = ROOT / "docs" / "plots"
MOST_POINTS = 300
STYLE = {"svg.hashsalt": "convergence", "svg.fonttype": "none", "font.size": 10, "axes.spines.top": False,
         "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25, "legend.frameon": False, "savefig.facecolor": "white"}
# Dark, orange and blue are told apart by the colour blind too; a second run of a type is a thin grey line.
COLOURS = {"fp32": "#222222", "fp32-ulp": "#999999", "bf16": "#0072b2", "fp8": "#d55e00"}
OURS, OTHER = "#0072b2", "#222222"


def need_matplotlib():
    global plt
    try:
        import matplotlib
    except ImportError:
        sys.exit("plots/convergence.py: there is no matplotlib; install it (Debian: python3-matplotlib)")
    matplotlib.use("svg")
    matplotlib.rcParams.update(STYLE)
    import matplotlib.pyplot as plt


def line(axes, values, **style):
    """A value a step, thinned out: the last one is always drawn."""
    xs = list(range(1, len(values) + 1))
    stride = max(1, len(xs) // MOST_POINTS)
    keep = sorted({*range(0, len(xs), stride), len(xs) - 1})
    axes.plot([xs[i] for i in keep], [values[i] for i in keep], **{"linewidth": 1.3, **style})


def two_panels(title):
    figure, (top, bottom) = plt.subplots(2, sharex=True, figsize=(7, 5.2), height_ratios=[2, 1], layout="constrained")
    top.set_title(title, loc="left")
    bottom.set_xlabel("step")
    return figure, top, bottom


def one_panel(title):
    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    axes.set_title(title, loc="left")
    axes.set_xlabel("step")
    return figure, axes


def ratios(losses, reference):
    return [a / b - 1 for a, b in zip(losses, reference)]


def draw_types(kept):
    types = {name: kept[f"types-{name}"] for name in COLOURS if f"types-{name}" in kept}
    if not types:
        return
    figure, top, bottom = two_panels(f"Training loss, running means of {SMOOTHED} steps")
    for name, run in types.items():
        line(top, smoothed(run["losses"]), color=COLOURS[name], label=name)
    top.set_ylabel("nats a byte")
    top.legend()
    for name, run in types.items():
        if name == "fp32" or "fp32" not in types:
            continue
        apart = ratios(smoothed(run["losses"]), smoothed(types["fp32"]["losses"]))
        line(bottom, [100 * value for value in apart], color=COLOURS[name])
    for name in ("bf16", "fp8"):
        for sign in (-100, 100):
            bottom.axhline(sign * BOUNDS[name], color=COLOURS[name], linewidth=0.8, linestyle=":")
    bottom.set_ylabel("% from fp32")
    save(figure, "types")

    figure, axes = one_panel("Held-out text")
    for name, run in types.items():
        points = [(one["step"], one["perplexity"]) for one in run["evaluations"]]
        axes.plot(*zip(*points), color=COLOURS[name], label=name, marker="o", markersize=3, linewidth=1)
    axes.set_yscale("log")
    axes.set_yticks([3, 4, 6, 10, 30, 100, 256], labels=["3", "4", "6", "10", "30", "100", "256"])
    axes.minorticks_off()
    axes.set_ylabel("perplexity of a byte")
    axes.legend()
    save(figure, "heldout")


def draw_peer(kept):
    if "peer" not in kept:
        return
    figure, top, bottom = two_panels("A tiny kimi_linear from the same weights, on the same batches")
    ours, theirs = kept["peer"]["terrace"], kept["peer"]["transformers"]
    line(top, theirs, color=OTHER, label="transformers", linewidth=2.6, alpha=0.5)
    line(top, ours, color=OURS, label="terrace", linewidth=1)
    top.set_ylabel("nats a byte")
    top.legend()
    # Two fp32 losses that are equal to the bit have no place on such an axis: half a unit of the last digit.
    line(bottom, [max(abs(value), 3e-8) for value in ratios(ours, theirs)], color=OURS, linewidth=1)
    bottom.axhline(BOUNDS["peer"], color=OTHER, linewidth=0.8, linestyle=":")
    bottom.set_yscale("log")
    bottom.set_ylabel("relative difference")
    save(figure, "peer")


def draw_images(kept):
    if "images" not in kept:
        return
    figure, axes = one_panel(f"Captions of images, running means of {SMOOTHED} steps")
    line(axes, smoothed(kept["images"]["images"]), color=OURS, label="pixels")
    line(axes, smoothed(kept["images"]["blank"]), color=OTHER, label="every image blank")
    axes.axhline(CAPTION_FLOOR, color=OTHER, linewidth=0.8, linestyle=":", label="the least without pixels")
    axes.set_yscale("log")
    axes.set_yticks([0.03, 0.1, 0.3, 1, 3], labels=["0.03", "0.1", "0.3", "1", "3"])
    axes.minorticks_off()
    axes.set_ylabel("nats a byte")
    axes.legend()
    save(figure, "images")


def draw_lora(kept):
    if "lora" not in kept:
        return
    figure, axes = one_panel("Adapters on a second text, the base frozen")
    line(axes, smoothed(kept["lora"]["losses"]), color=OURS, label=f"training, running mean of {SMOOTHED} steps")
    points = [(one["step"], one["loss"]) for one in kept["lora"]["evaluations"]]
    axes.plot(*zip(*points), color=OTHER, marker="o", markersize=3, linewidth=1, label="the text as a whole")
    axes.set_ylabel("nats a byte")
    axes.legend()
    save(figure, "lora")


def save(figure, name):
    out = Path(sys.argv[2]) if len(sys.argv) > 2 else PLOTS
    figure.savefig(out / f"{name}.svg", metadata={"Date": None})
    plt.close(figure)


def main():
    data = Path(sys.argv[1]) if len(sys.argv) > 1 else PLOTS / "data"
    kept = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(data.glob("*.json"))}
    if not kept:
        sys.exit(f"plots/convergence.py: {data} holds no curves; keep some: ./dev bench convergence --keep {data}")
    need_matplotlib()
    for draw in (draw_types, draw_peer, draw_images, draw_lora):
        draw(kept)


if __name__ == "__main__":
    main()
