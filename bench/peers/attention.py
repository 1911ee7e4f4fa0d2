#!/usr/bin/env python3
"""PyTorch's scaled_dot_product_attention beside the trainer's dense attention, on the shapes of kernels_attention.cpp.

Each backend of PyTorch is a system of its own; one that does not take a shape is left out, saying so on stderr.
`kernels.py` starts this; rows: bench/README.md.
"""

import argparse
import json
import sys

SHAPES = (  # batch, length, heads, key heads, key width, value width
    (1, 8192, 32, 32, 128, 128),
    (1, 8192, 32, 8, 128, 128),
    (4, 4096, 32, 8, 64, 64),
    (1, 8192, 32, 32, 192, 128),
    (1, 32768, 16, 4, 128, 128),
)
BACKENDS = {"torch_flash": "FLASH_ATTENTION", "torch_cudnn": "CUDNN_ATTENTION"}
SETS_TOGETHER = 160 * 2**20  # bytes: over three times the largest L2 cache
SAMPLES = 15


def say(text):
    print(f"attention peers: {text}", file=sys.stderr)


def print_row(case, system, seconds):
    row = {"bench": "kernels", "case": case, "system": system, "metric": "seconds", "value": seconds, "unit": "s", "floor": None}
    print(json.dumps(row), flush=True)


def median_seconds(torch, launches):
    def seconds_of(count, first):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for i in range(count):
            launches[(first + i) % len(launches)]()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / count

    seconds_of(2 * len(launches), 0)
    count = max(1, min(200, int(4e-3 / seconds_of(2, 0))))
    samples = sorted(seconds_of(count, i * count) for i in range(SAMPLES))
    return samples[SAMPLES // 2]


def arrays(torch, shape):
    """q, k, v as the operator has them in memory, (B, T, H, D), seen as PyTorch wants them, (B, H, T, D)."""
    batch, length, heads, key_heads, key_width, value_width = shape
    rows = ((heads, key_width), (key_heads, key_width), (key_heads, value_width))
    return [
        torch.randn(batch, length, count, width, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
        for count, width in rows
    ]


def attend(torch, q, k, v):
    grouped = q.shape[1] != k.shape[1]
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)


def forward(torch, shape):
    q, k, v = (each.detach() for each in arrays(torch, shape))

    def launch():
        with torch.no_grad():
            attend(torch, q, k, v)

    return launch


def backward(torch, shape):
    inputs = arrays(torch, shape)
    out = attend(torch, *inputs)
    d_out = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, inputs, d_out, retain_graph=True)


def measure(torch, shape, system, prepare):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    batch, length, heads, key_heads, key_width, value_width = shape
    case = f"attention/{prepare.__name__}/" + "x".join(map(str, shape))
    set_bytes = 2 * batch * length * (heads + key_heads) * (key_width + value_width)
    try:
        with sdpa_kernel(getattr(SDPBackend, BACKENDS[system])):
            launches = [prepare(torch, shape) for _ in range(max(1, -(-SETS_TOGETHER // set_bytes)))]
            print_row(case, system, median_seconds(torch, launches))
    except (RuntimeError, AttributeError) as error:  # one that does not run does not take the others along
        say(f"{case}: {system}: {str(error).splitlines()[0] if str(error) else type(error).__name__}")
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
    for shape in SHAPES:
        for system in BACKENDS:
            for prepare in (forward, backward):
                measure(torch, shape, system, prepare)
    return 0


if __name__ == "__main__":
    sys.exit(main())
