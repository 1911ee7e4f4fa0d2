#!/usr/bin/env python3
"""What a user would run instead of the trainer's operators, on the same shapes: `./dev bench kernels --peers`.

Needs PyTorch and a CUDA device and says so where one is missing. flash-linear-attention (the module fla) and FlashMLA
(flash_mla) are measured where they can be imported. Scripts beside this one measure families of their own; they
are started from here. Rows and names of cases: bench/README.md, bench/kernels.hpp.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

OTHER_SCRIPTS = {"loss": "linear_cross_entropy", "rows": "attnres", "attention": "attention"}  # by family
SETS_TOGETHER = 160 * 2**20  # bytes: over three times the largest L2 cache
MOST_SETS = 64
SAMPLE_SECONDS = 2e-3

GROUPED = ((128, 512, 1536, 2048), (112, 1024, 6144, 3584), (16, 4096, 4096, 7168), (64, 256, 2048, 2048))
SMALL_GROUPED = ((14, 2048, 2048), (14, 6144, 3584), (896, 2048, 2048))
KDA = ((1, 8192, 96, 128), (4, 4096, 32, 128), (1, 65536, 16, 128))


def say(text):
    print(f"peers: {text}", file=sys.stderr)


def print_row(case, system, metric, value, unit):
    row = {"bench": "kernels", "case": case, "system": system, "metric": metric, "value": value, "unit": unit, "floor": None}
    print(json.dumps(row), flush=True)


def skewed_counts(groups, rows):
    whole = sum(1.0 / (1 + g) for g in range(groups))
    counts = [int(rows / (1 + g) / whole) for g in range(groups)]
    counts[0] += rows - sum(counts)
    return counts


def small_counts(groups):
    return [1 + g * 37 % 64 for g in range(groups)]


class Peers:
    def __init__(self, torch, options):
        self.torch = torch
        self.options = options

    def wants(self, case):
        family = case.split("/", 1)[0]
        return self.options.case in case and self.options.family in ("", family)

    def seconds_of(self, launches, count, turn):
        begin, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for i in range(count):
            launches[(turn + i) % len(launches)]()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / count

    def median_seconds(self, launches):
        self.seconds_of(launches, 2 * len(launches), 0)  # compiles, tunes, takes memory
        once = self.seconds_of(launches, 2, 0)
        count = max(1, min(200, int(SAMPLE_SECONDS / once)))
        spent = 0.0
        while spent < 0.05:
            spent += count * self.seconds_of(launches, count, 0) + 1e-5
        wanted = min(self.options.samples, 3) if once > 0.2 else self.options.samples
        samples = sorted(self.seconds_of(launches, count, i * count) for i in range(wanted))
        return samples[wanted // 2]

    def measure(self, case, system, set_bytes, prepare):
        """prepare() makes one set of random arrays and returns what launches the case on it."""
        if not self.wants(case):
            return
        try:
            sets = max(1, min(MOST_SETS, -(-SETS_TOGETHER // set_bytes)))
            print_row(case, system, "seconds", self.median_seconds([prepare() for _ in range(sets)]), "s")
        except Exception as error:  # noqa: BLE001  one peer that fails does not take the others along
            say(f"{case}: {system}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        finally:
            self.torch.cuda.empty_cache()

    def random(self, *shape, dtype=None, scale=1.0):
        dtype = dtype or self.torch.bfloat16
        return (self.torch.randn(*shape, device="cuda", dtype=self.torch.float32) * scale).to(dtype)


# ---------------------------------------------------------------- grouped products

def grouped_case(peers, shape, counts, n, k):
    torch = peers.torch
    groups, rows = len(counts), sum(counts)
    ends = torch.tensor(counts, device="cuda", dtype=torch.int32).cumsum(0, dtype=torch.int32)

    def forward():
        a, w = peers.random(rows, k), peers.random(groups, n, k)
        return lambda: torch._grouped_mm(a, w.transpose(-2, -1), offs=ends)

    def input_gradient():
        d_c, w = peers.random(rows, n), peers.random(groups, n, k)
        return lambda: torch._grouped_mm(d_c, w, offs=ends)

    def weight_gradient():
        d_c, a = peers.random(rows, n), peers.random(rows, k)
        return lambda: torch._grouped_mm(d_c.t(), a, offs=ends)

    set_bytes = 2 * (rows * (n + k) + groups * n * k)
    for what in (forward, input_gradient, weight_gradient):
        peers.measure(f"grouped/{what.__name__}/{shape}", "torch_grouped_mm", set_bytes, what)


def grouped(peers):
    if not hasattr(peers.torch, "_grouped_mm"):
        say("this PyTorch has no _grouped_mm: not measured")
        return
    for groups, rows, n, k in GROUPED:
        shape = f"{groups}x{rows}x{n}x{k}"
        grouped_case(peers, shape, [rows] * groups, n, k)
        grouped_case(peers, f"{shape}/skewed", skewed_counts(groups, groups * rows), n, k)
    for groups, n, k in SMALL_GROUPED:
        grouped_case(peers, f"{groups}x1..64x{n}x{k}", small_counts(groups), n, k)


# ---------------------------------------------------------------- KDA

def kda(peers):
    torch = peers.torch
    try:
        from fla.ops.kda import chunk_kda
    except ImportError as error:
        say(f"kda: fla cannot be imported ({error}): not measured")
        return
    for batch, length, heads, width in KDA:
        def inputs(batch=batch, length=length, heads=heads, width=width):
            wide = [peers.random(batch, length, heads, width).requires_grad_() for _ in range(4)]
            beta = peers.random(batch, length, heads).requires_grad_()
            a_log = peers.random(heads, dtype=torch.float32, scale=0.3).requires_grad_()
            dt_bias = peers.random(heads * width, dtype=torch.float32, scale=0.3).requires_grad_()
            return [*wide, beta, a_log, dt_bias]

        def run(tensors):
            q, k, v, gate, beta, a_log, dt_bias = tensors
            return chunk_kda(q, k, v, gate, beta, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
                             use_beta_sigmoid_in_kernel=True, safe_gate=True, lower_bound=-5.0, A_log=a_log,
                             dt_bias=dt_bias)[0]

        def forward():
            tensors = [tensor.detach() for tensor in inputs()]

            def launch():
                with torch.no_grad():
                    run(tensors)
            return launch

        def backward():
            tensors = inputs()
            out = run(tensors)
            d_out = torch.randn_like(out)
            return lambda: torch.autograd.grad(out, tensors, d_out, retain_graph=True)

        set_bytes = 2 * 5 * batch * length * heads * width
        shape = f"{batch}x{length}x{heads}x{width}"
        peers.measure(f"kda/forward/{shape}", "fla_chunk_kda", set_bytes, forward)
        peers.measure(f"kda/backward/{shape}", "fla_chunk_kda", set_bytes, backward)


# ---------------------------------------------------------------- sparse attention

LENGTH, HEADS, TOP_K = 8192, 64, 2048
WIDTHS = {"latent": (576, 512), "plain": (128, 128)}  # of keys and of values; latent: values are the keys' first 512
QUERIES_AT_ONCE = 128  # of which the gathered latent keys take 300 MB


def selection(torch):
    """(LENGTH, TOP_K) positions, ascending, causal, random; -1 past the end."""
    picked = []
    position = torch.arange(LENGTH, device="cuda")
    for token in range(0, LENGTH, QUERIES_AT_ONCE):
        tokens = position[token:token + QUERIES_AT_ONCE, None]
        score = torch.rand(QUERIES_AT_ONCE, LENGTH, device="cuda").masked_fill(position[None] > tokens, -1.0)
        best, index = score.topk(TOP_K, dim=1)
        index = index.masked_fill(best < 0, LENGTH).sort(dim=1).values
        picked.append(index.masked_fill(index == LENGTH, -1))
    return torch.cat(picked)


def composed_attention(torch, tensors, index):
    """Gather, two products and a softmax, in chunks of queries; then sink and gate: q (T, H, K), k (T, K), v (T, V) or
    none, sink (H), gate (T, H, V)."""
    q, k, v, sink, gate = tensors
    value_width = gate.shape[-1]
    outs = []
    for begin in range(0, LENGTH, QUERIES_AT_ONCE):
        here = slice(begin, begin + QUERIES_AT_ONCE)
        chosen = index[here]
        flat = chosen.clamp(min=0).flatten()
        keys = k.index_select(0, flat).view(*chosen.shape, -1)
        values = keys[..., :value_width] if v is None else v.index_select(0, flat).view(*chosen.shape, -1)
        scores = torch.einsum("thd,tkd->thk", q[here], keys) * k.shape[-1]**-0.5
        scores = scores.masked_fill((chosen < 0)[:, None], float("-inf"))
        share = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        attended = torch.einsum("thk,tkd->thd", share, values)
        # A sink in the denominator scales the sum: e^lse / (e^lse + e^sink).
        kept = torch.sigmoid(torch.logsumexp(scores.float(), dim=-1) - sink)[..., None].to(q.dtype)
        outs.append(attended * kept * torch.sigmoid(gate[here]))
    return outs


def dsa_form(peers, form, index):
    torch = peers.torch
    key_width, value_width = WIDTHS[form]
    names = [f"dsa/{way}/{form}/1x{LENGTH}x{HEADS}x{TOP_K}" for way in ("forward", "backward")]

    def inputs():
        q, gate = peers.random(LENGTH, HEADS, key_width), peers.random(LENGTH, HEADS, value_width)
        v = None if form == "latent" else peers.random(LENGTH, value_width)
        return q, peers.random(LENGTH, key_width), v, peers.random(HEADS, dtype=torch.float32), gate

    def forward():
        tensors = inputs()

        def launch():
            with torch.no_grad():
                composed_attention(torch, tensors, index)
        return launch

    def backward():
        tensors = inputs()
        learned = [tensor.requires_grad_() for tensor in tensors if tensor is not None]
        outs = composed_attention(torch, tensors, index)
        d_outs = [torch.randn_like(out) for out in outs]
        return lambda: torch.autograd.grad(outs, learned, d_outs, retain_graph=True)

    set_bytes = 2 * LENGTH * HEADS * (key_width + value_width)
    peers.measure(names[0], "torch_composition", set_bytes, forward)
    peers.measure(names[1], "torch_composition", set_bytes, backward)
    if form != "latent" or not peers.wants(names[0]):
        return
    try:
        from flash_mla import flash_mla_sparse_fwd
    except ImportError as error:
        say(f"dsa: flash_mla cannot be imported ({error}): not measured")
        return

    def public_kernel():
        q, kv = peers.random(LENGTH, HEADS, key_width), peers.random(LENGTH, 1, key_width)
        chosen = index.to(torch.int32).view(LENGTH, 1, TOP_K)
        return lambda: flash_mla_sparse_fwd(q, kv, chosen, key_width**-0.5)

    peers.measure(names[0], "flash_mla_without_sink_and_gate", set_bytes, public_kernel)


def dsa(peers):
    index = selection(peers.torch)
    for form in WIDTHS:
        dsa_form(peers, form, index)


def run_other_scripts(options):
    for family, name in OTHER_SCRIPTS.items():
        script = Path(__file__).resolve().with_name(f"{name}.py")
        if options.family not in ("", family) or not script.is_file():
            continue
        answer = subprocess.run([sys.executable, str(script), "--device", "cuda"], stdout=subprocess.PIPE, text=True, check=False)
        for line in answer.stdout.splitlines():
            if line.strip() and options.case in json.loads(line)["case"]:
                print(line, flush=True)
        if answer.returncode != 0:
            say(f"{script.name} failed with exit code {answer.returncode}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--device", default="auto", choices=["auto", "cuda", "emulated"])
    parser.add_argument("--build", help="not needed")
    parser.add_argument("--family", default="")
    parser.add_argument("--case", default="", help="only cases whose name contains this")
    parser.add_argument("--samples", type=int, default=15)
    options = parser.parse_args()
    try:
        import torch
    except ImportError as error:
        say(f"PyTorch cannot be imported ({error}): no peers are measured")
        return 0
    if options.device == "emulated" or not torch.cuda.is_available():
        say("peers run on CUDA alone: none are measured")
        return 0
    peers = Peers(torch, options)
    for family in (kda, dsa, grouped):
        if options.family in ("", family.__name__):
            family(peers)
    torch.cuda.empty_cache()
    run_other_scripts(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
