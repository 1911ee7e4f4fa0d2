#!/usr/bin/env python3
"""What a user would run instead of the trainer's attention residuals, on the shape of kernels_rows.cpp.

flash-linear-attention's fused_attnres (module fla.ops.attnres) where it can be imported, saying so on stderr where
not, and two PyTorch compositions: small operators, and the same through torch.compile. `kernels.py` starts this; rows:
bench/README.md.
"""

import argparse
import json
import sys

SOURCES, ROWS, WIDTH = 9, 8192, 7168
EPS = 1e-6
SAMPLES = 15


def say(text):
    print(f"attnres peers: {text}", file=sys.stderr)


def print_row(way, system, seconds):
    case = f"rows/attnres/{way}/{SOURCES}x{ROWS}x{WIDTH}"
    row = {"bench": "kernels", "case": case, "system": system, "metric": "seconds", "value": seconds, "unit": "s", "floor": None}
    print(json.dumps(row), flush=True)


def median_seconds(torch, launch):
    def seconds_of(count):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(count):
            launch()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / count

    seconds_of(3)
    count = max(1, min(200, int(4e-3 / seconds_of(2))))
    return sorted(seconds_of(count) for _ in range(SAMPLES))[SAMPLES // 2]


def composition(torch):
    def mix(query, sources, weight):
        values = torch.stack(list(sources))
        normal = torch.nn.functional.rms_norm(values.float(), (WIDTH,), weight, EPS)
        probability = torch.softmax(normal @ query, dim=0)
        return (probability.unsqueeze(-1) * values.float()).sum(0).to(values.dtype)

    return mix


def fused():
    from fla.ops.attnres import fused_attnres

    def mix(query, sources, weight):
        return fused_attnres(query=query, residuals=list(sources), rms_weight=weight, rms_eps=EPS)

    return mix


def measure(torch, system, mix):
    """Every array is larger than the caches, so one set is enough."""
    try:
        weights = torch.float32 if system != "fla" else torch.bfloat16
        sources = [
            torch.randn(1, ROWS, WIDTH, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(SOURCES)
        ]
        weight = torch.ones(WIDTH, device="cuda", dtype=weights).requires_grad_()
        query = (0.01 * torch.randn(WIDTH, device="cuda")).to(weights).requires_grad_()

        def forward():
            with torch.no_grad():
                mix(query, sources, weight)

        print_row("forward", system, median_seconds(torch, forward))
        h = mix(query, sources, weight)
        d_h = torch.randn_like(h)
        inputs = [*sources, query, weight]
        backward = lambda: torch.autograd.grad(h, inputs, d_h, retain_graph=True)  # noqa: E731
        print_row("backward", system, median_seconds(torch, backward))
    except Exception as error:  # noqa: BLE001: one that does not run does not take the others along
        say(f"{system}: {str(error).splitlines()[0] if str(error) else type(error).__name__}")
    finally:
        torch.cuda.empty_cache()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--device", default="auto", choices=["auto", "cuda", "emulated"])
    parser.add_argument("--build", help="not needed")
    options = parser.parse_args()
    try:
        import torch
    except ImportError as error:
        say(f"PyTorch cannot be imported ({error}): none are measured")
        return 0
    if options.device == "emulated" or not torch.cuda.is_available():
        say("they run on CUDA alone: none are measured")
        return 0
    try:
        measure(torch, "fla", fused())
    except ImportError as error:
        say(f"flash-linear-attention cannot be imported ({error}): fused_attnres is not measured")
    measure(torch, "torch", composition(torch))
    measure(torch, "torch_compile", torch.compile(composition(torch)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
